"""Tokens and their scores become text, in pieces that are certain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.protocol import FinishReason, RequestOutput, TokenLogprobs
from service.answer_text import AnswerText, ScoredToken, TextEvent

LETTERS = "abcdefgh"


def decode(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def score(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), 1, (token_id,), (-float(token_id),))


def output(*token_ids: int, scored: bool = False, **fields: object) -> RequestOutput:
    logprobs = tuple(map(score, token_ids)) if scored else ()
    return RequestOutput(request_id="r", token_ids=token_ids, logprobs=logprobs, **fields)  # type: ignore[arg-type]


def test_several_tokens_of_one_step_are_one_event() -> None:
    answer = AnswerText(decode)
    assert answer.take(output(0, 1, 2)) == (TextEvent("abc", 3, 0), 3)
    last = output(3, 4, 7, finish_reason=FinishReason.STOP, stop_token_id=7)
    assert answer.take(last) == (TextEvent("de", 6, 0, "stop", 7), 3)


def test_a_stop_string_inside_a_run_ends_the_text_and_the_count_there() -> None:
    """As it would have, had the tokens come one by one."""
    answer = AnswerText(decode, ("cd",))
    assert answer.take(output(0, 1, 2, 3, 4, 5)) == (TextEvent("ab", 4, 0, "stop", "cd"), 4)


def test_an_admission_without_tokens_is_an_event() -> None:
    answer = AnswerText(decode)
    admitted = output(num_cached_tokens=8, num_host_tokens=3, num_disk_tokens=1)
    answer.served(admitted)
    event, num_tokens = answer.take(admitted)
    assert event == TextEvent("", 0, 8, num_host_tokens=3, num_disk_tokens=1)
    assert num_tokens == 0
    assert answer.take(output()) == (None, 0)


def test_scores_come_with_the_text_of_their_tokens() -> None:
    answer = AnswerText(decode, ("bz",))
    first, _ = answer.take(output(0, 1, scored=True))
    assert first is not None
    assert (first.text, [item.token_id for item in first.scores]) == ("a", [0])
    second, _ = answer.take(output(2, scored=True))
    assert second is not None
    assert second.text == "bc"
    assert second.scores == (
        ScoredToken(1, -1.0, ((1, -1.0),), 1, 2),
        ScoredToken(2, -2.0, ((2, -2.0),), 2, 3),
    )


def test_the_stop_token_has_no_score_and_no_text() -> None:
    answer = AnswerText(decode)
    last = output(0, 7, scored=True, finish_reason=FinishReason.STOP, stop_token_id=7)
    event, _ = answer.take(last)
    assert event is not None
    assert [item.token_id for item in event.scores] == [0]


def test_the_tokens_of_a_stop_string_have_no_score() -> None:
    answer = AnswerText(decode, ("cd",))
    event, _ = answer.take(output(0, 1, 2, 3, scored=True))
    assert event is not None
    assert (event.text, [item.token_id for item in event.scores]) == ("ab", [0, 1])


def test_the_scores_of_the_prompt_come_with_the_first_text() -> None:
    answer = AnswerText(decode, (), (), (0, 1, 2))
    for part in ((None, score(1)), (score(2),)):
        answer.served(output(prompt_logprobs=part))
        assert answer.take(output()) == (None, 0)
    event, _ = answer.take(output(3))
    assert event is not None
    assert event.prompt_scores == (
        ScoredToken(0, None, (), 0, 1),
        ScoredToken(1, -1.0, ((1, -1.0),), 1, 2),
        ScoredToken(2, -2.0, ((2, -2.0),), 2, 3),
    )
    again, _ = answer.take(output(4))
    assert again is not None
    assert again.prompt_scores == ()


@given(
    st.lists(st.integers(0, 7), max_size=12),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
    st.sampled_from([(), ("cd",), ("abc", "fg"), ("h",)]),
)
@settings(max_examples=150, deadline=None)
def test_text_and_scores_do_not_depend_on_how_tokens_arrive(
    token_ids: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    def run(sizes: Sequence[int]) -> tuple[str, list[ScoredToken], str | None]:
        answer = AnswerText(decode, stop)
        rest, text, scores, reason = list(token_ids), "", [], None
        for size in itertools.chain(sizes, [99]):
            part, rest = rest[:size], rest[size:]
            is_last = not rest
            reason = FinishReason.LENGTH if is_last else None
            event, _ = answer.take(output(*part, scored=True, finish_reason=reason))
            if event is not None:
                text, scores = text + event.text, [*scores, *event.scores]
                if event.finish_reason is not None:
                    return text, scores, event.finish_reason
        raise AssertionError("no end")

    whole = run([99])
    assert run(cuts) == whole
    assert decode([item.token_id for item in whole[1]]) == whole[0]
