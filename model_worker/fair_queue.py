"""Whose turn it is: what each tenant was served, and in which order they are looked at.

Owns a counter per tenant of tokens served for its weight: prefilled ones, and answered ones, which
count twice. Whoever has the least is next; within a tenant it is the oldest request (the virtual
token counter of Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). A tenant that
comes back is lifted to what the least served of those present had so far, less a credit (the warp
of Duda, Cheriton, Borrowed-Virtual-Time Scheduling, SOSP 1999): who asks for less than its part is
served at once, and nobody saves up more than that.

Of what is not divided by the step, a tenant may not have all either. Of the running requests, those
that give way are of the tenant that has most of them for its weight; one that has none while
another has more than its part gets the place of that one's youngest. Knows nothing of caches, steps
or clocks. With one tenant, or none, there is one turn, in order of age.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_worker.batch import ScheduledRequest
from model_worker.request import Request

ANSWER_TOKEN_COST = 2.0  # of a token decoded, in prefilled tokens
CREDIT_STEPS = 4  # of the largest size: so much a tenant may have before others when it comes
# While others were here in the last so many steps, the prompts of those that have had most fill
# steps to this part only: whoever comes waits for the step that is under way.
RECENT_STEPS = 4096
SHORT_STEP = 1 / 4
OLDEST_STEP = 1 / 8  # of a step's prefill is left to the oldest request, whoever's turn it is
_MIN_WEIGHT = 0.001
_LOOK_STEPS = 64  # who was here is looked at so often
_MIN_ACCOUNTS = 256


@dataclass(slots=True)
class TenantAccount:
    """``served``: tokens for its weight, on a scale that all tenants share."""

    tenant: str
    weight: float
    served: float
    num_waiting: int = 0
    num_running: int = 0
    last_step: int = 0

    @property
    def is_present(self) -> bool:
        return self.num_waiting + self.num_running > 0

    @property
    def load(self) -> float:
        return self.num_running / self.weight


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests of one tenant, or of all, each list by age.

    Prefill may fill the step to ``max_tokens``, but for ``num_reserved`` of its budget that are for
    a later turn, the one which has ``num_least`` in any case. It need not spare running answers
    where ``is_paced`` is False: they are others', who have had more.
    """

    running: Sequence[Request]
    waiting: Sequence[Request]
    max_tokens: int
    num_reserved: int = 0
    num_least: int = 0
    is_paced: bool = True

    def budget(self, allowed: int, scheduled: Sequence[ScheduledRequest]) -> int:
        """Of the ``allowed`` prefill tokens of the step, of which turns before have taken some."""
        used = sum([i.num_scheduled_tokens for i in scheduled if not _is_answer(i)])
        return max(min(allowed, self.max_tokens) - used - self.num_reserved, self.num_least)


