"""The release gate with int8 on the device: answers as those of the model run whole on int8 KV.

The reference is transformers' own generate with an attention that rounds each vector of K and V
as the device does and knows of no cache, blocks or chunks. Rounding noise of float32 can move a
number to the neighbouring step, so the tolerance is wider than for exact KV; negative controls show
that one wrong block, one wrong scale and exact KV fail it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tests.rig import EngineRig, Reference, RigOptions, TeacherSampler, Tolerance, reference_answer
from tests.test_tier_equality import demote, from_tiers, in_tiers
from tests.test_token_equality import (
    NEW_TOKENS,
    VOCAB_SIZE,
    model_of,
    reference_of,
    shared_prefix_prompts,
    token_ids,
)

FAMILIES = ("llama", "llama-mqa", "qwen3")
PROMPT = token_ids(70, seed=2)
NUM_STORED = 70 + NEW_TOKENS - 1
TOLERANCE = Tolerance(logit=0.02, tie_gap=0.04)
WHOLE = "whole-on-int8"


def rounded(rows: torch.Tensor) -> torch.Tensor:
    step = rows.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (rows / step).round(), 0.0) * step


def attend_rounded(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Each forward sees all rows so far, unrounded, and rounds them anew."""
    output = F.scaled_dot_product_attention(
        query, rounded(key), rounded(value),
        is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True,
    )  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


@cache
def whole(family: str, prompt: tuple[int, ...], num_tokens: int = NEW_TOKENS) -> Reference:
    AttentionInterface.register(WHOLE, attend_rounded)
    model = model_of(family)
    before = model.config._attn_implementation
    model.config._attn_implementation = WHOLE
    try:
        return reference_answer(model, prompt, num_tokens)
    finally:
        model.config._attn_implementation = before


def wholes(family: str, prompts: Mapping[str, Sequence[int]]) -> dict[str, Reference]:
    return {name: whole(family, tuple(prompt)) for name, prompt in prompts.items()}


@contextmanager
def rig_of(family: str, **options: Any) -> Iterator[EngineRig]:
    settings = RigOptions(kv_dtype="int8", **options)
    rig = EngineRig(model_of(family), settings, TeacherSampler(TOLERANCE))
    try:
        yield rig
    finally:
        rig.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("block_size", "chunk", "backend"), [(8, 7, "cpu"), (16, 4096, "sdpa"), (32, 20, "cpu")]
)
def test_cold_warm_and_next_turn(family: str, block_size: int, chunk: int, backend: str) -> None:
    cold = whole(family, tuple(PROMPT))
    with rig_of(family, block_size=block_size, chunk=chunk, backend=backend) as rig:
        rig.check({"cold": cold})
        rig.check({"warm": cold})
        assert rig.num_cached("warm") == 69
        turn = [*PROMPT, *cold.token_ids, *token_ids(9, seed=3)]
        report = rig.check({"turn": whole(family, tuple(turn))})
        assert rig.num_cached("turn") == NUM_STORED
        report.assert_passes()
        assert report.num_positions == 3 * NEW_TOKENS


@pytest.mark.parametrize("chunk", [1, 2, 9, 33])
@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_where_chunks_begin_does_not_count(chunk: int, backend: str) -> None:
    """It would if the tokens of a step saw each other as they were before rounding."""
    with rig_of("llama", chunk=chunk, max_num_seqs=chunk, backend=backend) as rig:
        rig.check(wholes("llama", shared_prefix_prompts(3))).assert_passes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_caching", [False, True])
def test_eight_at_once_on_one_prefix(family: str, is_caching: bool) -> None:
    with rig_of(family, chunk=64, is_caching=is_caching) as rig:
        report = rig.check(wholes(family, shared_prefix_prompts(8)))
        report.assert_passes()
        assert report.num_positions == 8 * NEW_TOKENS
        assert (rig.num_cached("p1") > 0) == is_caching


def test_forced_preemption() -> None:
    prompts = {f"p{i}": token_ids(40 + 3 * i, seed=20 + i) for i in range(5)}
    wanted = {n: whole("llama", tuple(p), 24) for n, p in prompts.items()}
    with rig_of("llama", block_size=8, num_blocks=16, chunk=32, max_model_len=120) as rig:
        rig.check(wanted).assert_passes()
        assert rig.scheduler.counters.preemptions > 0


