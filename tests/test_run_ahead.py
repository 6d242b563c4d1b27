"""The engine one step ahead, over a device that computes as late as it may: the same answers, and
what a step in flight still needs is there until it is done."""

from __future__ import annotations

import pytest

from model_worker.engine import MAX_FAILED_STEPS, EngineError
from model_worker.protocol import ErrorCode, FinishReason
from tests.draft_kit import ScriptedSpeculator
from tests.scheduler_kit import BLOCK, LINK, VOCAB, World, answer_of, prompt


def ahead(num_blocks: int = 64, **options: object) -> World:
    return World(num_blocks, runs_ahead=True, **options)  # type: ignore[arg-type]


def test_a_step_is_launched_before_the_result_of_the_one_in_front() -> None:
    world = ahead()
    world.add("a", prompt(11), 4)
    world.step()
    assert (world.device.num_queued, world.tokens("a")) == (1, [])
    for count in (1, 2, 3):
        world.step()
        assert world.tokens("a") == answer_of(prompt(11), count)
        assert world.device.num_queued == 1
    assert world.device.max_queued == 2
    world.step()
    assert world.tokens("a") == answer_of(prompt(11), 4)
    assert world.ending("a").finish_reason is FinishReason.LENGTH
    # Nothing is launched behind a token that can only be the last.
    assert not world.engine.has_work
    assert [batch.num_tokens for batch in world.runner.batches] == [11, 1, 1, 1]


def test_on_a_cpu_nothing_is_left_in_flight() -> None:
    world = World()
    world.add("a", prompt(11), 4)
    world.step()
    assert world.tokens("a") == answer_of(prompt(11), 1)


def test_the_time_of_a_step_begins_where_the_one_before_it_ended() -> None:
    world = ahead()
    world.add("a", prompt(11), 8)
    for _ in range(3):
        world.step()
    before = world.now_s
    world.step()
    # The clock ticks at each look at it: for the step's start, its launch and its end.
    assert world.now_s - before == 0.75
    assert world.engine.stats().step_s == 0.75


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_the_shortest_answers(max_tokens: int) -> None:
    world = ahead(max_batched=8)
    world.add("a", prompt(11), max_tokens)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), max_tokens)
    assert world.ending("a").finish_reason is FinishReason.LENGTH
    assert [batch.num_tokens for batch in world.runner.batches] == [8, 3, 1][: 2 + (max_tokens > 1)]


@pytest.mark.parametrize("stop", range(4))
def test_the_row_behind_a_stop_token_is_nobodys(stop: int) -> None:
    """It is computed, and leaves neither a token nor a trace in the tree."""
    answer = answer_of(prompt(9), 8)
    stored = []
    for runs_ahead in (False, True):
        world = World(runs_ahead=runs_ahead)
        world.add("a", prompt(9), 8, stop_token_ids=(answer[stop],))
        world.run()
        assert world.tokens("a") == answer[: answer.index(answer[stop]) + 1]
        assert world.ending("a").stop_token_id == answer[stop]
        assert world.engine.stats().num_locked_blocks == 0
        world.add("next", [*prompt(9), *world.tokens("a"), 1, 2], 3)
        world.run()
        stored.append(world.outputs["next"][0].num_cached_tokens)
        assert world.tokens("next") == answer_of([*prompt(9), *world.tokens("a"), 1, 2], 3)
    assert stored[0] == stored[1] == 9 + stop


def test_who_has_stopped_keeps_its_blocks_until_its_last_row_is_written() -> None:
    answer = answer_of(prompt(9), 8)
    world = ahead()
    world.add("a", prompt(9), 8, stop_token_ids=(answer[1],))
    while "a" not in world.outputs or world.outputs["a"][-1].finish_reason is None:
        world.step()
    stats = world.engine.stats()
    assert (stats.num_running, stats.num_locked_blocks) == (0, 3)
    assert world.engine.has_work
    world.step()
    assert world.engine.stats().num_locked_blocks == 0
    assert not world.engine.has_work


def test_an_abort_under_a_step_keeps_the_blocks_and_what_was_computed() -> None:
    world = ahead(max_batched=8)
    world.add("a", prompt(24), 4)
    world.step()
    world.step()  # its first chunk is known, the second in flight
    world.engine.abort(LINK, "a")
    world.collect()
    assert world.ending("a").finish_reason is FinishReason.ABORT
    world.engine.check_integrity()
    assert world.engine.stats().num_locked_blocks == 24 // BLOCK
    world.run()
    assert world.engine.stats().num_locked_blocks == 0
    world.add("b", prompt(24), 4)
    world.run()
    assert world.outputs["b"][0].num_cached_tokens == 16
    assert world.tokens("b") == answer_of(prompt(24), 4)


def test_an_id_may_be_used_again_while_its_first_request_is_in_flight() -> None:
    world = ahead()
    world.add("a", prompt(9), 8)
    world.step()
    world.engine.abort(LINK, "a")
    world.collect()
    world.outputs.clear()
    world.add("a", prompt(9, 5), 4)
    world.run()
    assert world.tokens("a") == answer_of(prompt(9, 5), 4)


@pytest.mark.parametrize(
    "params",
    [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.2}],
)
def test_all_wait_while_one_needs_to_know_its_tokens(params: dict[str, object]) -> None:
    world = ahead(max_batched=32)
    world.add("counts", prompt(9), 4, **params)
    world.add("other", prompt(9, 1), 12)
    world.run()
    assert world.tokens("counts") == answer_of(prompt(9), 4)
    assert world.tokens("other") == answer_of(prompt(9, 1), 12)
    rows = [len(batch.scheduled) for batch in world.runner.batches]
    # Neither passes the other by, and once the first has ended the second runs ahead.
    assert rows == [2] * 4 + [1] * 8
    drawn = [item.takes_drawn for batch in world.runner.batches for item in batch.scheduled]
    assert drawn == [False] * 8 + [True] * 8