class FairQueue:
    def __init__(self, max_step_tokens: int) -> None:
        """``max_step_tokens``: of the largest step, which is what the credit is measured in."""
        self._max_tokens = max_step_tokens
        self._short_tokens = max(1, int(max_step_tokens * SHORT_STEP))
        self._credit = float(CREDIT_STEPS * max_step_tokens)
        self._accounts: dict[str, TenantAccount] = {}
        self._weights: dict[str, float] = {}
        self._num_present = 0
        self._least = 0.0  # served to whoever had least, and never less than that was
        self._step = 0
        self._next_look = 0
        self._had_others = False
        self._forget_at = _MIN_ACCOUNTS

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """These hold and no others; whoever is not named has 1."""
        self._weights = {tenant: max(weight, _MIN_WEIGHT) for tenant, weight in weights.items()}
        for account in self._accounts.values():
            account.weight = self._weights.get(account.tenant, 1.0)

    def accounts(self) -> list[TenantAccount]:
        """Of those that are here."""
        return [account for account in self._accounts.values() if account.is_present]

    # ------------------------------------------------------------ who comes and goes

    def came(self, request: Request) -> None:
        """It waits from now on, for the first time or again."""
        account = self._accounts.get(request.tenant)
        if account is None:
            weight = self._weights.get(request.tenant, 1.0)
            account = TenantAccount(request.tenant, weight, -math.inf)
        if not account.is_present:
            self._note_least()
            account.served = max(account.served, self._least - self._credit / account.weight)
            self._num_present += 1
        self._accounts[request.tenant] = account
        account.num_waiting += 1

    def admitted(self, request: Request) -> None:
        account = self._accounts[request.tenant]
        account.num_waiting -= 1
        account.num_running += 1

    def left(self, request: Request, *, was_running: bool) -> None:
        """It neither waits nor runs, for good or until it :meth:`came` again."""
        account = self._accounts[request.tenant]
        if account.num_running + account.num_waiting == 1:
            self._note_least()
        if was_running:
            account.num_running -= 1
        else:
            account.num_waiting -= 1
        if not account.is_present:
            self._num_present -= 1
            account.last_step = self._step
            self._next_look = 0
            if len(self._accounts) > self._forget_at:
                self._forget()

    def has_running(self, tenant: str) -> bool:
        return self._accounts[tenant].num_running > 0

    def may_wait(self, tenant: str, limit: int) -> bool:
        """Whether one more may wait where ``limit`` may in all: those of one tenant take no more
        than its part from the others', who may then be somewhat more in all."""
        num_waiting = sum(account.num_waiting for account in self._accounts.values())
        if num_waiting < limit:
            return True
        own = self._accounts.get(tenant)
        is_here = own is not None and own.is_present
        part = limit // (self._num_present + (not is_here))
        return (0 if own is None else own.num_waiting) < part

    # ------------------------------------------------------------ turns

    def turns(
        self, running: Sequence[Request], waiting: Sequence[Request], num_prefill: int
    ) -> list[Turn]:
        """In which order a step looks at the requests, given each by age; ``num_prefill`` is what
        the step may prefill. Each tenant in the order of what it was served."""
        self._step += 1
        if self._num_present <= 1:
            is_shared = len(self._accounts) > 1 and self._has_recent_others()
            return [Turn(running, waiting, self._short_tokens if is_shared else self._max_tokens)]
        groups: dict[str, tuple[list[Request], list[Request]]] = {}
        for request in running:
            groups.setdefault(request.tenant, ([], []))[0].append(request)
        for request in waiting:
            groups.setdefault(request.tenant, ([], []))[1].append(request)
        order = sorted(groups, key=lambda tenant: self._accounts[tenant].served)
        first = self._accounts[order[0]]
        second = self._accounts[order[1]]
        is_behind = first.served + self._short_tokens / first.weight < second.served
        reserved = 0
        if running and running[0].is_loaded and running[0].num_uncomputed_tokens > 1:
            reserved = max(1, int(num_prefill * OLDEST_STEP))
        turns = []
        for tenant in order:
            own_running, own_waiting = groups[tenant]
            least = 0
            if running and running[0].tenant == tenant:
                reserved, least = 0, reserved  # it is the first of this turn
            is_favoured = tenant == first.tenant and is_behind
            has_answers = any(request.num_uncomputed_tokens == 1 for request in own_running)
            turns.append(
                Turn(
                    own_running,
                    own_waiting,
                    self._max_tokens if is_favoured else self._short_tokens,
                    num_reserved=reserved,
                    num_least=least,
                    is_paced=has_answers or not is_favoured,
                )
            )
        return turns

    def charge(
        self, scheduled: Sequence[ScheduledRequest], num_prefill: int, num_answered: int
    ) -> None:
        """A step was made of these, in all so many prefilled tokens and so many of answers."""
        if not scheduled:
            return
        if self._num_present <= 1:
            account = self._accounts[scheduled[0].request.tenant]
            account.served += (num_prefill + num_answered * ANSWER_TOKEN_COST) / account.weight
            return
        for item in scheduled:
            account = self._accounts[item.request.tenant]
            cost = float(item.num_scheduled_tokens)
            if _is_answer(item):
                cost += ANSWER_TOKEN_COST - 1.0
            account.served += cost / account.weight

    # ------------------------------------------------------------ who gives way

    def victim(self, running: Sequence[Request]) -> Request:
        """Who gives up its blocks, of ``running`` by age: the youngest of the tenant that has most
        of them for its weight. The oldest of all is it only where there is no other."""
        if self._num_present <= 1 or len(running) == 1:
            return running[-1]
        others = running[1:]
        most = max({request.tenant for request in others}, key=self._load_of)
        return next(request for request in reversed(others) if request.tenant == most)

    def displaced_by(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Who makes place for ``request``, where no more than ``running`` may run; None where
        nobody has to."""
        if self._num_present <= 1 or self.has_running(request.tenant) or len(running) < 2:
            return None
        victim = self.victim(running)
        account = self._accounts[victim.tenant]
        weights = sum(each.weight for each in self.accounts())
        has_more = account.num_running > len(running) * account.weight / weights
        return victim if has_more and account.num_running > 1 else None

    # ------------------------------------------------------------ inside

    def _load_of(self, tenant: str) -> tuple[float, str]:
        return self._accounts[tenant].load, tenant

    def _note_least(self) -> None:
        present = [account.served for account in self.accounts()]
        self._least = max(self._least, min(present, default=self._least))

    def _has_recent_others(self) -> bool:
        """Whether tenants that are not here now were here a little while ago."""
        if self._step >= self._next_look:
            self._next_look = self._step + _LOOK_STEPS
            self._forget()
            self._had_others = any(
                not account.is_present and self._step - account.last_step <= RECENT_STEPS
                for account in self._accounts.values()
            )
        return self._had_others

    def _forget(self) -> None:
        """Drop accounts that say no more than a new one would, or next to it and for long."""
        self._note_least()
        for account in [*self._accounts.values()]:
            is_old = self._step - account.last_step > RECENT_STEPS
            if is_old and not account.is_present and account.served <= self._least:
                del self._accounts[account.tenant]
        self._forget_at = max(_MIN_ACCOUNTS, 2 * len(self._accounts))

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Raises AssertionError where the accounts are not those of these requests."""
        for account in self._accounts.values():
            num_running = sum(request.tenant == account.tenant for request in running)
            num_waiting = sum(request.tenant == account.tenant for request in waiting)
            counted = account.num_running, account.num_waiting
            assert counted == (num_running, num_waiting), "a tenant's requests miscounted"
            assert math.isfinite(account.served), "a tenant without a counter"
        assert self._num_present == len(self.accounts()), "tenants miscounted"
        tenants = {request.tenant for request in (*running, *waiting)}
        assert tenants <= self._accounts.keys(), "a tenant without an account"


def _is_answer(item: ScheduledRequest) -> bool:
    """Whether it computes one token, from which the next is drawn."""
    return item.reaches_end and item.num_own_tokens == 1
