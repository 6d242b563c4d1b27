"""The scheduler over the real cache and a scripted runner: order, progress, preemption, limits."""

from __future__ import annotations

from typing import Any

import pytest

from cache_store import radix_tree
from cache_store.block_hash import HASH_BYTES, BlockHashes, chain_hashes
from model_worker.engine import MAX_FAILED_STEPS, EngineError
from model_worker.protocol import AddRequest, ErrorCode, FinishReason, SamplingParams
from tests.scheduler_kit import BLOCK, LINK, MAX_MODEL_LEN, VOCAB, World, answer_of, prompt


def test_the_history_that_answers_is_the_one_in_the_blocks() -> None:
    world = World()
    world.add("a", prompt(11), 5)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 5)
    assert world.ending("a").finish_reason is FinishReason.LENGTH
    first = world.outputs["a"][0]
    assert first.num_cached_tokens == 0
    assert first.queue_s is not None
    assert first.prefill_s is not None


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    world = World(max_batched=8)
    world.add("a", prompt(20), 2)
    world.run()
    assert [batch.num_tokens for batch in world.runner.batches] == [8, 8, 4, 1]
    assert [batch.num_prefill_tokens for batch in world.runner.batches] == [8, 8, 4, 0]
    # One message at admission, then one per token; chunks in between say nothing.
    assert [len(output.token_ids) for output in world.outputs["a"]] == [0, 1, 1]