def test_chunks_of_a_prompt_run_ahead_and_a_row_copy_is_made_once() -> None:
    world = ahead(max_batched=8)
    world.add("first", prompt(14), 2)
    world.run()
    num_before = len(world.runner.batches)
    world.add("second", [*prompt(14), *prompt(30, 1)], 2)
    world.run()
    assert world.outputs["second"][0].num_cached_tokens == 14
    assert world.tokens("second") == answer_of([*prompt(14), *prompt(30, 1)], 2)
    batches = world.runner.batches[num_before:]
    assert [batch.num_tokens for batch in batches] == [8, 8, 8, 6, 1]
    assert [len(batch.copies) for batch in batches] == [1, 0, 0, 0, 0]


def test_followers_of_a_prefix_go_on_when_it_is_there() -> None:
    world = ahead(num_blocks=200, max_num_seqs=8, max_batched=16)
    shared = prompt(40)
    for number in range(8):
        world.add(f"r{number}", [*shared, 1 + number, 2, 3], 3)
    world.run()
    for number in range(8):
        assert world.tokens(f"r{number}") == answer_of([*shared, 1 + number, 2, 3], 3)
    stats = world.engine.stats()
    assert stats.coalesced_requests_total == 7
    assert stats.prompt_tokens_computed_total == 43 + 7 * 3


def test_nobody_is_preempted_under_a_step() -> None:
    world = ahead(num_blocks=12, max_num_seqs=3, max_batched=64)
    preempt = world.scheduler._preempt
    queued = []
    world.scheduler._preempt = lambda request: (  # type: ignore[method-assign]
        queued.append(world.device.num_queued),
        preempt(request),
    )[1]
    for number in range(3):
        world.add(f"r{number}", prompt(12, number), 20)
    world.run()
    for number in range(3):
        assert world.tokens(f"r{number}") == answer_of(prompt(12, number), 20)
    assert world.engine.stats().preemptions_total > 0
    assert set(queued) == {0}
    first_done = [name for name in world.outputs if world.ending(name)]
    assert first_done[0] == "r0"


def test_a_step_with_drafts_is_waited_for() -> None:
    speculator = ScriptedSpeculator(lambda request: answer_of(request.token_ids.tolist(), 3))
    speculator.expects_drafts = lambda in_flight: True  # type: ignore[method-assign]
    world = ahead(speculator=speculator)
    world.add("a", prompt(11), 12)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 12)
    assert [len(output.token_ids) for output in world.outputs["a"]] == [4, 4, 4]
    assert world.device.max_queued == 1


def test_without_drafts_to_expect_the_engine_runs_ahead_of_a_speculator() -> None:
    speculator = ScriptedSpeculator(lambda request: ())
    speculator.expects_drafts = lambda in_flight: False  # type: ignore[method-assign]
    world = ahead(speculator=speculator)
    world.add("a", prompt(11), 12)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 12)
    assert world.device.max_queued == 2


def test_a_failed_step_takes_the_one_behind_it_along() -> None:
    world = ahead()
    world.add("a", prompt(9), 8)
    world.step()
    world.device.fails_result = True
    world.step()  # launches the step that will fail
    world.add("b", prompt(9, 1), 4)  # is in the step behind that one
    world.step()
    for name, count in (("a", 1), ("b", 0)):
        error = world.ending(name).error
        assert error is not None
        assert error.code is ErrorCode.INTERNAL
        assert len(world.tokens(name)) == count
    assert not world.engine.has_work
    assert world.engine.stats().num_locked_blocks == 0
    world.add("c", prompt(9, 2), 4)
    world.run()
    assert world.tokens("c") == answer_of(prompt(9, 2), 4)


def test_a_step_that_cannot_be_launched_does_no_harm_to_the_one_in_front() -> None:
    world = ahead(max_num_seqs=1)
    world.add("a", prompt(9), 8)
    world.add("waits", prompt(9, 1), 4)
    world.step()
    world.device.fails_launch = True
    world.step()
    assert len(world.tokens("a")) == 1
    assert world.ending("a").error is not None
    world.run()
    assert world.tokens("waits") == answer_of(prompt(9, 1), 4)


def test_who_has_ended_is_not_told_of_a_failure() -> None:
    answer = answer_of(prompt(9), 8)
    world = ahead()
    world.add("stops", prompt(9), 8, stop_token_ids=(answer[0],))
    world.add("goes on", prompt(9, 1), 8)
    world.step()
    world.device.fails_result = True
    world.step()
    world.step()
    assert world.ending("stops").finish_reason is FinishReason.STOP
    assert world.ending("goes on").error is not None
    world.run()
    assert world.engine.stats().num_locked_blocks == 0


def test_a_device_that_fails_for_good_ends_the_engine() -> None:
    world = ahead()
    for number in range(MAX_FAILED_STEPS):
        world.add(f"r{number}", prompt(5, number))
        world.device.fails_result = True
        world.step()
        if number < MAX_FAILED_STEPS - 1:
            world.step()
            assert world.ending(f"r{number}").error is not None
    with pytest.raises(EngineError, match="5 steps failed in a row"):
        world.step()


def test_a_drafted_stop_token_ends_the_answer() -> None:
    answer = answer_of(prompt(9), 8)
    speculator = ScriptedSpeculator(
        lambda request: [token % VOCAB for token in answer_of(request.token_ids.tolist(), 4)]
    )
    world = ahead(speculator=speculator, eos_token_ids=(answer[2],))
    world.add("a", prompt(9), 8)
    world.run()
    assert world.tokens("a") == answer[:3]
