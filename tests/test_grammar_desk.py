"""Grammars compiled beside the engine: who waits, who shares, what is kept and forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from model_worker import grammar_desk
from model_worker.grammar import GrammarError, TokenMatcher, no_grammars
from model_worker.grammar_desk import GrammarDesk
from model_worker.protocol import ErrorCode, FinishReason
from model_worker.request import Request
from model_worker.sampling_params import Grammar
from tests.request_kit import make_request
from tests.scheduler_kit import LINK, World, prompt
from tests.test_grammar import compiler

DIGITS = Grammar("regex", "[0-9]{1,3}")
LETTERS = Grammar("regex", "[a-z]+")


class GatedCompiler:
    """Compiles when it is told to, and counts."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[Grammar] = []

    def __call__(self, grammar: Grammar) -> TokenMatcher:
        self.asked.append(grammar)
        assert self.gate.wait(10)
        return compiler().compile(grammar)


@pytest.fixture
def gated() -> GatedCompiler:
    return GatedCompiler()


@pytest.fixture
def woken() -> threading.Event:
    return threading.Event()


@pytest.fixture
def desk(gated: GatedCompiler, woken: threading.Event) -> Iterator[GrammarDesk]:
    desk = GrammarDesk(gated, woken.set)
    yield desk
    gated.gate.set()
    desk.close()


def taken(desk: GrammarDesk, woken: threading.Event) -> list[Request]:
    assert woken.wait(10)
    woken.clear()
    outcomes = list(desk.take())
    assert all(problem is None and request.matcher is not None for request, problem in outcomes)
    return [request for request, _ in outcomes]


def test_who_asks_first_waits_and_later_ones_do_not(
    desk: GrammarDesk, gated: GatedCompiler, woken: threading.Event
) -> None:
    first, second, third = make_request(), make_request(), make_request()
    assert not desk.submit(first, DIGITS)
    assert not desk.submit(second, DIGITS)
    assert (len(desk), list(desk.take())) == (2, [])
    gated.gate.set()
    assert taken(desk, woken) == [first, second]
    assert len(desk) == 0
    assert desk.submit(third, DIGITS)
    assert gated.asked == [DIGITS]
    matchers = {id(request.matcher) for request in (first, second, third)}
    assert len(matchers) == 3


def test_another_salt_does_not_learn_what_is_compiled(
    desk: GrammarDesk, gated: GatedCompiler, woken: threading.Event
) -> None:
    gated.gate.set()
    desk.submit(make_request(), DIGITS, "a")
    taken(desk, woken)
    assert not desk.submit(make_request(), DIGITS, "b")
    taken(desk, woken)
    assert desk.submit(make_request(), DIGITS, "b")
    assert gated.asked == [DIGITS, DIGITS]


def test_the_grammar_that_was_used_longest_ago_is_forgotten(
    desk: GrammarDesk,
    gated: GatedCompiler,
    woken: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_desk, "MAX_COMPILED", 2)
    gated.gate.set()
    for grammar in (DIGITS, LETTERS):
        desk.submit(make_request(), grammar)
        taken(desk, woken)
    assert desk.submit(make_request(), DIGITS)
    desk.submit(make_request(), Grammar("regex", "x"))
    taken(desk, woken)
    assert desk.submit(make_request(), DIGITS)
    assert not desk.submit(make_request(), LETTERS)


def failing(error: BaseException) -> Callable[[Grammar], TokenMatcher]:
    def compile(grammar: Grammar) -> TokenMatcher:
        raise error

    return compile


@pytest.mark.parametrize(
    ("error", "told"),
    [(GrammarError("bad"), "bad"), (RuntimeError("inside"), "it could not be compiled")],
)
def test_a_failure_is_told_to_all_who_wait_and_is_not_kept(
    error: Exception, told: str, woken: threading.Event
) -> None:
    desk = GrammarDesk(failing(error), woken.set)
    for _ in range(2):
        requests = [make_request(), make_request()]
        for request in requests:
            assert not desk.submit(request, DIGITS)
        assert woken.wait(10)
        woken.clear()
        outcomes = list(desk.take())
        while len(outcomes) < 2:
            outcomes += desk.take()
        assert [request for request, _ in outcomes] == requests
        assert {str(problem) for _, problem in outcomes} == {told}
    desk.close()


# ---------------------------------------------------------------- beside the engine


def world_with(desk: GrammarDesk, **options: int) -> World:
    world = World(**options)  # type: ignore[arg-type]
    world.engine._grammars = desk
    return world


def test_the_engine_goes_on_and_the_request_joins_in(
    desk: GrammarDesk, gated: GatedCompiler, woken: threading.Event
) -> None:
    world = world_with(desk)
    world.add("bounded", prompt(5), grammar=DIGITS)
    world.step()
    assert world.engine.is_stalled
    assert world.engine.has_work
    assert world.engine.stats().num_waiting == 1
    world.add("plain", prompt(6))
    while world.scheduler.has_work:
        world.step()
    assert world.ending("plain").finish_reason is FinishReason.LENGTH
    assert "bounded" not in world.outputs
    gated.gate.set()
    assert woken.wait(10)
    world.step()
    assert world.engine.stats().num_waiting == 0
    assert world.scheduler.num_running == 1
    world.engine.abort(LINK, "bounded")


def test_one_that_is_aborted_while_it_waits_is_never_queued(
    desk: GrammarDesk, gated: GatedCompiler, woken: threading.Event
) -> None:
    world = world_with(desk)
    world.add("a", prompt(5), grammar=DIGITS)
    world.add("b", prompt(5), grammar=DIGITS)
    world.engine.abort(LINK, "a")
    world.engine.abort_link(LINK)
    gated.gate.set()
    assert woken.wait(10)
    world.run()
    assert world.outputs == {}
    assert world.runner.batches == []


def test_a_bad_grammar_is_the_request_s_own_fault_and_nobody_else_s() -> None:
    world = world_with(GrammarDesk(no_grammars))
    world.add("bad", prompt(5), grammar=DIGITS)
    world.add("good", prompt(5))
    world.run()
    error = world.ending("bad").error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "grammar")
    assert error.message == "grammar: this worker follows none"
    assert world.ending("good").finish_reason is FinishReason.LENGTH


def test_those_that_wait_for_grammars_count_as_waiting(desk: GrammarDesk) -> None:
    world = world_with(desk, max_num_waiting=2)
    for name in ("a", "b", "c"):
        world.add(name, prompt(5), grammar=DIGITS)
    world.collect()
    error = world.ending("c").error
    assert error is not None
    assert error.code is ErrorCode.OVERLOADED
