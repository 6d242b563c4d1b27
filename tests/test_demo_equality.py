"""The release gate on the demo model and real text: a policy as system prompt, public questions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.demo import Demo, load_demo, mt_bench, policy_text
from tests.rig import EngineRig, Reference, RigOptions, reference_answer

NEW_TOKENS = 12
SYSTEM_CHARACTERS = 2400


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return load_demo()


@cache
def policy_reference(question: str) -> Reference:
    """Some 600 tokens: a policy as system prompt, then one question."""
    demo = load_demo()
    messages = [
        {"role": "system", "content": policy_text()[:SYSTEM_CHARACTERS]},
        {"role": "user", "content": question},
    ]
    return reference_answer(demo.loaded.model, demo.chat_ids(messages), NEW_TOKENS)


def questions(count: int) -> list[str]:
    return [first for first, _ in mt_bench()[:count]]


def test_long_system_prompt_cold_warm_and_shared(demo: Demo) -> None:
    """Cold in chunks, warm, then other questions on the same prompt, at once."""
    rig = EngineRig(demo.loaded.model, RigOptions(block_size=32, chunk=140, max_model_len=4096))
    first, second, third = (policy_reference(question) for question in questions(3))
    assert len(first.prompt) > 3 * 140 + 32  # several chunks, none of which ends with a block
    rig.check({"cold": first})
    assert rig.num_cached("cold") == 0
    rig.check({"warm": first})
    assert rig.num_cached("warm") == len(first.prompt) - 1
    report = rig.check({"second": second, "third": third})
    assert min(rig.num_cached("second"), rig.num_cached("third")) > 450
    report.assert_passes()
    assert report.num_positions == 4 * NEW_TOKENS


def test_second_turn_hits_through_the_first_answer(demo: Demo) -> None:
    rig = EngineRig(demo.loaded.model, RigOptions(block_size=16, max_model_len=4096))
    question, follow_up = mt_bench()[3]
    messages = [{"role": "user", "content": question}]
    first = reference_answer(demo.loaded.model, demo.chat_ids(messages), NEW_TOKENS)
    rig.check({"turn 1": first})
    rest = demo.text_ids(f"<|im_end|>\n<|im_start|>user\n{follow_up}<|im_end|>\n")
    prompt = [*first.prompt, *first.token_ids, *rest]
    second = reference_answer(demo.loaded.model, prompt, NEW_TOKENS)
    report = rig.check({"turn 2": second})
    report.assert_passes()
    assert rig.num_cached("turn 2") == len(first.prompt) + NEW_TOKENS - 1


def test_batched_preempted_and_cache_off(demo: Demo) -> None:
    model = demo.loaded.model
    wanted = {
        f"q{number}": reference_answer(
            model, demo.chat_ids([{"role": "user", "content": question}]), NEW_TOKENS
        )
        for number, question in enumerate(questions(5))
    }
    roomy = EngineRig(model, RigOptions(is_caching=False, max_model_len=4096))
    roomy.check(wanted).assert_passes()
    longest = max(len(reference.prompt) for reference in wanted.values()) + NEW_TOKENS
    tight = EngineRig(
        model,
        RigOptions(block_size=8, num_blocks=longest // 8 + 12, chunk=64, max_model_len=longest),
    )
    tight.check(wanted).assert_passes()
    assert tight.scheduler.counters.preemptions > 0


def test_negative_control_one_wrong_block_fails_the_gate(demo: Demo) -> None:
    rig = EngineRig(demo.loaded.model, RigOptions(block_size=32, max_model_len=4096))
    ids = demo.chat_ids([{"role": "user", "content": questions(1)[0] * 3}])
    reference = reference_answer(demo.loaded.model, ids, NEW_TOKENS)
    rig.check({"cold": reference}).assert_passes()
    block, other = rig.block_ids_of(ids)[1:3]
    for tensor in (rig.tier.keys, rig.tier.values):
        tensor[:, block] = tensor[:, other]
    with pytest.raises(AssertionError):
        rig.check({"warm": reference}).assert_passes()
