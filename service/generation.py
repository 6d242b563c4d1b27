"""The one path behind every endpoint: token ids to a worker, and text back as events.

Owns a request's life between the tokenized prompt and the last piece of text: submitting,
aborting, measuring; service.answer_text makes text of the tokens. A plain answer is the fold of the
same events as a stream. Knows nothing of HTTP, bodies or templates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import AddRequest, FinishReason, RequestOutput, SamplingParams
from service.answer_text import AnswerText, TextEvent
from service.diagnostics.trace import RequestTrace
from service.errors import Unavailable, error_from_worker
from service.metrics import GatewayMetrics, RequestRecorder
from service.request_gate import Ticket
from service.request_history import RequestHistory, ServedRequest
from service.request_log import RequestLog
from service.router import Affinity
from service.routing import LocatePrefix, Routing
from service.workers.base import RequestStream, Worker

__all__ = ["GenerationRequest", "Generator", "Outcome", "OutcomeKeeper", "Placement"]

_CONTEXT_TOKENS = 4
_LAST_OUTPUT_S = 10.0  # a worker that was told to stop finishes its step first


class Placement:
    """Where the samples of one prompt go: all to the worker that the first was sent to, since they
    share its prefix."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None

    async def worker(self, choose: Callable[[], Awaitable[Worker]]) -> Worker:
        async with self._lock:
            if self._worker is None:
                self._worker = await choose()
            return self._worker

    @property
    def worker_id(self) -> str:
        """Empty until one is chosen."""
        return "" if self._worker is None else self._worker.worker_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be continued. ``received_at`` is on the metrics' clock."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]  # 1-D
    sampling_params: SamplingParams
    received_at: float
    stop: tuple[str, ...] = ()
    tenant: str = ""  # its stable id; empty for none
    cache_salt: str = ""  # of the namespace, the tenant's part included
    is_continuation: bool = False  # the answer goes on with the prompt's text
    priority: int = 0
    retention_s: float = 0.0
    affinity: Affinity = field(default_factory=Affinity)
    placement: Placement = field(default_factory=Placement)
    is_first_sample: bool = True  # of its prompt: the others are no look-ups of their own
    keeper: OutcomeKeeper | None = None
    trace: RequestTrace = field(default_factory=RequestTrace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request at its worker. ``text`` is what the client was given for
    ``output_token_ids``, which leave out the token that stopped it, ``stop_token_id``."""

    worker_id: str
    output_token_ids: Sequence[int]
    text: str
    stop_token_id: int | None
    num_cached_tokens: int


class OutcomeKeeper(Protocol):
    """Who remembers what a request was served."""

    async def keep(self, outcome: Outcome) -> None:
        """Called before the last event is given out, so that a request that follows finds it."""
        ...

    def keep_later(self, outcome: Awaitable[Outcome]) -> None:
        """Called instead when the request ended early, or after it, when a worker was stopped:
        what it has computed until then is known a little later."""
        ...


class Generator:
    """``workers`` gives those that take requests now, ``locate`` tells which hold a prompt,
    ``history`` is told what became of requests, once each has ended."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        metrics: GatewayMetrics,
        locate: LocatePrefix | None = None,
        history: RequestHistory | None = None,
    ) -> None:
        self._metrics = metrics
        self._history = history
        self.routing = Routing(workers, locate)

    async def events(
        self,
        request: GenerationRequest,
        decode: Callable[[Sequence[int]], str],
        ticket: Ticket,
    ) -> AsyncGenerator[TextEvent, None]:
        """Exactly one last event, or a GatewayError. Closing it early aborts the request.

        ``decode`` is the tokenizer's; ``ticket`` is given back at the end.
        """
        recorder = self._metrics.record(
            len(request.prompt_token_ids),
            request.received_at,
            counts_prompt=request.is_first_sample,
            tenant=request.tenant,
        )
        log = RequestLog(
            request.trace.prompt.request_id or request.request_id, len(request.prompt_token_ids)
        )
        outcome = "abort"
        answer = AnswerText(decode, request.stop, _context_of(request), _scored_prompt_of(request))
        try:
            run = self._run(request, answer, recorder, ticket, log)
            async with contextlib.aclosing(run) as events:
                async for event in events:
                    if event.finish_reason is not None:
                        outcome = event.finish_reason
                        recorder.end(outcome)
                    yield event
        except Exception:  # a client that leaves is none
            outcome = "error"
            raise
        finally:
            recorder.end(outcome)
            request.trace.ended(outcome, recorder.first_text_s, answer.output_token_ids)
            num_computed = answer.num_computed_of(len(request.prompt_token_ids))
            ticket.used(num_computed, answer.num_output_tokens)
            ticket.close()
            if self._history is not None and request.is_first_sample and answer.is_admitted:
                self._history.add(_served_request(request, answer))
            log.ended(
                outcome, answer.num_cached_tokens, answer.num_output_tokens, recorder.first_text_s
            )

    async def _run(
        self,
        request: GenerationRequest,
        answer: AnswerText,
        recorder: RequestRecorder,
        ticket: Ticket,
        log: RequestLog,
    ) -> AsyncGenerator[TextEvent, None]:
        worker = await request.placement.worker(
            lambda: self.routing.choose(
                request.prompt_token_ids, request.cache_salt, request.affinity
            )
        )
        self.routing.sent(worker.worker_id)
        request.trace.sent(worker.worker_id, worker.epoch)
        submitted_at = self._metrics.clock()
        stream = worker.submit(_add_request(request))
        is_kept = False
        try:
            async for output in stream:
                answer.served(output)
                if output.num_cached_tokens is not None:
                    waited = self._metrics.clock() - submitted_at
                    queue_s = waited if output.queue_s is None else output.queue_s
                    request.trace.admitted(output, queue_s)
                    log.admitted(output, worker.worker_id, queue_s)
                    recorder.admitted(
                        output.num_cached_tokens,
                        queue_s,
                        output.num_host_tokens,
                        output.num_disk_tokens,
                        load_s=output.load_s,
                        prefill_token_s=worker.stats.prefill_token_s,
                    )
                if output.prefill_s is not None:
                    recorder.prefilled(output.prefill_s)
                _raise_if_failed(output)
                event, num_tokens = answer.take(output)
                if num_tokens:
                    ticket.started()
                    request.trace.token(output.prefill_s)
                    log.token(output.prefill_s)
                    recorder.tokens(num_tokens)
                if event is None:
                    continue
                if event.text:
                    recorder.text()
                if event.finish_reason is not None:
                    if request.keeper is not None:
                        await request.keeper.keep(_outcome(answer, worker.worker_id))
                    is_kept = True
                yield event
                if event.finish_reason is not None:
                    return
            raise error_from_worker(None)
        finally:
            is_stopped = not stream.is_finished
            if is_stopped:
                worker.abort(request.request_id)
            self.routing.ended(worker.worker_id)
            if request.keeper is not None and answer.is_admitted and (is_stopped or not is_kept):
                request.keeper.keep_later(_outcome_at_last(stream, answer, worker.worker_id))


