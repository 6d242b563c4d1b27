"""Who computes how many tokens in the next step, and what a finished step means for each request.

Owns the waiting and running queues, admission, preemption and the requests' counters. There is no
prefill or decode phase: each request's num_computed_tokens catches up with its tokens (the rule of
vLLM's scheduler). A step may be scheduled while the one before it is in flight: see in_flight.
Knows nothing of tensors, text or links.

Promises: a tenant's requests are admitted by age, tenants in fair_queue's order; the oldest running
request always progresses; the youngest (of the tenant with most) is preempted, and what it computed
stays in the tree; every request ends. One whose blocks come from a lower tier holds up nobody.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from cache_store.cache import Cache, Lease
from cache_store.prefix_match import PrefixMatch
from model_worker.answer_end import Endings
from model_worker.batch import (
    ScheduledBatch,
    ScheduledRequest,
    StepResult,
    pending_copies,
    still_running,
)
from model_worker.coalescer import Coalescer
from model_worker.fair_queue import FairQueue
from model_worker.in_flight import InFlight
from model_worker.pacer import PrefillPacer
from model_worker.protocol import FinishReason
from model_worker.request import NO_POSITIONS, Request, RequestStatus
from model_worker.request_integrity import check_queues
from model_worker.request_update import RequestUpdate, SchedulerCounters
from model_worker.score_room import ScoreRoom
from model_worker.speculation import Speculator, add_drafts

NOTHING = ScheduledBatch((), (), 0, 0)


def _age(request: Request) -> int:
    return request.order


class Scheduler:
    def __init__(
        self,
        cache: Cache,
        pacer: PrefillPacer,
        *,
        block_size: int,
        max_num_seqs: int,
        eos_token_ids: Iterable[int],
        coalescer: Coalescer | None,
        score_room: ScoreRoom,
        speculator: Speculator | None = None,
    ) -> None:
        """``coalescer`` None: requests with equal cold prefixes each compute their own (what a
        cache that stores nothing needs). ``speculator`` None: no drafts."""
        self._cache = cache
        self._pacer = pacer
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._endings = Endings(eos_token_ids)
        self._coalescer = coalescer
        self._score_room = score_room
        self._speculator = speculator
        self._waiting: list[Request] = []  # by age
        self._running: list[Request] = []  # by age
        self._in_flight = InFlight()
        self._lacks_place = False  # for somebody, which a step in flight keeps from being made
        self.fair = FairQueue(pacer.max_step_tokens)
        self.counters = SchedulerCounters()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def oldest_waiting(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def leases(self) -> list[Lease]:
        holders = (*self._running, *self._in_flight.leaving)
        return [request.lease for request in holders if request.lease is not None]

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=_age)
        self.fair.came(request)

    # ------------------------------------------------------------------ before a step

    def schedule(self) -> ScheduledBatch:
        """The next step, of which ``update`` or ``discard`` is told in the end; at most one other
        may be in flight. Empty when nothing can run now: the step in flight must be done first, all
        that is left waits for transfers, or nothing runs and nothing waiting can be admitted."""
        if self._in_flight and self._in_flight.is_awaited(self._speculator):
            return NOTHING
        self._score_room.begin()
        num_decode, preemptions = self._look_over_running(), self.counters.preemptions
        scheduled: list[ScheduledRequest] = []
        self._lacks_place = is_blocked = False
        budget = self._pacer.prefill_budget(num_decode)
        for turn in self.fair.turns(self._running, self._waiting, budget):
            allowed = self._pacer.prefill_budget(num_decode, is_paced=turn.is_paced)
            left = self._advance_running(turn.running, scheduled, turn.budget(allowed, scheduled))
            if left is None:
                return NOTHING
            if not self._running:
                # Also where the last one gave up its blocks: duplicates of the tree's were among
                # them, without which it fits.
                self._admit_waiting(turn.waiting, scheduled, self._pacer.prefill_budget(0))
            elif self.counters.preemptions == preemptions and not is_blocked:
                # What was just taken from the youngest is not given to the next in line.
                is_blocked = not self._admit_waiting(turn.waiting, scheduled, left)
        if self._lacks_place:
            return NOTHING
        num_decode = sum([i.reaches_end and i.num_scheduled_tokens == 1 for i in scheduled])
        num_prefill = sum([item.num_scheduled_tokens for item in scheduled]) - num_decode
        num_drafts = 0
        if self._speculator is not None:
            # Last, so that drafts have what is left of the step and nobody waits for their sake.
            budget = self._pacer.prefill_budget(num_decode) - num_prefill
            num_drafts = add_drafts(self._speculator, self._cache, scheduled, budget)
        self.fair.charge(scheduled, num_prefill + num_drafts, num_decode)
        copies = tuple(pending_copies(scheduled))
        batch = ScheduledBatch(tuple(scheduled), copies, num_decode, num_prefill, num_drafts)
        if scheduled:
            self._in_flight.begin(batch)
        return batch

    def _look_over_running(self) -> int:
        """Admit those anew whose blocks did not come back, which are computed then; the number of
        requests that have a single token to compute."""
        num_decode = 0
        for request in tuple(self._running):
            lease = request.lease
            assert lease is not None
            if lease.loading and lease.has_failed:
                self._requeue(request)
            elif request.num_uncomputed_tokens == 1 and not (lease.loading and lease.is_loading):
                num_decode += 1
        return num_decode

    def _advance_running(
        self, running: Sequence[Request], scheduled: list[ScheduledRequest], budget: int
    ) -> int | None:
        """Oldest first; the prefill tokens left. None where room is lacking under a step in flight:
        nobody is preempted before its result is known, and then the oldest comes first again."""
        preemptions = self.counters.preemptions
        for request in tuple(running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an older one a moment ago
            lease = request.lease
            assert lease is not None
            if lease.loading and lease.is_loading:
                continue
            num_left = request.num_uncomputed_tokens
            count = 1 if num_left == 1 else self._score_room.take(request, min(num_left, budget))
            if count == 0:
                continue
            stop = request.num_launched_tokens + count
            if stop > lease.num_room_tokens and not self._make_room(request, lease, stop):
                if self._in_flight:
                    return None
                continue
            if num_left > 1:
                budget -= count
            scheduled.append(ScheduledRequest.next_of(request, count))
        if self.counters.preemptions > preemptions:
            scheduled[:] = still_running(scheduled)
        return budget

    def _make_room(self, request: Request, lease: Lease, num_tokens: int) -> bool:
        """Blocks for ``num_tokens``, at the youngest's cost; False if that was ``request``, or if
        blocks are about to become free, for which it waits."""
        while not self._cache.allocate(lease, num_tokens):
            if self._cache.is_room_coming or self._in_flight:
                return False
            victim = self.fair.victim(self._running)
            if victim is self._running[0] and self._cache.has_transfers:
                return False  # what they hold can be evicted once they have ended
            self._preempt(victim)
            if victim is request:
                return False
        lease.num_room_tokens = len(lease.block_ids) * self._block_size
        return True

    def _preempt(self, request: Request) -> None:
        self._requeue(request)
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        assert not request.is_in_flight
        self._leave_running(request)
        self.fair.came(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_age)

    def _admit_waiting(
        self, waiting: Sequence[Request], scheduled: list[ScheduledRequest], budget: int
    ) -> bool:
        """False where a tenant that has nothing running lacks room: nobody else is to take what
        becomes free."""
        for request in tuple(waiting):
            is_full = len(self._running) >= self._max_num_seqs
            if budget <= 0 or (is_full and not self.fair.displaced_by(request, self._running)):
                break
            if self._coalescer is not None and self._coalescer.is_waiting(request):
                continue
            match = self._cache.match(request.namespace, request.matchable_token_ids)
            if self._follows(request, match):
                continue
            if not self._has_place(request, match, scheduled):
                return self.fair.has_running(request.tenant)
            lease = self._cache.acquire(match, request.bonus_s, request.tenant)
            lease.block_hashes = request.prompt_block_hashes
            # The whole prompt at once: a prompt that got in is not thrown out half-way by its own
            # kind, and its blocks come as one run.
            if not self._cache.allocate(lease, request.num_tokens):
                self._cache.release(lease, request.token_ids, 0)
                return self.fair.has_running(request.tenant)
            self._admit(request, lease)
            if not request.is_loaded:
                continue
            if count := self._score_room.take(request, min(request.num_uncomputed_tokens, budget)):
                budget -= count
                scheduled.append(ScheduledRequest.next_of(request, count))
        return True

    def _has_place(
        self, request: Request, match: PrefixMatch, scheduled: list[ScheduledRequest]
    ) -> bool:
        """Whether it may run beside the others and its blocks can be had; if need be at the cost of
        a tenant that has more than its part of those that run."""
        if len(self._running) < self._max_num_seqs and self._may_fit(request, match):
            return True
        victim = self.fair.displaced_by(request, self._running)
        self._lacks_place = victim is not None and len(self._in_flight) > 0
        if victim is None or self._lacks_place:
            return False
        self._preempt(victim)
        scheduled[:] = still_running(scheduled)
        return self._may_fit(request, match)

    def _may_fit(self, request: Request, match: PrefixMatch) -> bool:
        """False where no eviction could make room: asked before acquiring, since that counts as a
        hit, which a request that waits for room must not be at every step."""
        num_missing = -(-request.num_tokens // self._block_size)
        num_missing -= match.num_device_tokens // self._block_size
        is_first = not self.fair.has_running(request.tenant)  # it could not run at all
        return self._cache.has_room(num_missing, request.tenant, at_others_cost=is_first)

    def _follows(self, request: Request, match: PrefixMatch) -> bool:
        # Who lacks nothing that it may read has nothing to wait for: no commit brings more.
        if self._coalescer is None or match.num_tokens == len(request.matchable_token_ids):
            return False
        if not self._coalescer.must_wait(request, match.num_block_tokens):
            return False
        if not request.was_coalesced:
            request.was_coalesced = True
            self.counters.coalesced_requests += 1
        return True

    def _admit(self, request: Request, lease: Lease) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=_age)
        self.fair.admitted(request)
        request.start(lease)
        if self._coalescer is not None:
            self._coalescer.lead(request)

    # ------------------------------------------------------------------ after a step

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestUpdate | None]:
        """Commit what the step computed and end who is done; in the order of the batch, None for
        requests that had ended before. Called once the step is done, so what is freed here is free
        indeed: who has a row in the step behind keeps its blocks."""
        self._in_flight.end(batch)
        return [
            self._update(item, token_ids)
            for item, token_ids in zip(batch.scheduled, result.token_ids, strict=True)
        ]

    def discard(self, batch: ScheduledBatch) -> None:
        """The step failed: nothing of it counts, and its requests are as they were before it."""
        self._in_flight.end(batch)
        for item in batch.scheduled:
            if item.request.status is RequestStatus.FINISHED:
                self._let_go(item.request)

    def _take_leave(self, item: ScheduledRequest) -> None:
        """Its request ended before the step did. What that drew is nobody's, but what it computed
        of an aborted prompt stays: of anything else, there is just the last token."""
        request = item.request
        stop = min(item.own_stop, request.num_tokens - 1)
        self._commit(request, max(0, stop - request.num_computed_tokens))
        self._let_go(request)

    def _update(self, item: ScheduledRequest, token_ids: tuple[int, ...]) -> RequestUpdate | None:
        request = item.request
        if request.status is RequestStatus.FINISHED:
            self._take_leave(item)
            return None
        is_first_admission = not request.is_admission_reported
        request.is_admission_reported = True
        if item.scored is not NO_POSITIONS:
            request.has_scored(item.scored)
        if token_ids and request.num_tokens >= request.max_num_tokens:
            # Nothing was to be generated: the prompt's KV is all that was asked for.
            self._commit(request, item.num_own_tokens)
            self._finish(request)
            return RequestUpdate(request, (), is_first_admission, FinishReason.LENGTH)
        taken, reason = self._endings.take_over(request, token_ids)
        self.counters.generated_tokens += len(taken)
        # The last token's KV is not computed, or, where it was a draft, not counted: an answer
        # leaves the same behind with drafts and without.
        self._commit(request, item.num_own_tokens + (len(taken) - 1 if taken else 0))
        if item.draft_token_ids:
            self._verified(item, min(len(taken), len(token_ids) - 1))
        if reason is None:
            return RequestUpdate(request, taken, is_first_admission)
        self._finish(request)
        stop_token_id = self._endings.stop_token_id(request, taken, reason)
        return RequestUpdate(request, taken, is_first_admission, reason, stop_token_id)

    def _verified(self, item: ScheduledRequest, num_accepted: int) -> None:
        assert self._speculator is not None
        num_drafts = len(item.draft_token_ids)
        self.counters.draft_tokens += num_drafts
        self.counters.accepted_tokens += num_accepted
        self._speculator.verified(item.request, num_drafts, num_accepted)

    def _commit(self, request: Request, num_new: int) -> None:
        lease = request.lease
        assert lease is not None
        if lease.pending_copy is not None:
            self._cache.copied(lease)
        before = request.num_computed_tokens
        request.num_computed_tokens = before + num_new
        if before < request.num_prompt_tokens:
            self.counters.prompt_tokens_computed += min(num_new, request.num_prompt_tokens - before)
        if request.num_computed_tokens // self._block_size > before // self._block_size:
            self._cache.commit(lease, request.token_ids, request.num_computed_tokens)
            if self._coalescer is not None:
                self._coalescer.advance(request, before)

    # ------------------------------------------------------------------ at any time between steps

    def abort(self, request: Request) -> None:
        """End a request that is waiting or running; its computed blocks stay in the tree. One that
        is in flight keeps its blocks until the step is done."""
        self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            self.fair.left(request, was_running=False)
        request.status = RequestStatus.FINISHED
        if self._speculator is not None:
            self._speculator.forget(request)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self.fair.left(request, was_running=True)
        if request.is_in_flight:
            self._in_flight.keep(request)
        else:
            self._release(request)

    def _let_go(self, request: Request) -> None:
        if self._in_flight.let_go(request):
            self._release(request)

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        if self._coalescer is not None:
            self._coalescer.leave(request)
        self._cache.release(request.lease, request.token_ids, request.num_computed_tokens)
        request.lease = None

    def check_integrity(self) -> None:
        """Raises AssertionError where a queue, a lease or the cache disagrees with the others."""
        check_queues(self._running, self._waiting)
        self.fair.check_integrity(self._running, self._waiting)
        self._in_flight.check_integrity()
        if not self.leases() and self._coalescer is not None:
            assert len(self._coalescer) == 0
        self._cache.check_integrity(self.leases())
