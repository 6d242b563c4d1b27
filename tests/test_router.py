"""The choice of a worker, as a table."""

from __future__ import annotations

import pytest

from service.router import Affinity, Route, WorkerLoad, choose_worker


def loads(**num_requests: int) -> list[WorkerLoad]:
    return [WorkerLoad(worker_id, count) for worker_id, count in num_requests.items()]


@pytest.mark.parametrize(
    ("locations", "given", "expected"),
    [
        ({}, {}, None),
        ({}, {"a": 9}, Route("a", "only_worker")),
        ({}, {"a": 2, "b": 1}, Route("b", "least_loaded")),
        ({}, {"b": 1, "a": 1}, Route("a", "least_loaded")),
        ({"b": 64}, {"a": 1, "b": 1}, Route("b", "longest_prefix")),
        ({"b": 64, "c": 96}, {"a": 1, "b": 1, "c": 1}, Route("c", "longest_prefix")),
        ({"b": 64}, {"a": 1, "b": 2}, Route("a", "least_loaded")),
        ({"b": 256}, {"a": 1, "b": 3}, Route("b", "longest_prefix")),
        ({"b": 256}, {"a": 1, "b": 4}, Route("a", "least_loaded")),
        ({"b": 512, "c": 512}, {"a": 0, "b": 2, "c": 1}, Route("c", "longest_prefix")),
        ({"a": 64, "b": 319}, {"a": 0, "b": 1}, Route("a", "longest_prefix")),
        ({"a": 64, "b": 320}, {"a": 0, "b": 1}, Route("b", "longest_prefix")),
        ({"gone": 64}, {"a": 1, "b": 1}, Route("a", "least_loaded")),
    ],
)
def test_choice(locations: dict[str, int], given: dict[str, int], expected: Route | None) -> None:
    assert choose_worker(locations, loads(**given), Affinity()) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a": 0, "b": 2}, Route("b", "session")),
        ({"a": 0, "b": 3}, Route("a", "least_loaded")),
        ({"a": 40, "b": 50}, Route("b", "session")),
        ({"a": 40, "b": 51}, Route("a", "least_loaded")),
        ({"a": 1, "c": 1}, Route("a", "least_loaded")),  # it is gone
        ({"b": 99}, Route("b", "only_worker")),
    ],
)
def test_a_session_returns_to_its_worker_unless_that_has_much_more_to_do(
    given: dict[str, int], expected: Route
) -> None:
    assert choose_worker({}, loads(**given), Affinity("b")) == expected


def test_a_key_stays_together_and_keys_spread() -> None:
    given = loads(a=0, b=0, c=0)
    routes = {key: choose_worker({}, given, Affinity(key=key)) for key in map(str, range(30))}
    assert routes == {key: choose_worker({}, given, Affinity(key=key)) for key in routes}
    assert {route.worker_id for route in routes.values() if route} == {"a", "b", "c"}
