"""Places in the queue: bounded, all or none, and always given back."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import Overloaded, Unavailable
from service.request_gate import RequestGate


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