def test_a_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(max_batched=8)
    world.add("a", prompt(4 * BLOCK), 2)
    hashed = []

    def chain(parent: bytes, encoded: bytes, block_size: int, known: bytes) -> BlockHashes:
        hashed.append(len(encoded) // (4 * block_size) - len(known) // HASH_BYTES)
        return chain_hashes(parent, encoded, block_size, known)

    monkeypatch.setattr(radix_tree, "chain_hashes", chain)
    world.run()
    assert hashed[:-1] == [0] * (len(hashed) - 1)  # the last is of the answer's partial block
    assert len(hashed) > 1


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    world = World(max_batched=8)
    world.add("short", prompt(4, 1), 10)
    world.step()
    world.add("long", prompt(30, 2), 2)
    for _ in range(4):
        world.step()
        last = world.runner.batches[-1]
        assert (last.num_decode_tokens, last.num_prefill_tokens) in {(1, 7), (1, 2)}
    assert len(world.tokens("short")) == 5


def test_admission_is_in_order_of_arrival_and_bounded() -> None:
    world = World(max_num_seqs=2)
    for number in range(5):
        world.add(f"r{number}", prompt(6, number), 3)
    order = []
    while world.engine.has_work:
        world.step()
        assert world.engine.stats().num_running <= 2
        order += [n for n, o in world.outputs.items() if n not in order and o]
    assert order == ["r0", "r1", "r2", "r3", "r4"]


def test_eight_on_one_cold_prefix_compute_it_once() -> None:
    world = World(num_blocks=200, max_num_seqs=8, max_batched=16)
    shared = prompt(40)
    for number in range(8):
        world.add(f"r{number}", [*shared, 1 + number, 2, 3], 3)
    world.run()
    for number in range(8):
        assert world.tokens(f"r{number}") == answer_of([*shared, 1 + number, 2, 3], 3)
    stats = world.engine.stats()
    assert stats.coalesced_requests_total == 7
    assert stats.prompt_tokens_computed_total == 43 + 7 * 3
    cached = [world.outputs[f"r{number}"][0].num_cached_tokens for number in range(8)]
    assert cached == [0] + [40] * 7


@pytest.mark.parametrize("is_cold", [True, False])
def test_equal_prompts_that_end_with_a_block_start_together(is_cold: bool) -> None:
    world = World(num_blocks=200, max_num_seqs=9, max_batched=64)
    shared = prompt(10 * BLOCK)
    world.add("first", shared, 20)
    if not is_cold:
        world.run()
    for number in range(8):
        world.add(f"r{number}", shared, 20)
    world.step()
    world.step()
    for number in range(8):
        assert world.tokens(f"r{number}")  # not one after the other, each behind the one before
    world.run()
    assert world.tokens("r7") == answer_of(shared, 20)
    assert world.engine.stats().prompt_tokens_computed_total == 10 * BLOCK + 8


def test_followers_go_on_when_their_leader_is_aborted_or_fails() -> None:
    for is_failure in (False, True):
        world = World(max_batched=8)
        shared = prompt(30)
        world.add("leader", [*shared, 1], 3)
        world.add("follower", [*shared, 2], 3)
        world.step()
        assert world.engine.stats().num_running == 1
        if is_failure:
            world.runner.fails_next = True
        else:
            world.engine.abort(LINK, "leader")
        world.run()
        assert world.tokens("follower") == answer_of([*shared, 2], 3)
        reason = FinishReason.ERROR if is_failure else FinishReason.ABORT
        assert world.ending("leader").finish_reason is reason


def test_the_youngest_is_preempted_and_resumes_as_a_hit() -> None:
    world = World(num_blocks=12, max_num_seqs=3, max_batched=64)
    for number in range(3):
        world.add(f"r{number}", prompt(12, number), 20)
    world.run()
    for number in range(3):
        assert world.tokens(f"r{number}") == answer_of(prompt(12, number), 20)
        cached = [o.num_cached_tokens for o in world.outputs[f"r{number}"]]
        # Reported once, at first admission: what a resume finds is no hit of the client's.
        assert [c for c in cached if c is not None] == [0]
    assert world.engine.stats().preemptions_total > 0
    first_done = [n for n in world.outputs if world.ending(n)]
    assert first_done[0] == "r0"


@pytest.mark.parametrize("num_blocks", [8, 12, 16])
def test_duplicates_of_the_trees_blocks_do_not_end_the_last_request(num_blocks: int) -> None:
    # Both compute the same answer, so what the longer one holds of it is twice in the pool.
    world = World(num_blocks, max_num_seqs=2, max_batched=64)
    longest = (num_blocks - 1) * BLOCK
    world.add("short", prompt(5), 8)
    world.add("long", prompt(5), longest - 5)
    world.run()
    assert world.tokens("long") == answer_of(prompt(5), longest - 5)
    assert world.ending("long").finish_reason is FinishReason.LENGTH


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    world = World(num_blocks=10)
    world.add("large", prompt(30), 20)
    world.collect()
    error = world.ending("large").error
    assert error is not None
    assert error.code is ErrorCode.NEVER_FITS
    assert "50 tokens, 14 blocks; the KV pool has 10" in error.message
    assert not world.engine.has_work


@pytest.mark.parametrize(
    ("ids", "params", "code", "param"),
    [
        ([1] * 64, {}, ErrorCode.CONTEXT_LENGTH, None),
        ([], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([VOCAB], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([-1], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([1], {"temperature": 3.0}, ErrorCode.INVALID_REQUEST, "temperature"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, ErrorCode.INVALID_REQUEST, "logit_bias"),
    ],
)
def test_bad_requests_end_with_a_typed_error(
    ids: list[int], params: dict[str, Any], code: ErrorCode, param: str | None
) -> None:
    world = World()
    world.add("bad", ids, **params)
    world.collect()
    error = world.ending("bad").error
    assert error is not None
    assert (error.code, error.param) == (code, param)


def test_bytes_that_are_no_token_ids_do_not_end_the_engine() -> None:
    world = World()
    params = SamplingParams(max_tokens=1)
    message = AddRequest(request_id="torn", prompt_token_ids=b"12345", sampling_params=params)
    world.engine.add_request(LINK, message)
    world.collect()
    error = world.ending("torn").error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "prompt")


def test_a_full_queue_refuses_and_the_context_end_stops() -> None:
    world = World(max_num_waiting=2)
    for number in range(3):
        world.add(f"r{number}", prompt(60, number), 100)
    world.run()
    assert world.ending("r2").error is not None
    assert world.ending("r2").error.code is ErrorCode.OVERLOADED  # type: ignore[union-attr]
    assert world.tokens("r0") == answer_of(prompt(60, 0), MAX_MODEL_LEN - 60)
    assert world.ending("r0").finish_reason is FinishReason.LENGTH


def test_stop_tokens_end_and_ignore_eos_does_not() -> None:
    answer = answer_of(prompt(9), 8)
    world = World(eos_token_ids=(answer[3],))
    world.add("eos", prompt(9), 8)
    world.run()
    assert world.tokens("eos") == answer[: answer.index(answer[3]) + 1]
    assert world.ending("eos").stop_token_id == answer[3]
    world.add("ignore", prompt(9), 8, ignore_eos=True)
    world.add("stop", prompt(9), 8, ignore_eos=True, stop_token_ids=(answer[5],))
    world.run()
    assert world.tokens("ignore") == answer
    assert world.ending("ignore").stop_token_id is None
    assert world.tokens("stop") == answer[: answer.index(answer[5]) + 1]


def test_a_device_that_fails_for_good_ends_the_engine() -> None:
    world = World()
    for number in range(MAX_FAILED_STEPS):
        world.add(f"r{number}", prompt(5, number))
        world.runner.fails_next = True
        if number == MAX_FAILED_STEPS - 1:
            with pytest.raises(EngineError, match="5 steps failed in a row"):
                world.engine.step()
            return
        world.step()
        assert world.ending(f"r{number}").error is not None


def test_a_request_that_waits_for_room_is_no_hit_at_every_step() -> None:
    world = World(num_blocks=17, max_batched=64)
    world.add("first", prompt(16), 1)
    world.run()
    world.add("large", prompt(40, 1), 20)
    world.step()
    acquired = []
    acquire = world.cache.acquire
    world.cache.acquire = lambda *args: acquired.append(args) or acquire(*args)  # type: ignore[method-assign, func-returns-value]
    world.add("waits", [*prompt(16), *prompt(40, 2)], 8)
    for _ in range(5):
        world.step()
    assert world.engine.stats().num_waiting == 1
    assert acquired == []
    world.run()
    assert world.tokens("waits") == answer_of([*prompt(16), *prompt(40, 2)], 8)


def test_a_lost_link_takes_its_requests_along() -> None:
    world = World()
    world.add("mine", prompt(9), 8, link="a")
    world.add("other", prompt(9, 1), 8, link="b")
    world.step()
    world.engine.abort_link("a")
    world.run()
    assert world.tokens("other") == answer_of(prompt(9, 1), 8)
    assert all(output.finish_reason is None for output in world.outputs["mine"])
    assert world.engine.stats().num_locked_blocks == 0


def test_a_repeated_request_id_changes_nothing() -> None:
    world = World()
    world.add("a", prompt(9), 4)
    world.add("a", prompt(9, 5), 4)
    world.run()
    assert world.tokens("a") == answer_of(prompt(9), 4)
