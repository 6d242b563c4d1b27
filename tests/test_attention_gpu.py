"""Every CUDA attention backend against the reference in float32 on the CPU, and under capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.attention.choice import build_attention, has_paged_varlen
from model_worker.attention.metadata import AttentionMetadata
from model_worker.attention.sdpa import SdpaBackend
from tests.attention_kit import LAYER, AttentionCase, Share, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

DECODE = AttentionCase((Share(3000, 1), Share(7, 1), Share(0, 1), Share(511, 1), Share(1024, 1)))
PREFILL = AttentionCase((Share(0, 700), Share(1500, 64), Share(300, 257)))
MIXED = AttentionCase((Share(900, 1), Share(0, 300), Share(1100, 70), Share(31, 1), Share(5, 3)))
# A prefix of 1,024 tokens for all but one, 512 more for two of them; one chunk among them.
SHARED = AttentionCase(
    (
        *(Share(1024 + 37 * i, 1, 32, "a") for i in range(6)),
        Share(1700, 1, 48, "a"),
        Share(1650, 4, 48, "a"),
        Share(1100, 200, 32, "a"),
        Share(800, 1),
    ),
    block_size=32,
)
ALL_SHARED = AttentionCase(
    tuple(Share(1024 + 50 * i, 1, 64, "a") for i in range(5)), head_dim=128, block_size=16
)
CASES = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED, "shared": SHARED}


def needs_library(name: str) -> None:
    if name == "varlen" and not has_paged_varlen():
        pytest.skip("this torch has no paged varlen_attn")
    if name in ("triton", "flashinfer"):
        pytest.importorskip(name, exc_type=ImportError)


def maker(name: str, case: AttentionCase) -> Callable[[DeviceTier], AttentionBackend]:
    return lambda tier: build_attention(name, tier, case.heads, getattr(torch, case.dtype))


def assert_right(name: str, case: AttentionCase) -> None:
    step = Step(case, "cuda")
    output, tier = step.run(maker(name, case))
    wanted, wanted_tier = step.upcast().run(SdpaBackend)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(output.cpu().float(), wanted, rtol=tolerance, atol=tolerance)
    for stored, wanted_stored in zip(tier.tensors, wanted_tier.tensors, strict=True):
        rows, wanted_rows = stored.cpu().float(), wanted_stored.float()
        assert torch.equal(rows.nan_to_num(9.0), wanted_rows.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", CASES)
def test_triton(kind: str, dtype: str) -> None:
    needs_library("triton")
    for heads, kv_heads, head_dim in ((8, 2, 64), (4, 4, 128)):
        case = replace(CASES[kind], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        assert_right("triton", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(14, 2, 64, 8), (9, 3, 80, 16), (6, 6, 96, 64), (4, 2, 256, 128), (20, 1, 24, 256)],
)
def test_triton_with_odd_sizes(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> None:
    needs_library("triton")
    case = AttentionCase(MIXED.shares, heads, kv_heads, head_dim, block_size, dtype)
    assert_right("triton", case)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_triton_decodes_int8_on_load(dtype: str) -> None:
    needs_library("triton")
    for case in (MIXED, SHARED):
        assert_right("triton", replace(case, head_dim=64, dtype=dtype, kv_dtype="int8"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_on_the_device(dtype: str) -> None:
    for case in (MIXED, SHARED):
        assert_right("sdpa", replace(case, head_dim=64, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, ALL_SHARED], ids=range(4))
def test_flashinfer(case: AttentionCase, dtype: str) -> None:
    needs_library("flashinfer")
    assert_right("flashinfer", replace(case, heads=8, kv_heads=2, head_dim=128, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED], ids=range(3))
def test_varlen(case: AttentionCase, dtype: str) -> None:
    needs_library("varlen")
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 256}
    assert_right("varlen", replace(case, dtype=dtype, **sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_one_wrong_block_is_seen(name: str) -> None:
    needs_library(name)
    step = Step(replace(SHARED, head_dim=64), "cuda")
    right, _ = step.run(maker(name, step.case))
    index, span = 3, step.spans[3]
    spare = next(
        block
        for block in range(step.case.num_blocks)
        if all(block not in other.block_ids for other in step.spans)
    )

    def make(tier: DeviceTier) -> AttentionBackend:
        tier.keys[LAYER, spare] = 1.0
        tier.values[LAYER, spare] = 1.0
        return maker(name, step.case)(tier)

    wrong_ids = [*span.block_ids[:5], spare, *span.block_ids[6:]]
    wrong_span = msgspec.structs.replace(span, block_ids=wrong_ids)
    step.spans = (*step.spans[:index], wrong_span, *step.spans[index + 1 :])
    wrong, _ = step.run(make)
    row = span.query_start
    others = [r for r in range(step.case.num_tokens) if r != row]
    assert float((wrong - right)[row].abs().max()) > 1e-3
    torch.testing.assert_close(wrong[others], right[others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_does_not_depend_on_its_batch(dtype: str) -> None:
    needs_library("triton")
    case = replace(MIXED, heads=8, kv_heads=2, head_dim=128, dtype=dtype)
    step = Step(case, "cuda")
    output, _ = step.run(maker("triton", case))
    for index, span in enumerate(step.spans):
        alone, _ = step.alone(index).run(maker("triton", case))
        assert torch.equal(alone, output[span.query_start : span.query_stop])


def pad(step: Step, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Query, key, value and slots of ``num_rows`` rows; those beyond the step's are noise, and are
    stored nowhere."""
    extra = num_rows - step.case.num_tokens
    tensors = []
    for tensor in (step.query, step.key, step.value):
        _, heads, _, head_dim = tensor.shape
        noise = torch.randn(1, heads, extra, head_dim, device="cuda").to(tensor.dtype)
        tensors.append(torch.cat([tensor, noise], dim=2))
    slots = torch.cat([step.slots, torch.full((extra,), -1, device="cuda")])
    return (*tensors, slots)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_forward_serves_other_steps(dtype: str) -> None:
    """One graph, replayed for a decode step, one with a shared prefix and one with a chunk."""
    needs_library("triton")
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 32, "dtype": dtype}
    chunk = AttentionCase((Share(700, 1), Share(900, 20), Share(3, 1)))
    steps = [
        Step(replace(case, **sizes, seed=seed), "cuda")  # type: ignore[arg-type]
        for seed, case in enumerate((DECODE, replace(SHARED, shares=SHARED.shares[:7]), chunk))
    ]
    num_rows = 24
    tier = steps[0].copy_tier()
    num_blocks = max(step.case.num_blocks for step in steps)
    tier = DeviceTier(tier.spec, num_blocks, torch.device("cuda"))
    backend = maker("triton", steps[0].case)(tier)
    plan = backend.reserve(num_rows=num_rows, max_spans=8, max_kv_len=4096)  # type: ignore[attr-defined]
    static = [tensor.clone() for tensor in pad(steps[0], num_rows)]
    scaling = 0.9 * 64**-0.5

    def load(step: Step) -> None:
        for target, source in zip(tier.tensors, step.copy_tier().tensors, strict=True):
            target[:, : source.shape[1]] = source
        for target, source in zip(static, pad(step, num_rows), strict=True):
            target.copy_(source)
        assert backend.refill(plan, step.spans)  # type: ignore[attr-defined]

    def forward() -> torch.Tensor:
        query, key, value, slots = static
        metadata = AttentionMetadata(backend, slots, (), plan)
        return backend.forward(LAYER, query, key, value, scaling, metadata)

    load(steps[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()
    for step in (*steps, *reversed(steps)):
        load(step)
        graph.replay()
        wanted, _ = step.run(maker("triton", step.case))
        assert torch.equal(output[0, : step.case.num_tokens], wanted)
        assert not output[0, step.case.num_tokens :].any()
