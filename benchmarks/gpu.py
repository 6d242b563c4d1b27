"""The engine on a GPU against the GPU's own limits, with random weights of real shapes.

    python -m benchmarks.gpu [--models NAME ...] [--kv-cache-dtype auto|int8]
                             [--seed N] [--output FILE] [--tiny]

For each model: decode at several batches as a share of what the memory allows (weights and KV read
once a step), prefill as a share of the matrix products' peak, time to the first token behind a
cached prefix, promotion from host memory as a share of the link, and what a step costs on the CPU
side. All times are the engine's, without HTTP. `--tiny` runs the same code on the CPU with a tiny
model: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_kit import clear, random_ids, run, step, submit, time_to_first_token
from benchmarks.gpu_limits import DeviceLimits, measure_limits, wait_for
from benchmarks.gpu_models import ModelCost, model_cost, random_model
from benchmarks.overhead import NullRunner
from benchmarks.report import print_table, save
from cache_store.events import Tier
from cache_store.transfer import TransferOrder
from model_worker.attention.backend import register_attention
from model_worker.build import WorkerParts, build_parts
from model_worker.worker_config import WorkerConfig

MODELS = ("llama-3.2-1b", "llama-3.1-8b")
GOALS = {
    "decode": ">= 0.60 of the memory's roofline",
    "prefill": ">= 0.50 of the products' peak",
    "warm_ttft_ms": "<= 15 (8B)",
    "promotion": ">= 0.70 of the link",
    "step_cpu_ms": "<= 0.5",
}


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...] = (1, 16, 64)
    context: int = 1024  # tokens of each decoding sequence
    steps: int = 60
    prompt: int = 8192
    prefix: int = 16384
    suffix: int = 64
    repeats: int = 10
    block_size: int = 32
    limits_scale: int = 1
    pool_bytes: int | None = None
    host_bytes: int = 8 * 2**30

    @property
    def max_model_len(self) -> int:
        return max(self.prompt, self.prefix + self.suffix) + self.steps + 64


TINY = Sizes(
    batches=(1, 2, 3), context=24, steps=3, prompt=64, prefix=96, suffix=8, repeats=2,
    block_size=8, limits_scale=1024, pool_bytes=2**23, host_bytes=2**22,
)  # fmt: skip


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def build(
    name: str, device: torch.device, sizes: Sizes, kv_cache_dtype: str, seed: int
) -> WorkerParts:
    loaded = random_model(
        name,
        device,
        dtype_on(device),
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        kv_cache_dtype=kv_cache_dtype,
        seed=seed,
    )
    config = WorkerConfig(
        endpoint="ipc://unused",
        worker_id="benchmark",
        model=name,
        block_size=sizes.block_size,
        kv_cache_memory=sizes.pool_bytes,
        kv_cache_dtype=kv_cache_dtype,
        host_cache_size=sizes.host_bytes,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=max(sizes.prompt, max(sizes.batches) + 1),
        speculation="off",  # each step computes one token of each request
        max_itl_factor=1e9,  # a prompt is one step, whatever decodes beside it
    )
    return build_parts(config, loaded, lambda line: print(f"  {line}"))


def decode_share(
    parts: WorkerParts, cost: ModelCost, limits: DeviceLimits, batch: int, sizes: Sizes
) -> dict[str, float]:
    """Sequences that share nothing, so that all of their KV has to be read."""
    seconds = decode_seconds(parts, batch, sizes)
    floor = cost.decode_bytes(batch, sizes.context) / limits.memory_bytes_s
    return {
        "step_ms": round(seconds * 1000, 3),
        "floor_ms": round(floor * 1000, 3),
        "share": round(floor / seconds, 3),
        "tokens_per_s": round(batch / seconds, 1),
    }


def decode_seconds(parts: WorkerParts, batch: int, sizes: Sizes) -> float:
    """Median of a step with ``batch`` requests past their prompts."""
    engine = parts.new_engine()
    for number in range(batch):
        ids = random_ids(sizes.context, parts.loaded.vocab_size, 100 + number)
        submit(engine, str(number), ids, sizes.steps + batch + 8)
    counts: dict[str, int] = {}
    while len(counts) < batch:
        counts.update({output.request_id: 1 for output in step(engine)[1] if output.token_ids})
    times = [step(engine)[0] for _ in range(sizes.steps)]
    clear(engine)
    parts.cache.reset()
    return statistics.median(times)


def prefill_share(
    parts: WorkerParts, cost: ModelCost, limits: DeviceLimits, sizes: Sizes
) -> dict[str, float]:
    times = []
    for number in range(sizes.repeats):
        ids = random_ids(sizes.prompt, parts.loaded.vocab_size, 500 + number)
        seconds, num_cached = time_to_first_token(parts.new_engine(), "prompt", ids)
        assert num_cached == 0
        times.append(seconds)
        parts.cache.reset()
    seconds = statistics.median(times)
    floor = cost.prefill_operations(sizes.prompt) / limits.product_operations_s
    return {
        "ttft_ms": round(seconds * 1000, 2),
        "tokens_per_s": round(sizes.prompt / seconds, 1),
        "share": round(floor / seconds, 3),
    }


def warm_ttft(parts: WorkerParts, sizes: Sizes) -> dict[str, float]:
    """A prefix that the device holds, and new tokens behind it."""
    engine = parts.new_engine()
    vocab = parts.loaded.vocab_size
    prefix = random_ids(sizes.prefix, vocab, 1)
    cold, _ = time_to_first_token(engine, "cold", prefix)
    times = []
    for number in range(sizes.repeats):
        prompt = np.concatenate((prefix, random_ids(sizes.suffix, vocab, 900 + number)))
        seconds, num_cached = time_to_first_token(engine, f"warm{number}", prompt)
        assert num_cached >= sizes.prefix - 1, num_cached
        times.append(seconds)
    parts.cache.reset()
    return {
        "cold_ms": round(cold * 1000, 2),
        "warm_ms": round(statistics.median(times) * 1000, 3),
        "best_ms": round(min(times) * 1000, 3),
    }


def promotion(parts: WorkerParts, limits: DeviceLimits, sizes: Sizes) -> dict[str, float]:
    """Blocks of a prefix from host memory, by the threads that a worker has; and the way down."""
    assert parts.tiers is not None
    assert parts.tiers.host is not None
    wanted = sizes.prefix // sizes.block_size
    count = min(wanted, parts.tiers.host.num_blocks, parts.tier.num_blocks)
    ids = list(range(count))
    result: dict[str, float] = {"blocks": count}
    for name, source, target in (("down", Tier.DEVICE, Tier.HOST), ("up", Tier.HOST, Tier.DEVICE)):
        rates = []
        for number in range(sizes.repeats):
            order = TransferOrder(number, source, target, ids, ids)
            rates.append(count * parts.tier.spec.bytes_per_block / _carried_out(parts, order))
        result[f"{name}_gb_s"] = round(statistics.median(rates) / 1e9, 2)
    result["share"] = round(result["up_gb_s"] * 1e9 / limits.link_bytes_s, 3)
    return result


def _carried_out(parts: WorkerParts, order: TransferOrder) -> float:
    """Seconds from the order to its result."""
    assert parts.tiers is not None
    threads = parts.tiers.threads
    started = time.perf_counter()
    threads.submit(order)
    while not (results := threads.take_results()):
        time.sleep(0.0001)
    assert not results[0].error
    return time.perf_counter() - started


def cpu_side(parts: WorkerParts, sizes: Sizes) -> dict[str, float]:
    """What a step costs beside the device: the engine over a runner that computes nothing, and how
    long the pass of a decode step keeps the host before it waits for the device."""
    batch = max(sizes.batches)
    idle = dataclasses.replace(parts, runner=NullRunner())
    engine_s = decode_seconds(idle, batch, sizes)
    with launches(parts) as times:
        decode_seconds(parts, batch, sizes)
    launch_s = statistics.median(times[-sizes.steps :])
    return {
        "engine_ms": round(engine_s * 1000, 3),
        "launch_ms": round(launch_s * 1000, 3),
        "sum_ms": round((engine_s + launch_s) * 1000, 3),
    }


@contextmanager
def launches(parts: WorkerParts) -> Iterator[list[float]]:
    """The host's seconds in each pass of the runner, which ends before the device does."""
    runner: Any = parts.runner
    inner = runner._forward
    times: list[float] = []

    def timed(batch: object) -> torch.Tensor:
        wait_for(parts.loaded.device)
        started = time.perf_counter()
        logits: torch.Tensor = inner(batch)
        times.append(time.perf_counter() - started)
        return logits

    runner._forward = timed
    try:
        yield times
    finally:
        del runner._forward


