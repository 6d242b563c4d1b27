"""The CUDA attention backends against each other and against the device's memory bandwidth.

    python -m benchmarks attention_backends [--shapes NAME ...] [--seed N] [--output FILE]

For each shape (heads of Llama-3.2-1B and Llama-3.1-8B, bfloat16): decode of 1, 16 and 64 sequences
at contexts of 1k to 32k tokens, 64 and 256 new tokens behind 16k, a prompt of 8k, and a prefix of
8k that 16 or 64 sequences share. Every result is compared with the reference backend's over the
same pool in the same run. Times are per layer and call: issued one by one, and replayed from a CUDA
graph where a backend can be captured. The calls go round over layers whose KV together exceeds the
device's caches. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_limits import measure_limits
from benchmarks.report import print_table, save
from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend, CapturableBackend
from model_worker.attention.choice import available_libraries, build_attention
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.attention.sdpa import SdpaBackend

DEVICE = torch.device("cuda")
BLOCK_SIZES = {"varlen": 256}  # 32 for the others
ROTATED_BYTES = 512 * 2**20  # several times any device's caches
MAX_LAYERS = 64
MAX_SECONDS = 0.3  # for the repetitions of one figure
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences of ``new`` tokens each behind ``context``, of which ``shared`` are one
    prefix of all."""

    name: str
    batch: int
    context: int
    new: int = 1
    shared: int = 0


SHAPES = (Shape("llama-3.2-1b", 32, 8, 64), Shape("llama-3.1-8b", 32, 8, 128))
CASES = (
    *(
        Case("decode", batch, context)
        for batch in (1, 16, 64)
        for context in (1024, 4096, 16384, 32768)
    ),
    Case("suffix", 1, 16384, 64),
    Case("suffix", 1, 16384, 256),
    Case("prefill", 1, 0, 8192),
    Case("shared prefix", 16, 8192 + 256, 1, 8192),
    Case("shared prefix", 64, 8192 + 256, 1, 8192),
)


