"""How many requests are let in, and when no more are.

Owns the bounded queue (requests that wait for their first token), the number in flight, both of
each tenant too, and draining. Knows nothing of workers or of what requests ask for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from service.errors import Overloaded, Unavailable
from service.tenants.rate_limits import RateLimits
from service.tenants.tenant import EVERYONE, Tenant

__all__ = ["RequestGate", "Ticket"]


@dataclass(slots=True)
class _Share:
    """What one tenant has in the gate."""

    weight: float
    num_queued: int = 0
    num_in_flight: int = 0


class Ticket:
    """One request's place. All methods but :meth:`reserve` may be called more than once."""

    def __init__(self, gate: RequestGate, tenant: Tenant) -> None:
        self._gate = gate
        self.tenant = tenant
        self._is_waiting = True
        self._is_open = True
        self._num_prompt_tokens = 0
        self._num_used = 0
        self._reserved = 0.0

    def reserve(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Take what it is likely to use of its tenant's tokens per minute, once the prompt is
        known. Raises RateLimited."""
        self._num_prompt_tokens = num_prompt_tokens
        self._reserved = self._gate.rates.reserve_tokens(self.tenant, num_prompt_tokens, max_tokens)

    def used(self, num_computed_prompt_tokens: int, num_output_tokens: int) -> None:
        """What it came to, before it is closed; a request that reached no worker used nothing."""
        self._num_used = num_computed_prompt_tokens + num_output_tokens
        if self._is_open and self._num_used and self._num_prompt_tokens:
            self._gate.rates.learn(
                self.tenant, self._num_prompt_tokens, num_computed_prompt_tokens, num_output_tokens
            )

    def started(self) -> None:
        """The first token has come: the place in the queue is free again."""
        if self._is_waiting:
            self._is_waiting = False
            self._gate._leave_queue(self)

    def close(self) -> None:
        self.started()
        if self._is_open:
            self._is_open = False
            self._gate._leave(self)
            self._gate.rates.settle_tokens(self.tenant, self._reserved, self._num_used)


class RequestGate:
    """Used from the event loop alone.

    A full queue takes no more of a tenant that has its share of it: the queue, divided by weight
    among those who have something in it. One who has less still gets in, so a flood keeps out
    nobody but its sender. With n tenants the queue can grow to 1 + 1/2 + ... + 1/n times its size.
    """

    def __init__(self, max_queue: int, rates: RateLimits | None = None) -> None:
        self.rates = RateLimits() if rates is None else rates
        self._max_queue = max_queue
        self._num_queued = 0
        self._num_in_flight = 0
        self._shares: dict[str, _Share] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._open: dict[Ticket, None] = {}
        self._has_left = asyncio.Event()

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)

    def admit(self, num_requests: int, tenant: Tenant = EVERYONE) -> list[Ticket]:
        """All or none. Raises Overloaded when the queue is full or the tenant at a limit of its
        own, RateLimited when it asks too often, Unavailable while draining."""
        self.check_open()
        share = self._shares.get(tenant.tenant_id) or _Share(tenant.weight)
        _check_concurrency(tenant, share.num_in_flight + num_requests)
        self._check_queue(tenant, share, num_requests)
        self.rates.take_request(tenant)
        share.weight = tenant.weight
        share.num_queued += num_requests
        share.num_in_flight += num_requests
        self._shares[tenant.tenant_id] = share
        self._num_queued += num_requests
        self._num_in_flight += num_requests
        self._is_idle.clear()
        tickets = [Ticket(self, tenant) for _ in range(num_requests)]
        self._open.update(dict.fromkeys(tickets))
        return tickets

    def _check_queue(self, tenant: Tenant, share: _Share, num_requests: int) -> None:
        num_own = share.num_queued + num_requests
        queue_share = tenant.limits.queue_share
        if queue_share is not None and num_own > max(1, int(queue_share * self._max_queue)):
            raise Overloaded(
                f"{share.num_queued} requests of this key's tenant are waiting, which is its share "
                "of the queue; try again later.",
                code="queue_share_reached",
                retry_after=1,
            )
        is_full = self._num_queued + num_requests > self._max_queue
        if is_full and num_own > self._fair_share(tenant):
            raise Overloaded(
                f"The queue of {self._max_queue} waiting requests is full; try again later.",
                code="queue_full",
                retry_after=1,
            )

    def _fair_share(self, tenant: Tenant) -> int:
        """Of a full queue, in requests; 0 where the tenant is alone in it."""
        others = sum(
            share.weight
            for tenant_id, share in self._shares.items()
            if share.num_queued and tenant_id != tenant.tenant_id
        )
        if not others:
            return 0
        return max(1, int(self._max_queue * tenant.weight / (others + tenant.weight)))

    async def wait_for_present(self, timeout: float) -> bool:
        """Whether all requests that are in flight now ended within ``timeout`` seconds; others
        are let in meanwhile."""
        present = set(self._open)
        try:
            async with asyncio.timeout(timeout):
                while not present.isdisjoint(self._open):
                    self._has_left.clear()
                    await self._has_left.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, timeout: float) -> bool:
        """Let nothing in from now on; whether all requests ended within ``timeout`` seconds."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def _leave_queue(self, ticket: Ticket) -> None:
        self._num_queued -= 1
        self._shares[ticket.tenant.tenant_id].num_queued -= 1

    def _leave(self, ticket: Ticket) -> None:
        self._num_in_flight -= 1
        share = self._shares[ticket.tenant.tenant_id]
        share.num_in_flight -= 1
        if share.num_in_flight == 0:
            del self._shares[ticket.tenant.tenant_id]
        self._open.pop(ticket, None)
        self._has_left.set()
        if self._num_in_flight == 0:
            self._is_idle.set()


def _check_concurrency(tenant: Tenant, num_in_flight: int) -> None:
    limit = tenant.limits.max_concurrent
    if limit is not None and num_in_flight > limit:
        raise Overloaded(
            f"At most {limit} requests of this key's tenant run at once; try again later.",
            code="concurrency_limit",
            retry_after=1,
        )
