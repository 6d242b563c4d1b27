"""Guesses of the tokens to come, for a step to verify on the way.

Owns the seam between the scheduler and whoever guesses, and the one who does so in earnest: as long
as it pays, by what was measured. Drafts cannot change an answer, only what it costs: see
:class:`model_worker.sampler.Sampler` for how they are verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from cache_store.cache import Cache
from model_worker.batch import ScheduledRequest
from model_worker.draft_account import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    DraftAccount,
    DraftLength,
    best_length,
)
from model_worker.drafts import Draft, DraftFinder, DraftSource
from model_worker.request import Request
from model_worker.step_costs import StepCosts

# How often drafts are right before any was tried.
PRIOR_RATES = {DraftSource.TREE: 0.8, DraftSource.LONG_RUN: 0.6, DraftSource.SHORT_RUN: 0.3}


class Speculator(Protocol):
    """Who guesses, how far, and when not to."""

    def propose(
        self, scheduled: Sequence[ScheduledRequest], budget: int
    ) -> Mapping[int, tuple[int, ...]]:
        """Drafts by index into ``scheduled``, none of them empty and ``budget`` tokens in all.

        Only for items that ``may_have_drafts``, each with at most ``max_num_drafts``.
        """
        ...

    def expects_drafts(self, in_flight: Sequence[ScheduledRequest]) -> bool:
        """Whether drafts behind the tokens that these are drawing promise more than it costs to
        wait until these are known."""
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of the drafts that ``request`` had in a step."""
        ...

    def forget(self, request: Request) -> None:
        """``request`` has ended."""
        ...


def may_have_drafts(item: ScheduledRequest) -> bool:
    """Drafts follow a request's last token, and that one has to be known."""
    return item.reaches_end and not item.takes_drawn


def max_num_drafts(request: Request) -> int:
    """As many as can still become part of the answer: a step samples one more than its drafts."""
    return request.max_num_tokens - request.num_tokens - 1


def add_drafts(
    speculator: Speculator, cache: Cache, scheduled: list[ScheduledRequest], budget: int
) -> int:
    """Guesses behind those whose end is reached; returns how many. None costs anybody a block that
    is in use: what does not fit is left out."""
    total = 0
    for index, draft in speculator.propose(scheduled, budget).items():
        item = scheduled[index]
        lease = item.request.lease
        assert lease is not None
        assert may_have_drafts(item)
        assert len(draft) <= max_num_drafts(item.request)
        if not cache.allocate(lease, item.request.num_tokens, len(draft)):
            continue
        scheduled[index] = replace(
            item,
            num_scheduled_tokens=item.num_scheduled_tokens + len(draft),
            draft_token_ids=draft,
        )
        total += len(draft)
    assert total <= max(budget, 0)
    return total


@dataclass(slots=True)
class _Guesses:
    """What one request has, and what became of it so far."""

    finder: DraftFinder
    account: DraftAccount = field(default_factory=DraftAccount)
    acceptance: dict[DraftSource, Acceptance] = field(
        default_factory=lambda: {source: Acceptance(2.0, 0.85) for source in DraftSource}
    )
    source: DraftSource = DraftSource.TREE  # of the last draft
    draft_cost: float = 0.0  # of each of its tokens


@dataclass(slots=True)
class _StepPlan:
    """The drafts of the step that is being made."""

    num_requests: int  # that sample in it
    token_s: float  # what each of their tokens takes without drafts
    num_left: int  # tokens that the step may still carry
    num_drafts: int = 0
    gain: float = 0.0  # tokens that they are expected to bring more than they cost


