"""What the machine itself can do: multiply matrices and read memory.

Owns the two measurements; how they bound a server is benchmarks.peers.limits' matter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

GEMM_SHAPES = ((512, 576, 1_536), (512, 1_536, 576), (2_048, 2_048, 2_048))
READ_BYTES = 512 * 2**20
REPETITIONS = 9


@dataclass(frozen=True, slots=True)
class Machine:
    """Best of REPETITIONS, with medians beside them: other programs may share the machine."""

    gemm_gflops: float  # 1e9 float32 operations a second, of the best shape
    gemm_gflops_median: float
    read_gb_per_s: float  # 1e9 bytes a second, streamed from memory
    read_gb_per_s_median: float

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


def measure_machine(num_threads: int) -> Machine:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        best, median = max(_gemm(*shape) for shape in GEMM_SHAPES)
        read_best, read_median = _read()
    finally:
        torch.set_num_threads(before)
    return Machine(best, median, read_best, read_median)


def _gemm(rows: int, inner: int, columns: int) -> tuple[float, float]:
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    output = torch.empty(rows, columns)
    calls = max(1, 2_000_000_000 // (2 * rows * inner * columns))

    def multiply() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=output)

    return _rates(multiply, 2 * rows * inner * columns * calls)


def _read() -> tuple[float, float]:
    values = torch.ones(READ_BYTES // 4)
    return _rates(lambda: values.sum(), READ_BYTES)


def _rates(action: Callable[[], object], amount: int) -> tuple[float, float]:
    """(best, median) of ``amount`` a second, in 1e9."""
    action()
    rates = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        action()
        rates.append(amount / (time.perf_counter() - started) / 1e9)
    return max(rates), statistics.median(rates)
