"""The order of sessions' activity, and what falls due."""

from __future__ import annotations

from service.sessions.book import SessionBook, SessionLimits
from service.sessions.identity import SessionKey

A, B, C = (SessionKey("t", name) for name in "abc")


def book(**limits: float) -> SessionBook:
    made = SessionBook(SessionLimits(**{"idle_timeout": 10.0, **limits}))  # type: ignore[arg-type]
    for at, key in enumerate((A, B, C)):
        made.note(key, float(at), at + 100.0, 50)
    return made


def test_the_idle_are_told_once_in_order_and_no_more_than_asked_for() -> None:
    made = book()
    assert made.take_idle(9.9, 5) == []
    assert made.take_idle(11.0, 1) == [A]
    assert made.take_idle(11.0, 5) == [B]
    assert not made.is_awake(A)
    made.note(A, 12.0, 112.0, 50)
    assert made.is_awake(A)
    assert made.take_idle(21.9, 5) == [C]
    assert made.take_idle(22.0, 5) == [A]


def test_the_ended_are_told_by_their_latest_time() -> None:
    made = book()
    made.note(A, 3.0, 200.0, 50)
    assert made.take_ended(101.5, 5) == [B]
    made.defer_end(B, 150.0)
    made.forget(C)
    assert made.take_ended(149.0, 5) == []
    assert made.take_ended(200.0, 1) == [B]
    assert made.take_ended(200.0, 1) == [A]


def test_the_latest_stand_first_whosever_they_are() -> None:
    made = book()
    other = SessionKey("u", "z")
    made.note(other, 1.5, 100.0, 0)
    assert made.latest() == [C, other, B, A]
    made.note(A, 5.0, 105.0, 50)
    assert made.latest() == [A, C, other, B]
    made.forget(C)
    assert made.latest() == [A, other, B]


def test_histories_are_counted_and_the_oldest_are_too_many_first() -> None:
    made = book(max_history_bytes=120)
    assert made.history_bytes == 150
    assert made.excess_histories(5) == [A]
    made.note(A, 5.0, 105.0, 50)
    assert made.excess_histories(5) == [B]
    made.note_history(B, 0)
    assert (made.history_bytes, made.excess_histories(5)) == (100, [])
    made.forget(A)
    assert made.history_bytes == 50


def test_sessions_are_too_many_by_tenant_and_in_all() -> None:
    made = book(max_sessions_per_tenant=1)
    made.note(SessionKey("u", "a"), 9.0, 109.0, 0)
    assert made.excess_sessions(5) == [A, B]
    assert made.excess_sessions(1) == [A]
    made = book(max_sessions=2)
    made.note(SessionKey("u", "a"), 9.0, 109.0, 0)
    assert made.excess_sessions(5) == [A, B]
    assert len(made) == 4


def test_what_is_known_may_be_older_than_what_is_stored() -> None:
    made = book()
    assert made.is_older(A, 1.0)
    assert not made.is_older(A, 0.0)
    assert made.is_older(SessionKey("t", "x"), 0.0)
    assert made.is_known(A)
    assert not made.is_known(SessionKey("x", "a"))


def test_many_turns_of_one_session_take_no_room() -> None:
    made = book()
    for number in range(20_000):
        made.note(A, float(number), number + 100.0, 50)
    assert len(made._ends) < 2_000
    assert len(made) == 3
