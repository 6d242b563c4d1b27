"""The CPU's kernels against torch's operations and the machine's limits.

    python -m benchmarks.kernels [--repetitions N] [--output FILE]

Workload: all linear layers of the demo model's shapes, output embedding included, at 1 to 128 rows:
the compiled kernel over float32 and int8 weights, numpy's BLAS and torch's linear, in turn. Then
attention of one step's decode rows in all layers over 512 and 4,096 tokens of context, 1 and 8
sequences, apart and behind one shared prefix, by the compiled kernel and by torch's. Medians; the
limit is reading what must be read once at the speed that the same run measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.peers.limits import DEMO
from benchmarks.peers.machine import Machine, measure_machine
from benchmarks.report import print_table, save
from model_worker.attention.metadata import SequenceSpan
from model_worker.compiled.attention import attend
from model_worker.compiled.linear import linear
from model_worker.compiled.panels import pack
from model_worker.compiled.plan import plan_attention
from model_worker.cores import usable_cores

ROWS = (1, 4, 8, 16, 32, 64, 128)
CASES = ((1, 512, False), (8, 512, False), (1, 4096, False), (8, 4096, False), (8, 4096, True))
BLOCK = 32
Matrix = NDArray[Any]
Actions = Mapping[str, Callable[[], object]]
_REST_S = 0.02  # the threads of the library before spin for a while when they have nothing to do


def in_turn(actions: Actions, repetitions: int) -> dict[str, float]:
    """Median milliseconds of each, run one after another, over and over."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for _ in range(repetitions):
        for name, action in actions.items():
            time.sleep(_REST_S)
            started = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(times) * 1e3, 2) for name, times in seconds.items()}


def layer_shapes() -> list[tuple[int, int]]:
    """(outputs, inputs): query, key and value as one, and so gate and up, as they are run."""
    heads = (DEMO.heads + 2 * DEMO.kv_heads) * DEMO.head_dim
    layer = [
        (heads, DEMO.hidden),
        (DEMO.hidden, DEMO.heads * DEMO.head_dim),
        (2 * DEMO.inner, DEMO.hidden),
        (DEMO.hidden, DEMO.inner),
    ]
    return layer * DEMO.layers + [(DEMO.vocabulary, DEMO.hidden)]


def measure_linear(repetitions: int, machine: Machine) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal(s, dtype=np.float32) for s in layer_shapes()]
    num_weights = sum(weight.size for weight in weights)
    results = []
    for rows in ROWS:
        inputs = {
            inner: generator.standard_normal((rows, inner), np.float32)
            for inner in {weight.shape[1] for weight in weights}
        }
        outputs = {len(w): np.empty((rows, len(w)), np.float32) for w in weights}
        times = in_turn(_linear_actions(weights, inputs, outputs), repetitions)
        arithmetic = 2 * rows * num_weights / (machine.gemm_gflops * 1e6)
        reading = {size: num_weights * size / (machine.read_gb_per_s * 1e6) for size in (1, 4)}
        results.append(
            {
                "rows": rows,
                "ms": times,
                "limit_f32_ms": round(max(arithmetic, reading[4]), 2),
                "limit_int8_ms": round(max(arithmetic, reading[1]), 2),
            }
        )
    return results


def _linear_actions(
    weights: list[Matrix], inputs: dict[int, Matrix], outputs: dict[int, Matrix]
) -> Actions:
    tensors = [torch.from_numpy(weight) for weight in weights]
    packed = [pack(tensor).numpy() for tensor in tensors]
    coded = [pack((40 * tensor).to(torch.int8)).numpy() for tensor in tensors]
    scales = [np.full(len(weight), 0.025, np.float32) for weight in weights]
    zeros = [np.zeros(len(weight), np.float32) for weight in weights]

    def compiled(panels: list[Matrix]) -> None:
        for w, own, scale, bias in zip(weights, panels, scales, zeros, strict=True):
            linear(inputs[w.shape[1]], own, scale, bias, outputs[len(w)], False)

    def blas() -> None:
        for w in weights:
            np.matmul(inputs[w.shape[1]], w.T, out=outputs[len(w)])

    def by_torch() -> None:
        for w in tensors:
            F.linear(torch.from_numpy(inputs[w.shape[1]]), w)

    return {
        "compiled_f32": lambda: compiled(packed),
        "compiled_int8": lambda: compiled(coded),
        "numpy_f32": blas,
        "torch_f32": by_torch,
    }


