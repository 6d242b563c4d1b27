"""Places in the queue: bounded, all or none, and always given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.errors import Overloaded, RateLimited, Unavailable
from service.request_gate import RequestGate
from service.tenants.rate_limits import RateLimits
from service.tenants.tenant import Limits, Tenant


def counts(gate: RequestGate) -> tuple[int, int]:
    return gate.num_queued, gate.num_in_flight


def test_a_ticket_leaves_the_queue_when_started_and_the_gate_when_closed() -> None:
    gate = RequestGate(2)
    (ticket,) = gate.admit(1)
    assert counts(gate) == (1, 1)
    ticket.started()
    ticket.started()
    assert counts(gate) == (0, 1)
    ticket.close()
    ticket.close()
    assert counts(gate) == (0, 0)


def test_closing_a_waiting_ticket_frees_both() -> None:
    gate = RequestGate(1)
    gate.admit(1)[0].close()
    assert counts(gate) == (0, 0)


def test_all_or_none() -> None:
    gate = RequestGate(3)
    gate.admit(2)
    with pytest.raises(Overloaded) as failure:
        gate.admit(2)
    assert failure.value.status == 429
    assert failure.value.headers() == {"Retry-After": "1"}
    assert counts(gate) == (2, 2)


def test_requests_that_run_take_no_place_in_the_queue() -> None:
    gate = RequestGate(1)
    for _ in range(5):
        gate.admit(1)[0].started()
    assert counts(gate) == (0, 5)


def test_draining_waits_for_the_last_and_lets_nothing_in() -> None:
    async def run() -> None:
        gate = RequestGate(2)
        tickets = gate.admit(2)
        draining = asyncio.create_task(gate.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            gate.admit(1)
        tickets[0].close()
        await asyncio.sleep(0)
        assert not draining.done()
        tickets[1].close()
        assert await draining is True

    asyncio.run(run())


def test_draining_gives_up_in_time() -> None:
    async def run() -> None:
        gate = RequestGate(1)
        gate.admit(1)
        assert await gate.drain(0.01) is False

    asyncio.run(run())


def test_waiting_for_the_present_leaves_out_who_comes_later() -> None:
    async def main() -> None:
        gate = RequestGate(8)
        assert await gate.wait_for_present(0.0)
        (first,) = gate.admit(1)
        assert not await gate.wait_for_present(0.01)
        waiting = asyncio.create_task(gate.wait_for_present(10.0))
        await asyncio.sleep(0)
        (later,) = gate.admit(1)
        first.close()
        assert await waiting
        assert gate.num_in_flight == 1
        later.close()

    asyncio.run(main())


def tenant(name: str, **fields: Any) -> Tenant:
    weight = fields.pop("weight", 1.0)
    return Tenant(tenant_id=name, namespace_owner=name, weight=weight, limits=Limits(**fields))


A, B, C = tenant("a"), tenant("b"), tenant("c")


def test_a_full_queue_refuses_who_fills_it_and_not_who_has_nothing_in_it() -> None:
    gate = RequestGate(8)
    flood = gate.admit(8, A)
    with pytest.raises(Overloaded):
        gate.admit(1, A)
    for _ in range(4):  # half of the queue is its share
        gate.admit(1, B)
    with pytest.raises(Overloaded) as failure:
        gate.admit(1, B)
    assert failure.value.code == "queue_full"
    gate.admit(2, C)  # a third
    with pytest.raises(Overloaded):
        gate.admit(1, C)
    for ticket in flood:
        ticket.started()  # in flight, and not in the queue
    gate.admit(2, A)
    assert counts(gate) == (8, 16)
    with pytest.raises(Overloaded):
        gate.admit(1, A)


def test_shares_of_a_full_queue_go_by_weight() -> None:
    gate = RequestGate(9)
    gate.admit(9, A)
    gate.admit(6, tenant("b", weight=2.0))
    with pytest.raises(Overloaded):
        gate.admit(1, tenant("b", weight=2.0))


def test_a_queue_with_room_takes_whoever_comes() -> None:
    gate = RequestGate(8)
    gate.admit(7, A)
    gate.admit(1, A)


def test_a_tenants_own_share_of_the_queue_holds_while_there_is_room() -> None:
    gate = RequestGate(8)
    bound = tenant("a", queue_share=0.25)
    tickets = gate.admit(2, bound)
    with pytest.raises(Overloaded, match="its share of the queue") as failure:
        gate.admit(1, bound)
    assert (failure.value.code, failure.value.retry_after) == ("queue_share_reached", 1)
    tickets[0].started()
    gate.admit(1, bound)
    gate.admit(1, tenant("tiny", queue_share=0.01))  # one at least


def test_only_so_many_of_a_tenant_run_at_once() -> None:
    gate = RequestGate(8)
    bound = tenant("a", max_concurrent=2)
    tickets = gate.admit(2, bound)
    tickets[0].started()
    with pytest.raises(Overloaded, match="At most 2 requests") as failure:
        gate.admit(1, bound)
    assert failure.value.code == "concurrency_limit"
    tickets[0].close()
    gate.admit(1, bound)
    gate.admit(3, B)


def test_a_refused_request_counts_nowhere() -> None:
    gate = RequestGate(1, RateLimits(lambda: 0.0))
    both = tenant("a", requests_per_minute=2, max_concurrent=1)
    (ticket,) = gate.admit(1, both)
    with pytest.raises(Overloaded, match="At most 1"):
        gate.admit(1, both)
    ticket.close()
    gate.admit(1, both)[0].close()
    with pytest.raises(RateLimited):
        gate.admit(1, both)
    assert counts(gate) == (0, 0)


def remaining(gate: RequestGate, who: Tenant) -> str:
    return dict(gate.rates.headers(who))["x-ratelimit-remaining-tokens"]


def test_tokens_are_settled_when_a_request_ends() -> None:
    gate = RequestGate(4, RateLimits(lambda: 0.0))
    bound = tenant("a", tokens_per_minute=1_000)
    (ticket,) = gate.admit(1, bound)
    ticket.reserve(400, 100)
    assert remaining(gate, bound) == "500"
    ticket.used(10, 20)
    ticket.close()
    ticket.close()
    assert remaining(gate, bound) == "970"


def test_a_request_that_came_to_nothing_costs_no_tokens() -> None:
    gate = RequestGate(4, RateLimits(lambda: 0.0))
    bound = tenant("a", tokens_per_minute=1_000)
    one, other = gate.admit(2, bound)
    one.reserve(600, 100)
    with pytest.raises(RateLimited):
        other.reserve(600, 100)
    one.close()
    other.close()
    assert remaining(gate, bound) == "1000"
    assert counts(gate) == (0, 0)
