"""The Triton backend against the reference backend, on the CPU by Triton's interpreter.

Not collected by itself: ``test_triton.py`` runs it in a process whose environment says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import CapturableBackend
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.sdpa import SdpaBackend
from model_worker.attention.triton import TritonBackend
from model_worker.loader.rope import pin_rope
from tests.attention_kit import LAYER, AttentionCase, Share, Step
from tests.models import FAMILIES, build_model
from tests.rig import EngineRig, RigOptions, reference_answer

MIN_SPLIT = 32  # tokens, a multiple of every loop's step in these tests
MIN_SHARED = 16


def make_triton(
    case: AttentionCase, num_processors: int = 8, min_shared: int | None = MIN_SHARED
) -> Callable[[DeviceTier], TritonBackend]:
    def make(tier: DeviceTier) -> TritonBackend:
        dtype = getattr(torch, case.dtype)
        return TritonBackend(tier, case.heads, dtype, num_processors, min_shared, MIN_SPLIT)

    return make


def assert_equal_to_reference(case: AttentionCase, tolerance: float = 1e-5) -> None:
    step = Step(case)
    wanted, wanted_tier = step.run(SdpaBackend)
    output, tier = step.run(make_triton(case))
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
    for stored, wanted_stored in zip(tier.tensors, wanted_tier.tensors, strict=True):
        assert torch.equal(stored.nan_to_num(9.0), wanted_stored.nan_to_num(9.0))


DECODE = AttentionCase((Share(70, 1), Share(7, 1), Share(0, 1), Share(64, 1)))
# Three tiles of ten rows over three strides of KV, two tiles, and one.
PREFILL = AttentionCase((Share(50, 21), Share(0, 12), Share(5, 2)), 3, 1)
MIXED = AttentionCase((Share(30, 1), Share(0, 20), Share(41, 19), Share(9, 1)), 2, 1)
# All four share two blocks, two of them two more; one ends before the others' common part does.
SHARED = AttentionCase(
    (Share(40, 1, 4, "a"), Share(35, 2, 4, "a"), Share(17, 1, 2, "a"), Share(33, 1), Share(40, 20)),
    heads=2,
    kv_heads=1,
)


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, SHARED], ids=lambda c: f"{len(c.shares)}")
def test_as_the_reference(case: AttentionCase) -> None:
    assert_equal_to_reference(case)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(7, 1, 24, 16), (3, 3, 40, 64), (20, 1, 8, 8), (8, 2, 96, 32)],
)
def test_head_and_block_sizes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    shares = (Share(70, 1), Share(9, 3))
    assert_equal_to_reference(AttentionCase(shares, heads, kv_heads, head_dim, block_size))


@pytest.mark.parametrize("kv_len", [31, 32, 33, 63, 64, 65, 96])
def test_split_boundaries(kv_len: int) -> None:
    case = AttentionCase((Share(kv_len - 1, 1),), heads=1, kv_heads=1, block_size=32)
    assert_equal_to_reference(case)


def test_half_precision() -> None:
    """float16; the interpreter does not know products of bfloat16."""
    assert_equal_to_reference(replace(SHARED, dtype="float16"), 3e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int8_is_decoded_on_load(dtype: str) -> None:
    """The reference rounds decoded rows to the model's dtype, the kernels do not."""
    case = replace(SHARED, dtype=dtype, kv_dtype="int8")
    assert_equal_to_reference(case, 1e-5 if dtype == "float32" else 5e-3)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    kv_heads = draw(st.integers(1, 2))
    block_size = draw(st.sampled_from([8, 16]))
    shares = []
    for _ in range(draw(st.integers(1, 3))):
        context = draw(st.integers(0, 50))
        prefix = draw(st.integers(0, context // block_size))
        new = draw(st.integers(1, 3) | st.integers(1, 20))
        shares.append(Share(context, new, prefix, draw(st.sampled_from("ab"))))
    return AttentionCase(
        tuple(shares),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        block_size=block_size,
        seed=draw(st.integers(0, 9)),
    )


@given(cases())
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_any_step(case: AttentionCase) -> None:
    assert_equal_to_reference(case)


@pytest.mark.parametrize("index", [1, 3])
def test_one_wrong_block_is_seen(index: int) -> None:
    step = Step(SHARED)
    right, _ = step.run(make_triton(SHARED))
    span = step.spans[index]
    spare = next(
        b for b in range(SHARED.num_blocks) if all(b not in s.block_ids for s in step.spans)
    )

    def make(tier: DeviceTier) -> TritonBackend:
        for tensor in (tier.keys, tier.values):
            tensor[LAYER, spare] = 1.0
        return make_triton(SHARED)(tier)

    wrong_ids = [*span.block_ids[:1], spare, *span.block_ids[2:]]
    wrong_span = msgspec.structs.replace(span, block_ids=wrong_ids)
    step.spans = (*step.spans[:index], wrong_span, *step.spans[index + 1 :])
    wrong, _ = step.run(make)
    rows = slice(span.query_start, span.query_stop)
    others = torch.ones(SHARED.num_tokens, dtype=torch.bool)
    others[rows] = False
    assert bool(((wrong - right)[rows].abs().amax((1, 2)) > 1e-2).all())
    assert float((wrong - right)[others].abs().max()) <= 1e-5


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    case = replace(MIXED, shares=(*MIXED.shares, Share(90, 1)))
    step = Step(case)
    output, _ = step.run(make_triton(case))
    for index, span in enumerate(step.spans):
        alone, _ = step.alone(index).run(make_triton(case))
        assert torch.equal(alone, output[span.query_start : span.query_stop])


def test_a_reserved_plan_serves_step_after_step() -> None:
    big, small = Step(SHARED), Step(replace(DECODE, heads=2, kv_heads=1))
    backend = make_triton(SHARED, num_processors=2)(big.copy_tier())
    assert isinstance(backend, CapturableBackend)
    plan = backend.reserve(num_rows=30, max_spans=6, max_kv_len=96)
    assert backend.refill(plan, small.spans)
    assert backend.refill(plan, big.spans)
    wanted, _ = big.run(make_triton(SHARED, num_processors=2))
    assert torch.equal(big.forward(backend, plan), wanted)
    assert backend.refill(plan, small.spans)
    assert plan.buffer.num_rows.item() == small.case.num_tokens
    assert plan.buffer.num_large.item() == 0


def test_padding_rows_store_nothing_and_come_out_as_zeros() -> None:
    step = Step(MIXED)
    wanted, wanted_tier = step.run(make_triton(MIXED))
    tier = step.copy_tier()
    backend = make_triton(MIXED)(tier)
    plan = backend.reserve(num_rows=MIXED.num_tokens + 3, max_spans=4, max_kv_len=96)
    assert backend.refill(plan, step.spans)
    step.query, step.key, step.value = (
        torch.cat([tensor, tensor[:, :, :3]], dim=2)
        for tensor in (step.query, step.key, step.value)
    )
    step.slots = torch.cat([step.slots, torch.full((3,), -1)])
    step.case = replace(MIXED, shares=(*MIXED.shares, Share(0, 3)))
    output = step.forward(backend, plan)
    assert torch.equal(output[:-3], wanted)
    assert not output[-3:].any()
    for tensor, other in zip(tier.tensors, wanted_tier.tensors, strict=True):
        assert torch.equal(tensor.nan_to_num(9.0), other.nan_to_num(9.0))


def test_a_step_too_large_for_a_reserved_plan_is_refused() -> None:
    step = Step(DECODE)
    backend = make_triton(DECODE)(step.copy_tier())
    plan = backend.reserve(num_rows=4, max_spans=4, max_kv_len=80)
    assert backend.refill(plan, step.spans)
    assert not backend.refill(plan, (*step.spans, SequenceSpan(4, 1, 0, [0])))
    assert backend.refill(plan, step.spans[:2])


def test_greedy_tokens_are_those_of_transformers() -> None:
    """The release gate in small: cold together, then warm, with chunks that end inside blocks."""
    model = build_model("llama-mqa")
    pin_rope(model, FAMILIES["llama-mqa"].max_model_len)
    prompts = {"a": list(range(10, 36)), "b": [*range(10, 27), *range(60, 66)]}
    references = {name: reference_answer(model, ids, 2) for name, ids in prompts.items()}
    options = RigOptions(block_size=8, num_blocks=24, chunk=13, max_model_len=64, backend="triton")
    rig = EngineRig(model, options)
    rig.check(references)
    rig.check({f"{name} again": reference for name, reference in references.items()})
    rig.sampler.report.assert_passes()


def test_limits_are_refused() -> None:
    tier = Step(DECODE).copy_tier()
    with pytest.raises(ValueError, match="query heads to a kv head"):
        TritonBackend(tier, 2 * 129, torch.float32, 1)
    odd = Step(replace(DECODE, block_size=12)).copy_tier()
    with pytest.raises(ValueError, match="no power of two"):
        TritonBackend(odd, 4, torch.float32, 1)