class Workload:
    """A pool with random rows in which the case's sequences lie scattered, and one step over it."""

    def __init__(
        self, shape: Shape, case: Case, block_size: int, dtype: torch.dtype, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shared_blocks = case.shared // block_size
        own_blocks = -(-(case.context + case.new) // block_size) - shared_blocks
        num_blocks = shared_blocks + case.batch * own_blocks
        name = str(dtype).removeprefix("torch.")
        layer_bytes = 2 * num_blocks * block_size * shape.kv_heads * shape.head_dim * dtype.itemsize
        num_layers = max(1, min(MAX_LAYERS, ROTATED_BYTES // layer_bytes))
        spec = KVCacheSpec(
            block_size, num_layers, shape.kv_heads, shape.head_dim, name, dtype.itemsize
        )
        self.tier = DeviceTier(spec, num_blocks, DEVICE)
        for tensor in self.tier.tensors:
            tensor.normal_()
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        prefix = ids[:shared_blocks]
        self.spans = tuple(
            SequenceSpan(
                case.new * i,
                case.new,
                case.context,
                prefix + ids[shared_blocks + own_blocks * i :][:own_blocks],
            )
            for i in range(case.batch)
        )
        slots = [
            span.block_ids[p // block_size] * block_size + p % block_size
            for span in self.spans
            for p in range(span.context_len, span.kv_len)
        ]
        self.slots = torch.tensor(slots, device=DEVICE)
        num_tokens = case.batch * case.new
        self.query, self.key, self.value = (
            torch.randn(1, num_tokens, heads, shape.head_dim, device=DEVICE, dtype=dtype)
            .transpose(1, 2)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )  # fmt: skip
        self.scaling = shape.head_dim**-0.5

    def forward(self, backend: AttentionBackend, plan: object, layer: int = 0) -> torch.Tensor:
        metadata = AttentionMetadata(backend, self.slots, self.spans, plan)
        return backend.forward(layer, self.query, self.key, self.value, self.scaling, metadata)

    def forward_all(self, backend: AttentionBackend, plan: object) -> None:
        for layer in range(self.tier.spec.num_layers):
            self.forward(backend, plan, layer)


def bytes_read(shape: Shape, case: Case, itemsize: int) -> int:
    """Of KV, each row once, which is the least that a layer can read."""
    tokens = case.shared + case.batch * (case.context + case.new - case.shared)
    return 2 * tokens * shape.kv_heads * shape.head_dim * itemsize


def operations(shape: Shape, case: Case) -> int:
    """Of both products, causal."""
    seen = case.new * case.context + case.new * (case.new + 1) // 2
    return 4 * case.batch * seen * shape.heads * shape.head_dim


def seconds_per_layer(run: Callable[[], None], num_layers: int) -> float:
    """Median over repetitions of ``run``, timed on the device, divided by its layers."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + MAX_SECONDS
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / num_layers)
    return statistics.median(times)


def prepare_seconds(backend: AttentionBackend, work: Workload) -> float:
    """The host's share of a step after the first; it is paid once for all layers."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        backend.prepare(work.spans)
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def replayed(backend: CapturableBackend, work: Workload) -> Callable[[], None] | None:
    """All layers from a CUDA graph; None where the step is too large for one."""
    plan = backend.reserve(
        num_rows=work.spans[-1].query_stop,
        max_spans=len(work.spans),
        max_kv_len=max(span.kv_len for span in work.spans),
    )
    if not backend.refill(plan, work.spans):
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work.forward_all(backend, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.forward_all(backend, plan)
    return graph.replay


def difference(backend: AttentionBackend, work: Workload) -> float:
    """The largest one to the reference backend, both over layer 0."""
    reference = SdpaBackend(work.tier)
    wanted = work.forward(reference, reference.prepare(work.spans))
    output = work.forward(backend, backend.prepare(work.spans))
    assert bool(output.isfinite().all())
    return float((output.float() - wanted.float()).abs().max())


def measure(
    name: str, shape: Shape, case: Case, dtype: torch.dtype, seed: int, bandwidth: float
) -> dict[str, Any]:
    work = Workload(shape, case, BLOCK_SIZES.get(name, 32), dtype, seed)
    backend = build_attention(name, work.tier, shape.heads, dtype)
    num_layers = work.tier.spec.num_layers
    off = difference(backend, work)
    plan = backend.prepare(work.spans)
    eager = seconds_per_layer(lambda: work.forward_all(backend, plan), num_layers)
    graph = None
    if isinstance(backend, CapturableBackend) and case.new <= 256:
        replay = replayed(backend, work)
        graph = None if replay is None else seconds_per_layer(replay, num_layers)
    best = eager if graph is None else min(eager, graph)
    return {
        "shape": shape.name,
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        "new": case.new,
        "dtype": work.tier.spec.dtype,
        "backend": name,
        "call_us": round(eager * 1e6, 1),
        "graph_us": None if graph is None else round(graph * 1e6, 1),
        "bandwidth_share": round(bytes_read(shape, case, dtype.itemsize) / bandwidth / best, 3),
        "tflops": round(operations(shape, case) / best / 1e12, 1),
        "prepare_us": round(prepare_seconds(backend, work) * 1e6, 1),
        "difference": float(f"{off:.2g}"),
        "is_equal": off <= TOLERANCES[dtype],
    }


def measure_all(
    shapes: list[Shape], backends: list[str], seed: int, bandwidth: float, failures: list[str]
) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        # float32 is there for equality: one decode and one chunk.
        exact = (Case("decode", 4, 2048), Case("suffix", 2, 1024, 64))
        for dtype, cases in ((torch.float32, exact), (torch.bfloat16, CASES)):
            for case in cases:
                for name in backends if dtype is torch.bfloat16 else {"triton"} & set(backends):
                    try:
                        yield measure(name, shape, case, dtype, seed, bandwidth)
                    except (ImportError, RuntimeError, ValueError) as error:
                        failures.append(f"{name}, {shape.name}, {case}: {error}"[:500])
                        print(failures[-1], file=sys.stderr, flush=True)
                    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_backends needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    limits = measure_limits(DEVICE, torch.bfloat16, scale=1)
    backends = [*sorted(available_libraries(), reverse=True), "sdpa"]
    print(f"{torch.cuda.get_device_name()}: {limits.memory_bytes_s / 1e9:.0f} GB/s; {backends}")
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with torch.inference_mode():
        bandwidth = limits.memory_bytes_s
        for row in measure_all(shapes, backends, arguments.seed, bandwidth, failures):
            print(*row.values(), flush=True)
            rows.append(row)
    if rows:
        print_table([tuple(row.values()) for row in rows], tuple(rows[0]))
    results = {
        "device": torch.cuda.get_device_name(),
        "memory_bytes_s": limits.memory_bytes_s,
        "product_operations_s": limits.product_operations_s,
        "rows": rows,
        "failures": failures,
    }
    save("attention_backends", __doc__ or "", results, arguments.output, arguments.seed)
    wrong = [row for row in rows if not row["is_equal"]]
    for row in wrong:
        print(f"not equal to the reference: {row}", file=sys.stderr)
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
