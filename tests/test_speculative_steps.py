"""Steps with drafts over the scripted runner: the same answers, ends, blocks and accounts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from model_worker.protocol import FinishReason
from model_worker.request import Request
from tests.draft_kit import Guess, ScriptedSpeculator, spoiled
from tests.scheduler_kit import BLOCK, LINK, MAX_MODEL_LEN, VOCAB, World, answer_of, prompt


def right(count: int) -> Guess:
    return lambda request: answer_of(request.token_ids.tolist(), count)


def wrong_from(position: int, count: int) -> Guess:
    """The first ``position`` drafts are right."""
    return lambda request: spoiled(right(count)(request), position, VOCAB)


def drafted_world(guess: Guess, **options: object) -> tuple[World, ScriptedSpeculator]:
    speculator = ScriptedSpeculator(guess)
    return World(speculator=speculator, **options), speculator  # type: ignore[arg-type]


def counts(world: World) -> tuple[int, int, int]:
    counters = world.scheduler.counters
    return counters.generated_tokens, counters.draft_tokens, counters.accepted_tokens


def tokens_per_step(world: World, name: str) -> list[int]:
    return [len(output.token_ids) for output in world.outputs[name]]


def test_right_drafts_come_several_a_step() -> None:
    world, speculator = drafted_world(right(4))
    world.add("a", prompt(11), 12)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 12)
    # The prompt's step has drafts too; the last one has as many as can still count.
    assert tokens_per_step(world, "a") == [5, 5, 2]
    assert [batch.num_draft_tokens for batch in world.runner.batches] == [4, 4, 1]
    assert [batch.num_tokens for batch in world.runner.batches] == [15, 5, 2]
    assert counts(world) == (12, 9, 9)
    assert (speculator.num_drafts, speculator.num_accepted) == (9, 9)
    assert speculator.num_forgotten == 1
    assert world.outputs["a"][0].prefill_s is not None
    assert world.outputs["a"][1].prefill_s is None


@pytest.mark.parametrize("position", range(4))
def test_what_follows_a_wrong_draft_is_thrown_away(position: int) -> None:
    world, _ = drafted_world(wrong_from(position, 4))
    world.add("a", prompt(11), 12)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 12)
    per_step = position + 1
    full, rest = divmod(12, per_step)
    assert tokens_per_step(world, "a") == [per_step] * full + [rest] * (rest > 0)
    generated, _, accepted = counts(world)
    assert generated == 12
    assert accepted == 12 - len(tokens_per_step(world, "a"))


def test_a_draft_counts_as_accepted_only_if_it_is_in_the_answer() -> None:
    """The answer ends with the second of three right drafts."""
    answer = answer_of(prompt(9), 8)
    world, _ = drafted_world(right(3), eos_token_ids=(answer[1],))
    world.add("a", prompt(9), 8)
    world.run()
    assert world.tokens("a") == answer[:2]
    assert counts(world) == (2, 3, 2)


@pytest.mark.parametrize("end", range(8))
def test_a_stop_token_inside_a_run_ends_it_there(end: int) -> None:
    answer = answer_of(prompt(9), 8)
    end = answer.index(answer[end])  # its first occurrence
    plain = World(eos_token_ids=(answer[end],))
    plain.add("a", prompt(9), 8)
    plain.run()
    world, _ = drafted_world(right(5), eos_token_ids=(answer[end],))
    world.add("a", prompt(9), 8)
    world.run()
    assert world.tokens("a") == answer[: end + 1] == plain.tokens("a")
    assert world.ending("a").finish_reason is FinishReason.STOP
    assert world.ending("a").stop_token_id == answer[end]
    assert stored_tokens(world, [*prompt(9), *answer]) == 9 + end
    assert stored_tokens(plain, [*prompt(9), *answer]) == 9 + end


def stored_tokens(world: World, token_ids: Sequence[int]) -> int:
    """How far the tree goes along these tokens."""
    world.add("probe", [*token_ids, 1], 1)
    world.run()
    cached = world.outputs["probe"][0].num_cached_tokens
    assert cached is not None
    return cached


def test_ignored_ends_and_stop_tokens_of_the_request() -> None:
    answer = answer_of(prompt(9), 8)
    world, _ = drafted_world(right(5), eos_token_ids=(answer[2],))
    world.add("ignores", prompt(9), 8, ignore_eos=True)
    world.run()
    assert world.tokens("ignores") == answer
    world.add("stops", prompt(9), 8, ignore_eos=True, stop_token_ids=(answer[4],))
    world.run()
    assert world.tokens("stops") == answer[: answer.index(answer[4]) + 1]


def test_drafts_end_with_the_context_and_with_max_tokens() -> None:
    world, _ = drafted_world(right(9), max_batched=40)
    world.add("context", prompt(58), 100)
    world.add("one", prompt(5), 1)
    world.add("none", prompt(6), 0)
    world.run()
    assert world.tokens("context") == answer_of(prompt(58), MAX_MODEL_LEN - 58)
    assert world.ending("context").finish_reason is FinishReason.LENGTH
    assert world.tokens("one") == answer_of(prompt(5), 1)
    assert world.tokens("none") == []
    assert counts(world) == (7, 5, 5)


def test_rejected_rows_never_reach_the_tree() -> None:
    """Wrong drafts fill whole blocks beyond the answer; the next turn reads what was said."""
    world, _ = drafted_world(wrong_from(0, 3 * BLOCK), max_batched=64)
    world.add("a", prompt(11), 6)
    world.run()
    turn = [*prompt(11), *answer_of(prompt(11), 6), 3, 4]
    world.add("b", turn, 6)
    world.run()
    assert world.outputs["b"][0].num_cached_tokens == 11 + 6 - 1
    assert world.tokens("b") == answer_of(turn, 6)


def test_decoding_comes_before_drafts_and_so_does_a_prompt() -> None:
    world, _ = drafted_world(right(8), max_batched=8, max_num_seqs=3)
    world.add("short", prompt(4, 1), 30)
    world.step()
    world.add("long", prompt(30, 2), 20)
    world.step()
    batch = world.runner.batches[-1]
    assert (batch.num_decode_tokens, batch.num_prefill_tokens, batch.num_draft_tokens) == (1, 7, 0)
    world.run()
    assert all(batch.num_tokens <= 8 for batch in world.runner.batches)
    assert world.tokens("long") == answer_of(prompt(30, 2), 20)
    assert counts(world)[2] > 0


def test_a_pool_without_room_for_drafts_decodes_without() -> None:
    """One request fills the pool but for the block that it needs in the end."""
    world, _ = drafted_world(right(2 * BLOCK), num_blocks=8, max_batched=64)
    world.add("a", prompt(5), 7 * BLOCK - 5)
    world.add("b", prompt(6, 3), 10)
    world.run()
    assert world.tokens("a") == answer_of(prompt(5), 7 * BLOCK - 5)
    assert world.tokens("b") == answer_of(prompt(6, 3), 10)


def test_drafts_alone_preempt_nobody() -> None:
    """Both fit to their ends, but not with drafts: some are left out."""
    world, _ = drafted_world(wrong_from(0, 4 * BLOCK), num_blocks=10, max_batched=64)
    world.add("a", prompt(8, 1), 8)
    world.add("b", prompt(8, 2), 8)
    world.run()
    for number, name in enumerate("ab", 1):
        assert world.tokens(name) == answer_of(prompt(8, number), 8)
    assert world.engine.stats().preemptions_total == 0
    assert world.scheduler.counters.draft_tokens > 0


@pytest.mark.parametrize("position", [0, 2, 9])
def test_preempted_between_drafts(position: int) -> None:
    world, _ = drafted_world(wrong_from(position, 5), num_blocks=12, max_num_seqs=3, max_batched=64)
    for number in range(3):
        world.add(f"r{number}", prompt(12, number), 20)
    world.run()
    for number in range(3):
        assert world.tokens(f"r{number}") == answer_of(prompt(12, number), 20)
    assert world.engine.stats().preemptions_total > 0


def test_a_failed_step_ends_its_requests_and_leaves_no_draft_behind() -> None:
    world, speculator = drafted_world(wrong_from(1, 6), max_batched=64)
    world.add("a", prompt(11), 12)
    world.step()
    world.runner.fails_next = True
    world.step()
    assert world.ending("a").finish_reason is FinishReason.ERROR
    assert speculator.num_forgotten == 1
    told = [*prompt(11), *world.tokens("a")]
    world.add("b", [*told, 9], 6)
    world.run()
    assert world.outputs["b"][0].num_cached_tokens == len(told) - 1
    assert world.tokens("b") == answer_of([*told, 9], 6)


def test_aborted_between_drafts() -> None:
    world, speculator = drafted_world(wrong_from(1, 6), max_batched=64)
    world.add("a", prompt(11), 12)
    world.step()
    world.engine.abort(LINK, "a")
    world.collect()
    world.engine.check_integrity()
    assert world.ending("a").finish_reason is FinishReason.ABORT
    assert speculator.num_forgotten == 1


def test_a_cache_that_stores_nothing() -> None:
    world, _ = drafted_world(right(3), is_caching=False)
    world.add("a", prompt(11), 9)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 9)
    assert counts(world) == (9, 6, 6)


def test_a_wrong_draft_that_is_accepted_shows() -> None:
    """Negative control of this file: with a runner that believes every draft, answers differ."""

    def believed(request: Request) -> list[int]:
        return spoiled(right(3)(request), 1, VOCAB)

    world, _ = drafted_world(believed)
    execute = world.runner._answer
    world.runner._answer = lambda item: (  # type: ignore[method-assign]
        (*item.draft_token_ids, execute(item)[-1]) if item.reaches_end else ()
    )
    world.add("a", prompt(11), 9)
    world.run()
    assert world.tokens("a") != answer_of(prompt(11), 9)