def measure_attention(repetitions: int, machine: Machine) -> list[dict[str, Any]]:
    return [
        _attention_case(batch, context, is_shared, repetitions, machine)
        for batch, context, is_shared in CASES
    ]


def _attention_case(
    batch: int, context: int, is_shared: bool, repetitions: int, machine: Machine
) -> dict[str, Any]:
    own_blocks = 1 if is_shared else context // BLOCK
    shared = list(range(context // BLOCK - own_blocks))
    spans = tuple(
        SequenceSpan(
            i, 1, context - 1,
            [*shared, *range(len(shared) + i * own_blocks, len(shared) + (i + 1) * own_blocks)],
        )
        for i in range(batch)
    )  # fmt: skip
    num_slots = (len(shared) + batch * own_blocks) * BLOCK
    generator = np.random.default_rng(1)
    shape = (DEMO.layers, DEMO.kv_heads, num_slots, DEMO.head_dim)
    keys, values = (generator.standard_normal(shape, dtype=np.float32) for _ in range(2))
    query = generator.standard_normal((batch, DEMO.heads, DEMO.head_dim), dtype=np.float32)
    nothing = np.empty((DEMO.kv_heads, 0), np.float32)
    output = np.empty((batch, DEMO.heads * DEMO.head_dim), np.float32)
    plan = plan_attention(spans, BLOCK, usable_cores())
    scaling = np.float32(DEMO.head_dim**-0.5)

    def compiled() -> None:
        for layer in range(DEMO.layers):
            attend(query, keys[layer], values[layer], nothing, nothing, scaling, *plan.arrays,
                   output)  # fmt: skip

    def by_torch() -> None:
        """One contiguous copy of each sequence, which nobody had to gather."""
        for layer in range(DEMO.layers):
            for number in range(batch):
                start = 0 if is_shared else number * context
                F.scaled_dot_product_attention(
                    torch.from_numpy(query[number])[None, :, None],
                    torch.from_numpy(keys[layer])[None, :, start : start + context],
                    torch.from_numpy(values[layer])[None, :, start : start + context],
                    enable_gqa=True,
                )

    times = in_turn({"compiled": compiled, "torch": by_torch}, repetitions)
    kv_bytes = 2 * keys.nbytes
    limit_ms = kv_bytes / (machine.read_gb_per_s * 1e6)
    return {
        "batch": batch,
        "context": context,
        "is_shared": is_shared,
        "ms": times,
        "kv_bytes_read": kv_bytes,
        "limit_ms": round(limit_ms, 2),
        "of_limit": round(times["compiled"] / limit_ms, 2),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    machine = measure_machine(usable_cores())
    layers = measure_linear(arguments.repetitions, machine)
    print_table(
        [(r["rows"], *r["ms"].values(), r["limit_f32_ms"], r["limit_int8_ms"]) for r in layers],
        ("rows", *layers[0]["ms"], "limit_f32", "limit_int8"),
    )
    attention = measure_attention(arguments.repetitions, machine)
    print_table(
        [(*list(r.values())[:3], *r["ms"].values(), r["limit_ms"]) for r in attention],
        ("batch", "context", "shared", "compiled", "torch", "limit"),
    )
    results = {"machine": machine.as_json(), "linear_layers": layers, "attention": attention}
    save("kernels", (__doc__ or "").split("Workload: ")[1].strip(), results, arguments.output)


if __name__ == "__main__":
    main()