def measure(
    name: str, device: torch.device, sizes: Sizes, kv_cache_dtype: str, seed: int
) -> dict[str, Any]:
    limits = measure_limits(device, dtype_on(device), scale=sizes.limits_scale)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the pool takes what is free
    parts = build(name, device, sizes, kv_cache_dtype, seed)
    try:
        cost = model_cost(parts.loaded)
        run_once(parts, sizes)
        return {
            "limits": dataclasses.asdict(limits),
            "cost": dataclasses.asdict(cost),
            "decode": {
                str(batch): decode_share(parts, cost, limits, batch, sizes)
                for batch in sizes.batches
            },
            "prefill": prefill_share(parts, cost, limits, sizes),
            "warm_ttft": warm_ttft(parts, sizes),
            "promotion": promotion(parts, limits, sizes),
            "step_cpu": cpu_side(parts, sizes),
        }
    finally:
        parts.close()


def run_once(parts: WorkerParts, sizes: Sizes) -> None:
    """What is set up, compiled or tuned at first use."""
    engine = parts.new_engine()
    submit(engine, "first", random_ids(sizes.prompt, parts.loaded.vocab_size, 7), 4)
    run(engine)
    engine.take_outputs()
    parts.cache.reset()


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def table(results: dict[str, Any]) -> list[tuple[str, str, object, str]]:
    rows: list[tuple[str, str, object, str]] = []
    for name, figures in results.items():
        for batch, decode in figures["decode"].items():
            what = f"decode, batch {batch}: {decode['step_ms']} ms, share of memory"
            rows.append((name, what, decode["share"], GOALS["decode"]))
        prefill, up = figures["prefill"], figures["promotion"]
        what = f"prefill: {prefill['tokens_per_s']} tokens/s, share of products"
        rows.append((name, what, prefill["share"], GOALS["prefill"]))
        warm = figures["warm_ttft"]["warm_ms"]
        rows.append((name, "warm first token, ms", warm, GOALS["warm_ttft_ms"]))
        what = f"promotion: {up['up_gb_s']} GB/s, share of link"
        rows.append((name, what, up["share"], GOALS["promotion"]))
        rows.append(
            (name, "step, CPU side, ms", figures["step_cpu"]["sum_ms"], GOALS["step_cpu_ms"])
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(arguments)
    if not chosen.tiny and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no CUDA device; --tiny runs on the CPU", file=sys.stderr)
        return 2
    register_attention()
    device = torch.device("cpu" if chosen.tiny else "cuda")
    sizes = TINY if chosen.tiny else Sizes()
    results = {}
    for name in ["tiny"] if chosen.tiny else chosen.models:
        print(f"{name}:", flush=True)
        results[name] = measure(name, device, sizes, chosen.kv_cache_dtype, chosen.seed)
    print_table(table(results), ("model", "what", "measured", "goal"))
    document = {
        "device": device_facts(device),
        "kv_cache_dtype": chosen.kv_cache_dtype,
        "sizes": dataclasses.asdict(sizes),
        "models": results,
    }
    save("gpu", "see the module's text", document, chosen.output, seed=chosen.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