def _context_of(request: GenerationRequest) -> Sequence[int]:
    if not request.is_continuation:
        return ()
    context: list[int] = request.prompt_token_ids[-_CONTEXT_TOKENS:].tolist()
    return context


def _scored_prompt_of(request: GenerationRequest) -> Sequence[int]:
    if request.sampling_params.num_prompt_logprobs is None:
        return ()
    token_ids: list[int] = request.prompt_token_ids.tolist()
    return token_ids


def _add_request(request: GenerationRequest) -> AddRequest:
    return AddRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids.astype("<i4", copy=False).tobytes(),
        sampling_params=request.sampling_params,
        cache_salt=request.cache_salt,
        priority=request.priority,
        retention_s=request.retention_s,
        tenant=request.tenant,
    )


def _served_request(request: GenerationRequest, answer: AnswerText) -> ServedRequest:
    prompt_ids = request.prompt_token_ids
    answer_ids = np.asarray(answer.computed_token_ids, dtype=np.int32)
    num_below = answer.num_host_tokens + answer.num_disk_tokens
    return ServedRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        session=request.affinity.key,
        cache_salt=request.cache_salt,
        token_ids=np.concatenate((prompt_ids, answer_ids)),
        num_prompt_tokens=len(prompt_ids),
        num_output_tokens=answer.num_output_tokens,
        num_device_tokens=answer.num_cached_tokens - num_below,
        num_host_tokens=answer.num_host_tokens,
        num_disk_tokens=answer.num_disk_tokens,
    )


async def _outcome_at_last(stream: RequestStream, answer: AnswerText, worker_id: str) -> Outcome:
    """After a worker was told to stop: with what it computed until it did."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_OUTPUT_S):
            async for output in stream:
                answer.served(output)
    return _outcome(answer, worker_id)


def _outcome(answer: AnswerText, worker_id: str) -> Outcome:
    return Outcome(
        worker_id=worker_id,
        output_token_ids=answer.output_token_ids,
        text=answer.text,
        stop_token_id=answer.stop_token_id,
        num_cached_tokens=answer.num_cached_tokens,
    )


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise error_from_worker(output.error)
    if output.finish_reason is FinishReason.ABORT:
        # Asked for by nobody here: the worker is on its way out.
        raise Unavailable("The worker gave the request up.", code="aborted", retry_after=5)
