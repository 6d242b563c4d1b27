"""The release gate: the engine's greedy tokens and logits are those of transformers' generate.

Over all model families, with the cache on and off, in chunks of any size, in batches, preempted,
and diverging anywhere within a block. A negative control shows that one wrong block fails it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from transformers import PreTrainedModel

from model_worker.forward import HandedTokens
from model_worker.loader.rope import pin_rope
from tests.deferred import DeferredRunner
from tests.models import FAMILIES, VOCAB_SIZE, build_model
from tests.rig import EngineRig, Reference, RigOptions, greedy, reference_answer

NEW_TOKENS = 6


@cache
def model_of(family: str) -> PreTrainedModel:
    model = build_model(family)
    pin_rope(model, FAMILIES[family].max_model_len)
    return model


def token_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB_SIZE, count).tolist()


@cache
def reference_of(family: str, prompt: tuple[int, ...], num_tokens: int = NEW_TOKENS) -> Reference:
    return reference_answer(model_of(family), prompt, num_tokens)


def references(family: str, prompts: Mapping[str, list[int]]) -> dict[str, Reference]:
    return {name: reference_of(family, tuple(prompt)) for name, prompt in prompts.items()}


def shared_prefix_prompts(count: int, prefix: int = 45) -> dict[str, list[int]]:
    """Prompts that share ``prefix`` tokens, then differ in content and length."""
    shared = token_ids(prefix, seed=1)
    return {f"p{i}": shared + token_ids(3 + 5 * i % 23, seed=100 + i) for i in range(count)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("block_size", "chunk"), [(8, 7), (16, 4096), (32, 20)], ids=lambda value: str(value)
)
def test_cold_warm_and_next_turn(family: str, block_size: int, chunk: int) -> None:
    rig = EngineRig(model_of(family), RigOptions(block_size=block_size, chunk=chunk))
    prompt = token_ids(70, seed=2)
    cold = reference_of(family, tuple(prompt))
    rig.check({"cold": cold})
    assert rig.num_cached("cold") == 0
    rig.check({"warm": cold})
    # The first answer's blocks continue the prompt, so all but the prompt's last token is there.
    assert rig.num_cached("warm") == 69
    turn = [*prompt, *cold.token_ids, *token_ids(9, seed=3)]
    report = rig.check({"turn": reference_of(family, tuple(turn))})
    # The last token of an answer was never computed.
    assert rig.num_cached("turn") == 70 + NEW_TOKENS - 1
    report.assert_passes()
    assert report.num_positions == 3 * NEW_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_at_once_on_one_prefix(family: str) -> None:
    rig = EngineRig(model_of(family), RigOptions(chunk=64))
    prompts = shared_prefix_prompts(16)
    report = rig.check(references(family, prompts))
    report.assert_passes()
    assert report.num_positions == 16 * NEW_TOKENS
    assert rig.scheduler.counters.coalesced_requests == 15
    suffixes = sum(len(prompt) - 45 for prompt in prompts.values())
    assert rig.scheduler.counters.prompt_tokens_computed <= 45 + suffixes + 15 * 16


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_off(family: str) -> None:
    rig = EngineRig(model_of(family), RigOptions(is_caching=False, chunk=50))
    prompts = shared_prefix_prompts(4)
    rig.check(references(family, prompts)).assert_passes()
    assert [rig.num_cached(name) for name in prompts] == [0] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_preemption(family: str) -> None:
    """Five requests of up to 11 blocks in a pool of 16: all but one are thrown out again."""
    rig = EngineRig(
        model_of(family), RigOptions(block_size=8, num_blocks=16, chunk=32, max_model_len=120)
    )
    prompts = {f"p{i}": token_ids(40 + 3 * i, seed=20 + i) for i in range(5)}
    wanted = {n: reference_of(family, tuple(p), 24) for n, p in prompts.items()}
    report = rig.check(wanted)
    report.assert_passes()
    assert report.num_positions == 5 * 24
    assert rig.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_blocks", [80, 16])
def test_one_step_ahead(family: str, num_blocks: int) -> None:
    """In chunks and in batches, cold, warm and, in a pool of 16 blocks, preempted."""
    rig = EngineRig(
        model_of(family),
        RigOptions(
            block_size=8, num_blocks=num_blocks, chunk=32, max_model_len=120, runs_ahead=True
        ),
    )
    prompts = {f"p{i}": token_ids(40 + 3 * i, seed=20 + i) for i in range(5)}
    wanted = {n: reference_of(family, tuple(p), 24) for n, p in prompts.items()}
    rig.check(wanted)
    rig.check({f"{name} again": reference for name, reference in wanted.items()}).assert_passes()
    assert rig.sampler.report.num_positions == 2 * 5 * 24
    assert isinstance(rig.runner, DeferredRunner)
    assert rig.runner.max_queued == 2
    assert (rig.scheduler.counters.preemptions > 0) == (num_blocks == 16)


def test_negative_control_a_token_that_is_not_handed_over_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HandedTokens, "put_into", lambda self, token_ids: None)
    rig = EngineRig(model_of("llama"), RigOptions(runs_ahead=True))
    with pytest.raises(AssertionError):
        rig.check(references("llama", shared_prefix_prompts(2))).assert_passes()


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "phi3-longrope", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 2, 9, 33])
def test_every_chunk_size(family: str, chunk: int) -> None:
    rig = EngineRig(model_of(family), RigOptions(chunk=chunk, max_num_seqs=chunk))
    prompts = shared_prefix_prompts(3)
    rig.check(references(family, prompts)).assert_passes()


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("policy", ["lru", "adaptive", "lfu", "fifo"])
def test_backends_and_policies(backend: str, policy: str) -> None:
    """A pool too small for all prompts, so that each policy evicts, over three rounds."""
    options = RigOptions(
        block_size=8, num_blocks=20, backend=backend, policy=policy, max_num_seqs=2
    )
    rig = EngineRig(model_of("llama"), options)
    for turn in range(3):
        prompts = shared_prefix_prompts(9)
        named = {f"{name}.{turn}": r for name, r in references("llama", prompts).items()}
        rig.check(named).assert_passes()
    assert rig.cache.stats().evicted_total > 0
    assert rig.num_cached("p1.2") >= 40


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "gpt-neox"])
def test_divergence_at_every_offset_within_a_block(family: str) -> None:
    """Reuse is by token: each prompt hits exactly up to where it leaves the first one."""
    rig = EngineRig(model_of(family), RigOptions(block_size=16))
    base = token_ids(50, seed=5)
    rig.check({"base": reference_of(family, tuple(base))})
    for offset in range(31, 50):
        other = [*base[:offset], (base[offset] + 1) % VOCAB_SIZE, 11, 12]
        name = f"at{offset}"
        rig.check({name: reference_of(family, tuple(other))}).assert_passes()
        assert rig.num_cached(name) == offset


def test_no_reuse_across_salts() -> None:
    rig = EngineRig(model_of("llama"), RigOptions())
    prompt = token_ids(40, seed=6)
    wanted = reference_of("llama", tuple(prompt))
    for name, salt, cached in (("a", "x", 0), ("b", "x", 39), ("c", "y", 0), ("d", "", 0)):
        rig.sampler.references[name] = wanted
        rig.submit(name, prompt, greedy(NEW_TOKENS), cache_salt=salt)
        rig.run()
        assert rig.num_cached(name) == cached
    rig.sampler.report.assert_passes()


def test_requests_that_come_and_go_while_others_run() -> None:
    """New arrivals every other step, two of them aborted: nobody else's tokens change."""
    rig = EngineRig(model_of("qwen2"), RigOptions(chunk=16, num_blocks=64))
    prompts = shared_prefix_prompts(12)
    wanted = references("qwen2", prompts)
    rig.sampler.references.update(wanted)
    for number, (name, prompt) in enumerate(prompts.items()):
        rig.submit(name, prompt, greedy(NEW_TOKENS))
        rig.step()
        rig.step()
        rig.engine.check_integrity()
        if number % 5 == 4:
            rig.engine.abort("link", name)
    rig.run()
    rig.sampler.report.assert_passes()
    for name in set(prompts) - {"p4", "p9"}:
        assert rig.tokens(name) == wanted[name].token_ids


@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2", "gpt-neox"])
def test_negative_control_one_wrong_block_fails_the_gate(family: str) -> None:
    rig = EngineRig(model_of(family), RigOptions(block_size=8))
    prompt = token_ids(70, seed=2)
    wanted = reference_of(family, tuple(prompt))
    rig.check({"cold": wanted}).assert_passes()
    second, third = rig.block_ids_of(prompt)[1:3]
    for tensor in (rig.tier.keys, rig.tier.values):
        tensor[:, second] = tensor[:, third]
    with pytest.raises(AssertionError):
        rig.check({"warm": wanted}).assert_passes()


def test_negative_control_one_wrong_row_fails_the_gate() -> None:
    rig = EngineRig(model_of("llama"), RigOptions(block_size=8))
    base = token_ids(50, seed=5)
    wanted = reference_of("llama", tuple(base))
    rig.check({"cold": wanted}).assert_passes()
    rig.tier.values[:, rig.block_ids_of(base)[3], 4] += 0.5
    with pytest.raises(AssertionError):
        rig.check({"warm": wanted}).assert_passes()
