"""Who computes how many tokens in the next step, and what a finished step means for each request.

Owns the waiting and running queues, admission, preemption and the requests' counters. There is no
prefill or decode phase: each request's num_computed_tokens catches up with its tokens (the rule of
vLLM's scheduler). A step may be scheduled while the one before it is in flight: see in_flight.
Knows nothing of tensors, text or links.

Promises: requests are admitted in order of arrival; the oldest running request always progresses;
the youngest is preempted, and what it had computed stays in the tree; every request ends. A request
whose blocks are on their way from a lower tier runs as soon as they are there, and holds up nobody.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from cache_store.cache import Cache, Lease, RowCopy
from cache_store.prefix_match import PrefixMatch
from model_worker.answer_end import take_over
from model_worker.batch import ScheduledBatch, ScheduledRequest, StepResult
from model_worker.coalescer import Coalescer
from model_worker.in_flight import InFlight
from model_worker.pacer import PrefillPacer
from model_worker.protocol import FinishReason
from model_worker.request import Request, RequestStatus
from model_worker.speculation import Speculator, add_drafts


class RequestUpdate(msgspec.Struct, frozen=True):
    """What one step did for one request; ``token_ids`` are its new ones."""

    request: Request
    token_ids: tuple[int, ...]
    is_first_admission: bool = False
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class SchedulerCounters:
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    coalesced_requests: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts that became part of an answer


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
        speculator: Speculator | None = None,
    ) -> None:
        """``coalescer`` None: requests with equal cold prefixes each compute their own (what a
        cache that stores nothing needs). ``speculator`` None: no drafts."""
        self._cache = cache
        self._pacer = pacer
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._eos_token_ids = frozenset(eos_token_ids)
        self._coalescer = coalescer
        self._speculator = speculator
        self._waiting: list[Request] = []  # by age
        self._running: list[Request] = []  # by age
        self._in_flight = InFlight()
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

    # ------------------------------------------------------------------ before a step

    def schedule(self) -> ScheduledBatch:
        """The next step, of which ``update`` or ``discard`` is told in the end; at most one other
        may be in flight. Empty when nothing can run now: the result of the step in flight has to be
        known first, all that is left waits for transfers, or nothing runs and nothing waiting can
        be admitted."""
        if self._in_flight and self._in_flight.is_awaited(self._speculator):
            return NOTHING
        budget = self._pacer.prefill_budget(self._look_over_running())
        preemptions = self.counters.preemptions
        advanced = self._advance_running(budget)
        if advanced is None:
            return NOTHING
        scheduled, budget = advanced
        if not self._running:
            # Also where the last one gave up its blocks: duplicates of the tree's were among them,
            # without which it fits.
            self._admit_waiting(scheduled, self._pacer.prefill_budget(0))
        elif self.counters.preemptions == preemptions:
            # What was just taken from the youngest is not given to the next in line.
            self._admit_waiting(scheduled, budget)
        num_decode = sum([i.reaches_end and i.num_scheduled_tokens == 1 for i in scheduled])
        num_prefill = sum([item.num_scheduled_tokens for item in scheduled]) - num_decode
        num_drafts = 0
        if self._speculator is not None:
            # Last, so that drafts have what is left of the step and nobody waits for their sake.
            budget = self._pacer.prefill_budget(num_decode) - num_prefill
            num_drafts = add_drafts(self._speculator, self._cache, scheduled, budget)
        copies = tuple(_pending_copies(scheduled))
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
            if lease.has_failed:
                self._requeue(request)
            elif request.num_uncomputed_tokens == 1 and not lease.is_loading:
                num_decode += 1
        return num_decode

    def _advance_running(self, budget: int) -> tuple[list[ScheduledRequest], int] | None:
        """Oldest first; what was scheduled and the prefill tokens left. None where room is lacking
        under a step in flight: nobody is preempted before its result is known, and then the oldest
        comes first again."""
        scheduled = []
        for request in tuple(self._running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an older one a moment ago
            if not request.is_loaded:
                continue
            num_left = request.num_uncomputed_tokens
            count = 1 if num_left == 1 else min(num_left, budget)
            if count == 0:
                continue
            if not self._make_room(request, request.num_launched_tokens + count):
                if self._in_flight:
                    return None
                continue
            if num_left > 1:
                budget -= count
            scheduled.append(ScheduledRequest.next_of(request, count))
        return scheduled, budget

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for ``num_tokens``, at the youngest's cost; False if that was ``request``, or if
        blocks are about to become free, for which it waits."""
        assert request.lease is not None
        while not self._cache.allocate(request.lease, num_tokens):
            if self._cache.is_room_coming or self._in_flight:
                return False
            victim = self._running[-1]
            if victim is self._running[0] and self._cache.has_transfers:
                return False  # what they hold can be evicted once they have ended
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._requeue(request)
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        assert not request.is_in_flight
        self._leave_running(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_age)

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        for request in tuple(self._waiting):
            if budget <= 0 or len(self._running) >= self._max_num_seqs:
                break
            if self._coalescer is not None and self._coalescer.is_waiting(request):
                continue
            # The last token is always computed: its logits are what the answer starts from.
            match = self._cache.match(request.namespace, request.token_ids[:-1])
            if self._follows(request, match):
                continue
            if not self._may_fit(request, match):
                break
            lease = self._cache.acquire(match, request.bonus_s)
            lease.block_hashes = request.prompt_block_hashes
            # The whole prompt at once: a prompt that got in is not thrown out half-way by its own
            # kind, and its blocks come as one run.
            if not self._cache.allocate(lease, request.num_tokens):
                self._cache.release(lease, request.token_ids, 0)
                break
            self._admit(request, lease)
            if not request.is_loaded:
                continue
            count = min(request.num_uncomputed_tokens, budget)
            budget -= count
            scheduled.append(ScheduledRequest.next_of(request, count))

    def _may_fit(self, request: Request, match: PrefixMatch) -> bool:
        """False where no eviction could make room: asked before acquiring, since that counts as a
        hit, which a request that waits for room must not be at every step."""
        blocks = self._cache.stats()
        num_missing = -(-request.num_tokens // self._block_size)
        num_missing -= match.num_device_tokens // self._block_size
        return num_missing <= blocks.num_free + blocks.num_evictable

    def _follows(self, request: Request, match: PrefixMatch) -> bool:
        # Who lacks nothing but the last token has nothing to wait for: no commit brings more.
        if self._coalescer is None or match.num_tokens == request.num_tokens - 1:
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
        request.status = RequestStatus.RUNNING
        request.lease = lease
        request.num_computed_tokens = lease.num_cached_tokens
        if not request.is_admission_reported:
            request.num_cached_tokens = lease.num_cached_tokens
            request.num_host_tokens = lease.num_host_tokens
            request.num_disk_tokens = lease.num_disk_tokens
        if self._coalescer is not None:
            self._coalescer.lead(request)

    # ------------------------------------------------------------------ after a step

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestUpdate | None]:
        """Commit what the step computed and end who is done; in the order of the batch, None for
        requests that had ended before. Called once the step is done, so what is freed here is free
        indeed: who has a row in the step behind keeps its blocks."""
        self._in_flight.end(batch)
        return [
            None if self._has_left(item) else self._update(item, token_ids)
            for item, token_ids in zip(batch.scheduled, result.token_ids, strict=True)
        ]

    def discard(self, batch: ScheduledBatch) -> None:
        """The step failed: nothing of it counts, and its requests are as they were before it."""
        self._in_flight.end(batch)
        for item in batch.scheduled:
            if item.request.status is RequestStatus.FINISHED:
                self._let_go(item.request)

    def _has_left(self, item: ScheduledRequest) -> bool:
        """Whether its request ended before the step did. What that drew is nobody's, but what it
        computed of an aborted prompt stays: of anything else, there is just the last token."""
        request = item.request
        if request.status is not RequestStatus.FINISHED:
            return False
        num_computed = min(item.own_stop, request.num_tokens - 1)
        self._commit(request, max(0, num_computed - request.num_computed_tokens))
        self._let_go(request)
        return True

    def _update(self, item: ScheduledRequest, token_ids: tuple[int, ...]) -> RequestUpdate:
        request = item.request
        is_first_admission = not request.is_admission_reported
        request.is_admission_reported = True
        if token_ids and request.num_tokens >= request.max_num_tokens:
            # Nothing was to be generated: the prompt's KV is all that was asked for.
            self._commit(request, item.num_own_tokens)
            self._finish(request)
            return RequestUpdate(request, (), is_first_admission, FinishReason.LENGTH)
        taken, reason = take_over(request, token_ids, self._eos_token_ids)
        self.counters.generated_tokens += len(taken)
        # The last token's KV is not computed, or, where it was a draft, not counted: an answer
        # leaves the same behind with drafts and without.
        num_right = max(len(taken) - 1, 0)
        self._commit(request, item.num_own_tokens + num_right)
        if item.draft_token_ids:
            self._verified(item, min(len(taken), len(token_ids) - 1))
        if reason is not None:
            self._finish(request)
        stop_token_id = taken[-1] if reason is FinishReason.STOP else None
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
        prompt_left = max(request.num_prompt_tokens - before, 0)
        self.counters.prompt_tokens_computed += min(num_new, prompt_left)
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
        request.status = RequestStatus.FINISHED
        if self._speculator is not None:
            self._speculator.forget(request)

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
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
        assert [request.order for request in self._running] == sorted(map(_age, self._running))
        assert [request.order for request in self._waiting] == sorted(map(_age, self._waiting))
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert request.lease is not None
            assert request.num_computed_tokens < request.num_tokens
            assert request.num_computed_tokens >= request.lease.num_cached_tokens
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING
            assert request.lease is None
            assert request.num_computed_tokens == 0
        self._in_flight.check_integrity()
        if not self.leases() and self._coalescer is not None:
            assert len(self._coalescer) == 0
        self._cache.check_integrity(self.leases())


def _pending_copies(scheduled: Iterable[ScheduledRequest]) -> Iterable[RowCopy]:
    for item in scheduled:
        lease = item.request.lease
        assert lease is not None
        # Of a request in flight it is being made.
        if lease.pending_copy is not None and not item.request.is_in_flight:
            yield lease.pending_copy
