# The gateway: HTTP, tokenizer, sessions and routing. Holds no weights and no PyTorch.
#
#   docker build -f deploy/gateway.Dockerfile -t headstart-gateway .

FROM python:3.11-slim AS build
WORKDIR /source
COPY constraints.txt ./
RUN python -m venv --without-pip /opt/headstart \
 && pip install --no-cache-dir -c constraints.txt setuptools
COPY pyproject.toml README.md LICENSE ./
COPY service service
COPY cache_store cache_store
COPY model_worker model_worker
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/headstart/bin/python install --no-cache-dir -c constraints.txt \
      /wheels/headstart-*.whl

FROM python:3.11-slim
# The number stands in deploy/make-secrets.sh too, which gives this user the secrets.
RUN groupadd --gid 10001 headstart \
 && useradd --uid 10001 --gid headstart --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin headstart
COPY --from=build /opt/headstart /opt/headstart
# The root file system may be read-only: nothing is compiled or cached at run time.
ENV PATH=/opt/headstart/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["headstart"]
CMD ["gateway", "--help"]