class AdaptiveSpeculator:
    """Drafts from the tree and from the request's own text, each as long as its measured acceptance
    makes it worth its measured cost, and none where a request has lost too much on them."""

    def __init__(
        self, cache: Cache, costs: StepCosts, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._cache = cache
        self._costs = costs
        self._clock = clock
        self._guesses: dict[Request, _Guesses] = {}
        self._usual = {source: Acceptance(10.0, 0.995) for source in DraftSource}

    @property
    def num_requests(self) -> int:
        """Of which something is remembered."""
        return len(self._guesses)

    def propose(
        self, scheduled: Sequence[ScheduledRequest], budget: int
    ) -> Mapping[int, tuple[int, ...]]:
        plan = self._plan(sum([item.reaches_end for item in scheduled]), budget)
        if plan is None:
            return {}
        requests = {
            index: item.request for index, item in enumerate(scheduled) if may_have_drafts(item)
        }
        return self._drafts(requests, plan)

    def expects_drafts(self, in_flight: Sequence[ScheduledRequest]) -> bool:
        """By what is known to follow the tokens so far: those being drawn are likely its first."""
        plan = self._plan(len(in_flight), MAX_DRAFT_TOKENS * len(in_flight))
        if plan is None:
            return False
        drafts = self._drafts({i: item.request for i, item in enumerate(in_flight)}, plan)
        cost = self._costs.launch_s / plan.token_s
        if plan.gain <= cost:
            return False
        self._charge([self._guesses[in_flight[index].request] for index in drafts], cost)
        return True

    def _plan(self, num_requests: int, budget: int) -> _StepPlan | None:
        """None where there is nothing to be won, or nothing known of what it costs."""
        step_s = self._costs.decode_step_s(num_requests)
        if num_requests == 0 or budget <= 0 or not step_s:
            return None
        return _StepPlan(num_requests, step_s / num_requests, budget)

    def _drafts(
        self, requests: Mapping[int, Request], plan: _StepPlan
    ) -> Mapping[int, tuple[int, ...]]:
        """Those that promise most, within the plan, which takes account of them."""
        started_s = self._clock()
        searched: list[_Guesses] = []
        found: dict[int, list[Draft]] = {}
        for index, request in requests.items():
            guesses = self._guesses.get(request) or self._begin(request)
            # Most of many requests rest: to them this is all that speculation costs.
            if request.num_output_tokens <= guesses.account.rests_until:
                continue
            limit = min(max_num_drafts(request), plan.num_left, MAX_DRAFT_TOKENS)
            if limit <= 0:
                continue
            searched.append(guesses)
            if drafts := list(guesses.finder.find(request, limit)):
                found[index] = drafts
        chosen = {}
        for num_done, (index, drafts) in enumerate(found.items()):
            # An even share of what is left: the oldest must not take it all.
            share = max(1, plan.num_left // (len(found) - num_done))
            draft = self._choose(requests[index], drafts, min(share, plan.num_left), plan)
            if draft:
                chosen[index] = draft
        self._charge(searched, (self._clock() - started_s) / plan.token_s)
        return chosen

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        guesses = self._guesses[request]
        guesses.account.spend(num_drafts * guesses.draft_cost)
        guesses.account.earn(num_accepted)
        guesses.acceptance[guesses.source].add(num_drafts, num_accepted)
        self._usual[guesses.source].add(num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self._guesses.pop(request, None)

    def _begin(self, request: Request) -> _Guesses:
        guesses = self._guesses[request] = _Guesses(DraftFinder(self._cache))
        return guesses

    def _choose(
        self, request: Request, drafts: Sequence[Draft], limit: int, plan: _StepPlan
    ) -> tuple[int, ...]:
        """Of ``drafts`` the one that promises most, cut to the length at which it does."""
        if limit <= 0:
            return ()
        guesses = self._guesses[request]
        credit = guesses.account.credit(request.num_output_tokens)
        best, best_draft = DraftLength(0, 0.0), drafts[0]
        for draft in drafts:
            usual = self._usual[draft.source].rate(PRIOR_RATES[draft.source])
            rate = guesses.acceptance[draft.source].rate(usual)
            most = min(limit, len(draft.token_ids))
            length = best_length(rate, most, credit, lambda count: self._cost(count, plan))
            if length.gain > best.gain or best.length == 0:
                best, best_draft = length, draft
        if best.length == 0:
            return ()
        guesses.source = best_draft.source
        guesses.draft_cost = self._cost(best.length, plan) / best.length
        plan.num_drafts += best.length
        plan.num_left -= best.length
        plan.gain += best.gain
        return best_draft.token_ids[: best.length]

    def _cost(self, num_drafts: int, plan: _StepPlan) -> float:
        """Of so many more drafts in this step, in tokens without drafts."""
        before_s = self._costs.drafts_s(plan.num_requests, plan.num_drafts)
        after_s = self._costs.drafts_s(plan.num_requests, plan.num_drafts + num_drafts)
        return max(after_s - before_s, 0.0) / plan.token_s

    def _charge(self, searched: Sequence[_Guesses], cost: float) -> None:
        """The search holds up the step too, whether or not it finds anything."""
        for guesses in searched:
            guesses.account.spend(cost / len(searched))
