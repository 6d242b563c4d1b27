"""The one path behind every endpoint: token ids to a worker, and text back as events.

Owns a request's life between the tokenized prompt and the last piece of text: submitting,
detokenizing, stop strings, aborting, measuring. A plain answer is the fold of the same events as
a stream. Knows nothing of HTTP, bodies or templates.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import AddRequest, FinishReason, RequestOutput, SamplingParams
from service.detokenizer import Detokenizer
from service.errors import Unavailable, error_from_worker
from service.metrics import GatewayMetrics, RequestRecorder
from service.request_gate import Ticket
from service.router import Affinity
from service.routing import LocatePrefix, Routing
from service.stop_strings import StopStrings
from service.workers.base import RequestStream, Worker

__all__ = ["GenerationRequest", "Generator", "Outcome", "OutcomeKeeper", "TextEvent"]

_log = logging.getLogger("headstart.requests")
_CONTEXT_TOKENS = 4
_LAST_OUTPUT_S = 10.0  # a worker that was told to stop finishes its step first


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
    keeper: OutcomeKeeper | None = None


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


class TextEvent(msgspec.Struct, frozen=True):
    """What became certain of an answer. The last one has a finish_reason: stop or length."""

    text: str
    num_output_tokens: int  # so far; they count in the usage
    num_cached_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the token, that ended it


class Generator:
    """``workers`` gives those that take requests now, ``locate`` tells which hold a prompt."""

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        metrics: GatewayMetrics,
        locate: LocatePrefix | None = None,
    ) -> None:
        self._metrics = metrics
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
        recorder = self._metrics.record(len(request.prompt_token_ids), request.received_at)
        outcome = "abort"
        answer = _Answer(request, decode)
        try:
            run = self._run(request, answer, recorder, ticket)
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
            ticket.used(answer.num_computed_prompt_tokens, answer.num_output_tokens)
            ticket.close()
            _log.info(
                "request %s ended: %s, prompt_tokens=%d cached_tokens=%d output_tokens=%d ttft=%s",
                request.request_id,
                outcome,
                len(request.prompt_token_ids),
                answer.num_cached_tokens,
                answer.num_output_tokens,
                "-" if recorder.first_text_s is None else f"{recorder.first_text_s:.4f}s",
            )

    async def _run(
        self,
        request: GenerationRequest,
        answer: _Answer,
        recorder: RequestRecorder,
        ticket: Ticket,
    ) -> AsyncGenerator[TextEvent, None]:
        worker = await self.routing.choose(
            request.prompt_token_ids, request.cache_salt, request.affinity
        )
        self.routing.sent(worker.worker_id)
        submitted_at = self._metrics.clock()
        stream = worker.submit(_add_request(request))
        is_kept = False
        try:
            async for output in stream:
                answer.served(output)
                if output.num_cached_tokens is not None:
                    answer.num_cached_tokens = output.num_cached_tokens
                    waited = self._metrics.clock() - submitted_at
                    queue_s = waited if output.queue_s is None else output.queue_s
                    recorder.admitted(
                        output.num_cached_tokens,
                        queue_s,
                        output.num_host_tokens,
                        output.num_disk_tokens,
                    )
                _raise_if_failed(output)
                event, num_tokens = answer.take(output)
                if num_tokens:
                    ticket.started()
                    recorder.tokens(num_tokens)
                if event is None:
                    continue
                if event.text:
                    recorder.text()
                if event.finish_reason is not None:
                    if request.keeper is not None:
                        await request.keeper.keep(answer.outcome(worker.worker_id))
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


class _Answer:
    """The text of one answer, as its tokens come in."""

    def __init__(self, request: GenerationRequest, decode: Callable[[Sequence[int]], str]) -> None:
        context: list[int] = (
            request.prompt_token_ids[-_CONTEXT_TOKENS:].tolist() if request.is_continuation else []
        )
        self._detokenizer = Detokenizer(decode, context)
        self._stop = StopStrings(request.stop)
        self._output_token_ids: list[int] = []
        self._text: list[str] = []
        self._stop_token_id: int | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.is_admitted = False
        self._num_prompt_tokens = len(request.prompt_token_ids)

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self._num_prompt_tokens - self.num_cached_tokens if self.is_admitted else 0

    def served(self, output: RequestOutput) -> None:
        """Note what the worker computed, whether or not any of it is given out."""
        self.is_admitted |= output.num_cached_tokens is not None
        self._output_token_ids += output.token_ids
        self._stop_token_id = output.stop_token_id

    def outcome(self, worker_id: str) -> Outcome:
        stop_token_id = self._stop_token_id
        num_stopping = 0 if stop_token_id is None else 1
        return Outcome(
            worker_id=worker_id,
            output_token_ids=self._output_token_ids[: len(self._output_token_ids) - num_stopping],
            text="".join(self._text),
            stop_token_id=stop_token_id,
            num_cached_tokens=self.num_cached_tokens,
        )

    def take(self, output: RequestOutput) -> tuple[TextEvent | None, int]:
        """The event that ``output`` makes, if any, and how many of its tokens count."""
        pieces: list[str] = []
        before = self.num_output_tokens
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self.num_output_tokens += 1
            if index == last and token_id == output.stop_token_id:
                continue  # it ended the answer, and is no part of its text
            pieces.append(self._stop.push(self._detokenizer.push(token_id)))
            if self._stop.matched is not None:
                break
        reason = self._finish(output, pieces)
        text = "".join(pieces)
        self._text.append(text)
        num_tokens = self.num_output_tokens - before
        if not text and reason is None:
            return None, num_tokens
        stop_reason = self._stop.matched or (output.stop_token_id if reason == "stop" else None)
        return self._event(text, reason, stop_reason), num_tokens

    def _finish(self, output: RequestOutput, pieces: list[str]) -> str | None:
        if self._stop.matched is None and output.finish_reason is not None:
            pieces.append(self._stop.push(self._detokenizer.finish()))
            if self._stop.matched is None:
                pieces.append(self._stop.finish())
        if self._stop.matched is not None:
            return "stop"
        return None if output.finish_reason is None else output.finish_reason.value

    def _event(self, text: str, reason: str | None, stop_reason: str | int | None) -> TextEvent:
        return TextEvent(text, self.num_output_tokens, self.num_cached_tokens, reason, stop_reason)


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


async def _outcome_at_last(stream: RequestStream, answer: _Answer, worker_id: str) -> Outcome:
    """After a worker was told to stop: with what it computed until it did."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_OUTPUT_S):
            async for output in stream:
                answer.served(output)
    return answer.outcome(worker_id)


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise error_from_worker(output.error)
    if output.finish_reason is FinishReason.ABORT:
        # Asked for by nobody here: the worker is on its way out.
        raise Unavailable("The worker gave the request up.", code="aborted", retry_after=5)