def test_rows_are_copied_inside_blocks_with_their_scales() -> None:
    """Prompts that leave the first one at every offset of its last two blocks."""
    base = token_ids(50, seed=5)
    with rig_of("llama", block_size=16) as rig:
        rig.check({"base": whole("llama", tuple(base))})
        for offset in range(31, 50):
            other = [*base[:offset], (base[offset] + 1) % VOCAB_SIZE, 11, 12]
            rig.check({f"at{offset}": whole("llama", tuple(other))}).assert_passes()
            assert rig.num_cached(f"at{offset}") == offset


@pytest.mark.parametrize("host_dtype", ["exact", "int8"])
@pytest.mark.parametrize("tier", ["host", "disk", "both"])
def test_demoted_and_promoted(tier: str, host_dtype: str, tmp_path: Path) -> None:
    """What comes back is bit for bit what went."""
    wanted = whole("llama", tuple(PROMPT))
    options: dict[str, Any] = {"block_size": 8, "host_dtype": host_dtype}
    if tier != "disk":
        options["num_host"] = 16
    if tier != "host":
        options |= {"disk_folder": tmp_path, "num_disk": 64}
    with rig_of("llama", **options) as rig:
        rig.check({"cold": wanted})
        rig.settle()
        ids = [*PROMPT, *wanted.token_ids]
        before = rows_of(rig, ids)
        for number in range(2):
            demote(rig, wanted)
            assert in_tiers(rig, ids)[0] == 0
            rig.check({f"warm {number}": wanted}).assert_passes()
            assert from_tiers(rig, f"warm {number}")[0] == 69
        assert sum(from_tiers(rig, "warm 1")[1:]) == 69
        for row, old in zip(rows_of(rig, ids), before, strict=True):
            assert torch.equal(row, old)


def rows_of(rig: EngineRig, ids: list[int]) -> list[torch.Tensor]:
    """All that the tree's blocks hold of the prompt's tokens, less the row computed anew."""
    blocks = rig.block_ids_of(ids)
    return [tensor[:, blocks].flatten(1, 2)[:, :69].clone() for tensor in rig.tier.tensors]


def test_after_a_restart(tmp_path: Path) -> None:
    prompts = shared_prefix_prompts(5)
    wanted = wholes("llama", prompts)
    options: dict[str, Any] = {"disk_folder": tmp_path, "num_disk": 64}
    with rig_of("llama", **options) as rig:
        rig.check(wanted).assert_passes()
        rig.settle()
    with rig_of("llama", **options) as rig:
        assert rig.num_restored > 0
        rig.check(wanted).assert_passes()
        for name, prompt in prompts.items():
            assert rig.num_cached(name) == len(prompt) - 1


def test_blocks_of_another_number_format_are_not_found(tmp_path: Path) -> None:
    wanted = reference_of("llama", tuple(PROMPT))
    options: dict[str, Any] = {"block_size": 8, "disk_folder": tmp_path, "num_disk": 32}
    rig = EngineRig(model_of("llama"), RigOptions(**options))
    rig.check({"exact": wanted})
    rig.settle()
    rig.close()
    with rig_of("llama", **options) as rig:
        assert rig.num_restored == 0
        rig.check({"int8": whole("llama", tuple(PROMPT))}).assert_passes()
        assert rig.num_cached("int8") == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_negative_control_one_wrong_block_fails_the_gate(family: str) -> None:
    wanted = whole(family, tuple(PROMPT))
    with rig_of(family, block_size=8) as rig:
        rig.check({"cold": wanted}).assert_passes()
        second, third = rig.block_ids_of(PROMPT)[1:3]
        for tensor in rig.tier.tensors:
            tensor[:, second] = tensor[:, third]
        with pytest.raises(AssertionError):
            rig.check({"warm": wanted}).assert_passes()


@pytest.mark.parametrize("part", ["key_scales", "value_scales"])
def test_negative_control_scales_left_behind_fail_the_gate(part: str) -> None:
    """As if a block had come back, or a row been copied, without them."""
    wanted = whole("llama", tuple(PROMPT))
    with rig_of("llama", block_size=8) as rig:
        rig.check({"cold": wanted}).assert_passes()
        second, third = rig.block_ids_of(PROMPT)[1:3]
        scales = getattr(rig.tier, part)
        scales[:, second] = scales[:, third]
        with pytest.raises(AssertionError):
            rig.check({"warm": wanted}).assert_passes()


@pytest.mark.parametrize("family", FAMILIES)
def test_negative_control_exact_kv_is_not_taken_for_int8(family: str) -> None:
    wanted = reference_of(family, tuple(PROMPT))
    with rig_of(family) as rig, pytest.raises(AssertionError):
        rig.check({"cold": wanted}).assert_passes()
