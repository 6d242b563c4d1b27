"""The engine: requests in, one step at a time, outputs out.

Owns the live requests and what each link is to be told. Knows nothing of sockets, tensors or how
blocks are found; ``step`` is the whole life of the engine.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence

from cache_store.block_hash import Namespace
from cache_store.cache import Cache
from cache_store.events import CacheEvent
from cache_store.shared_prefixes import SharedPrefixes, hash_prompt
from model_worker.admission import (
    EngineLimits,
    bonus_s,
    capacity_refusal,
    decode_ids,
    grammar_error,
    refusal,
    with_admission,
)
from model_worker.batch import RequestScores, ScheduledBatch
from model_worker.engine_stats import EngineStats
from model_worker.grammar_desk import GrammarDesk
from model_worker.launched_steps import LaunchedStep, LaunchedSteps
from model_worker.model_runner import Runner
from model_worker.pacer import PrefillPacer
from model_worker.protocol import (
    AddRequest,
    ErrorCode,
    FinishReason,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    RequestError,
    RequestOutput,
    TenantPolicy,
    WorkerStats,
)
from model_worker.request import Request, RequestKey, RequestStatus
from model_worker.request_update import RequestUpdate
from model_worker.scheduler import Scheduler
from model_worker.tenants import tenant_limits

logger = logging.getLogger(__name__)


# A device that has failed for good fails on every step: its process is better started again.
MAX_FAILED_STEPS = 5
NO_SCORES = RequestScores((), ())


class EngineError(Exception):
    """The engine cannot go on; its process should end and be started anew."""


class Engine:
    """Single-threaded: every method is called from the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        cache: Cache,
        pacer: PrefillPacer,
        limits: EngineLimits,
        clock: Callable[[], float],
        grammars: GrammarDesk,
        *,
        runs_ahead: bool = False,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """``runs_ahead``: a step is launched before the result of the one in front of it is taken,
        so that the device has something to do while the host does its part. ``prefixes`` are those
        that the cache divides prompts by."""
        self._scheduler = scheduler
        self._steps = LaunchedSteps(runner, max_open=1 if runs_ahead else 0)
        self._runs_ahead = runs_ahead
        self._cache = cache
        self._pacer = pacer
        self._limits = limits
        self._clock = clock
        self._prefixes = prefixes
        self._grammars = grammars
        self._requests: dict[RequestKey, Request] = {}
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._step_s = 0.0
        self._finished_s = -math.inf  # when the last step was
        self._num_failed_in_row = 0
        self._is_stalled = False
        self._stats = EngineStats(
            scheduler, cache, pacer.costs, limits.block_bytes, lambda: len(self._grammars)
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._steps) or len(self._grammars) > 0

    @property
    def is_stalled(self) -> bool:
        """Whether the last step found nothing that could run: what is left waits for transfers, or
        for grammars to be compiled."""
        return self._is_stalled

    @property
    def is_saving(self) -> bool:
        """Whether something is still to be copied to lower tiers."""
        return self._cache.is_saving

    # ------------------------------------------------------------------ the life of the engine

    def step(self) -> None:
        """Launch the next step, and complete those that are due.

        Raises EngineError after MAX_FAILED_STEPS failures in a row.
        """
        started_s = self._clock()
        self._cache.advance()
        self._queue_compiled()
        batch = self._scheduler.schedule()
        num_open = 0
        if batch.scheduled:
            num_open = self._steps.launch(batch, started_s)
            self._note_admissions(batch, started_s)
            if self._runs_ahead:
                self._pacer.costs.record_launch(self._clock() - started_s)
        self._is_stalled = not self._steps
        if self._is_stalled:
            self._end_what_cannot_start()
        while len(self._steps) > num_open:
            self._complete(self._steps.take())

    def take_outputs(self) -> dict[str, list[RequestOutput]]:
        """What each link is to be told since the last call."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def advance_transfers(self) -> None:
        """What a step begins with, for when there is no step."""
        self._cache.advance()

    def take_events(self) -> Sequence[CacheEvent]:
        """What was stored and removed since the last call."""
        return self._cache.take_events()

    def snapshot(self) -> Sequence[CacheEvent]:
        """All that is stored, for a link that has heard nothing yet."""
        return self._cache.snapshot()

    # ------------------------------------------------------------------ what links ask for

    def add_request(self, link_id: str, message: AddRequest) -> None:
        """Queue a request, or refuse it with its terminal output."""
        key = RequestKey(link_id, message.request_id)
        if key in self._requests:
            # A terminal answer would end the first one's stream: a gateway never repeats an id.
            logger.warning("link %s repeated a live request id; ignored", link_id)
            return
        params = message.sampling_params
        prompt = decode_ids(message.prompt_token_ids)
        error = refusal(params, prompt, self._limits) or capacity_refusal(
            params,
            len(prompt),
            self._limits,
            num_blocks=self._cache.stats().num_blocks,
            may_wait=self._may_wait(message.tenant),
        )
        if error is not None:
            self._end(key, FinishReason.ERROR, error)
            return
        namespace = Namespace(self._limits.fingerprint, cache_salt=message.cache_salt)
        place = namespace if self._prefixes is None else self._prefixes.divide(namespace, prompt)
        request = Request.create(
            key,
            place,
            prompt,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            arrival_s=self._clock(),
            order=self._num_arrived,
            max_model_len=self._limits.max_model_len,
            bonus_s=bonus_s(message),
            tenant=message.tenant,
        )
        request.prompt_block_hashes = hash_prompt(place, prompt, self._limits.block_size)
        self._num_arrived += 1
        self._requests[key] = request
        salt = message.cache_salt
        if params.grammar is None or self._grammars.submit(request, params.grammar, salt):
            self._scheduler.add(request)
        else:
            request.status = RequestStatus.PREPARING

    def abort(self, link_id: str, request_id: str) -> None:
        """End a request at once; unknown and ended ones are ignored, since messages cross."""
        key = RequestKey(link_id, request_id)
        request = self._requests.get(key)
        if request is not None:
            self._scheduler.abort(request)
            self._end(key, FinishReason.ABORT)

    def abort_link(self, link_id: str) -> None:
        """The link is gone: end its requests; nobody is left to be told."""
        for key in [key for key in self._requests if key.link_id == link_id]:
            self._scheduler.abort(self._requests.pop(key))
        self._outputs.pop(link_id, None)

    def reset_cache(self) -> int:
        """Drop every block that no running request holds; returns how many."""
        return self._cache.reset()

    def set_tenant_policies(self, policies: Sequence[TenantPolicy]) -> None:
        """From now on these hold and no others."""
        self._scheduler.fair.set_weights({each.tenant: each.weight for each in policies})
        block_bytes = self._limits.block_bytes
        self._cache.set_tenant_limits(
            {each.tenant: tenant_limits(each, block_bytes) for each in policies}
        )

    def share_prefixes(self, prefixes: Sequence[bytes]) -> None:
        """Requests that come from now on share these, little-endian int32, and no others."""
        if self._prefixes is not None:
            self._prefixes.set(map(decode_ids, prefixes))

    def act_on_prefix(self, message: PrefixCommand) -> PrefixReply:
        """Look at a stored prefix, bring it to the device, take it off it, or drop it."""
        namespace = Namespace(self._limits.fingerprint, cache_salt=message.cache_salt)
        token_ids = decode_ids(message.prompt_token_ids)
        keep = max(0, message.keep_num_tokens)
        match message.action:
            case PrefixAction.INSPECT:
                report = self._cache.inspect(namespace, token_ids)
            case PrefixAction.PREFETCH:
                report = self._cache.prefetch(namespace, token_ids)
            case PrefixAction.DEMOTE:
                report = self._cache.demote(namespace, token_ids, keep)
            case PrefixAction.DROP:
                report = self._cache.drop(namespace, token_ids, keep)
        return PrefixReply(
            call_id=message.call_id,
            num_device_tokens=report.num_device_tokens,
            num_host_tokens=report.num_host_tokens,
            num_disk_tokens=report.num_disk_tokens,
            num_blocks_changed=report.num_blocks_changed,
            num_blocks_left=report.num_blocks_left,
        )

    def fail_all(self, error: RequestError) -> None:
        for key, request in list(self._requests.items()):
            self._scheduler.abort(request)
            self._end(key, FinishReason.ERROR, error)

    def stats(self) -> WorkerStats:
        return self._stats.read(self._num_steps, self._step_s, is_idle=not self.has_work)

    def check_integrity(self) -> None:
        """Raises AssertionError. Walks the whole tree: for idle moments and tests."""
        self._scheduler.check_integrity()

    # ------------------------------------------------------------------ inside

    def _may_wait(self, tenant: str) -> bool:
        most = self._limits.max_num_waiting
        return len(self._grammars) < most and self._scheduler.fair.may_wait(tenant, most)

    def _queue_compiled(self) -> None:
        """Those whose grammars are compiled, unless they have been aborted meanwhile."""
        for request, problem in self._grammars.take():
            if request.status is RequestStatus.FINISHED:
                continue
            if problem is None:
                request.status = RequestStatus.WAITING
                self._scheduler.add(request)
            else:
                request.status = RequestStatus.FINISHED
                self._end(request.key, FinishReason.ERROR, grammar_error(str(problem)))

    def _note_admissions(self, batch: ScheduledBatch, now_s: float) -> None:
        for item in batch.scheduled:
            if item.request.admitted_s is None:
                item.request.begins(now_s)

    def _complete(self, step: LaunchedStep) -> None:
        """Wait for it, and tell of it."""
        batch = step.batch
        try:
            result = step.pending.result()
        except Exception as error:
            self._fail((batch, *self._steps.abandon()), error)
            return
        self._num_failed_in_row = 0
        updates = self._scheduler.update(batch, result)
        finished_s = self._clock()
        # Behind another step it could not begin before that one was done.
        step_s = finished_s - max(step.started_s, self._finished_s)
        self._pacer.record(
            batch.num_decode_tokens, batch.num_prefill_tokens, step_s, batch.num_draft_tokens
        )
        self._num_steps += 1
        self._step_s, self._finished_s = step_s, finished_s
        for index, update in enumerate(updates):
            if update is not None:
                self._report(update, result.scores.get(index, NO_SCORES), finished_s)

    def _fail(self, batches: Sequence[ScheduledBatch], error: Exception) -> None:
        """End the requests of the step that failed and of the one behind it, which was made from
        the same requests. Nothing of these was committed, and the blocks that they wrote are
        private to the requests that end here, so the others go on."""
        for batch in batches:
            self._scheduler.discard(batch)
        self._num_failed_in_row += 1
        if self._num_failed_in_row == MAX_FAILED_STEPS:
            raise EngineError(f"{MAX_FAILED_STEPS} steps failed in a row") from error
        keys = {item.request.key: item.request for batch in batches for item in batch.scheduled}
        live = [request for key, request in keys.items() if self._requests.get(key) is request]
        logger.error("a step failed; its %d requests end", len(live), exc_info=error)
        failure = RequestError(code=ErrorCode.INTERNAL, message="the model failed on this step")
        for request in live:
            self._scheduler.abort(request)
            self._end(request.key, FinishReason.ERROR, failure)

    def _end_what_cannot_start(self) -> None:
        """Nothing runs, nothing is moving, and the oldest does not fit: it never will."""
        request = self._scheduler.oldest_waiting()
        if request is None or self._scheduler.num_running or self._cache.has_transfers:
            return
        self._scheduler.abort(request)
        error = RequestError(
            code=ErrorCode.NEVER_FITS,
            message=f"{request.num_tokens} tokens do not fit into the KV pool",
        )
        self._end(request.key, FinishReason.ERROR, error)

    def _report(self, update: RequestUpdate, scores: RequestScores, now_s: float) -> None:
        request = update.request
        error = None
        if update.finish_reason is FinishReason.ERROR:
            assert request.matcher is not None
            error = grammar_error(request.matcher.problem or "it could not be followed")
        token_ids = update.token_ids if error is None else ()
        num_new = len(token_ids)
        is_first_token = num_new > 0 and request.num_output_tokens == num_new
        assert request.admitted_s is not None
        output = RequestOutput(
            request_id=request.key.request_id,
            token_ids=token_ids,
            finish_reason=update.finish_reason,
            stop_token_id=update.stop_token_id,
            error=error,
            prefill_s=now_s - request.admitted_s if is_first_token else None,
            logprobs=scores.drawn[:num_new],
            prompt_logprobs=scores.prompt,
        )
        if update.is_first_admission:
            output = with_admission(output, request, self._cache)
        # A chunk in the middle of a prompt is nobody's news.
        is_news = num_new > 0 or update.finish_reason is not None or len(scores.prompt) > 0
        if is_news or update.is_first_admission:
            self._outputs.setdefault(request.key.link_id, []).append(output)
        if update.finish_reason is not None:
            del self._requests[request.key]

    def _end(
        self, key: RequestKey, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        self._requests.pop(key, None)
        output = RequestOutput(request_id=key.request_id, finish_reason=reason, error=error)
        self._outputs.setdefault(key.link_id, []).append(output)
