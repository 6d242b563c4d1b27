"""What the gateway knows of any worker: its state, its card, and streams of request outputs.

Owns the Worker contract and the parts its implementations share. Knows nothing of sockets,
processes or HTTP. Everything here belongs to one asyncio event loop and is not thread-safe.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import (
    AddRequest,
    ErrorCode,
    FinishReason,
    ModelCard,
    PrefixAction,
    PrefixReply,
    RequestError,
    RequestOutput,
    TenantPolicy,
    WorkerStats,
)
from service.workers.cache_news import CacheListener

MAX_PENDING_OUTPUTS = 32  # per stream; a consumer further behind gets them merged


_log = logging.getLogger("headstart.workers")


class WorkerState(StrEnum):
    CONNECTING = "connecting"  # not heard yet
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    LOST = "lost"  # was heard and is not any more; comes back by itself
    FAILED = "failed"  # a person must act


@dataclass(frozen=True, slots=True)
class StateChange:
    worker_id: str
    state: WorkerState
    detail: str  # one line for a person; empty when ready


StateListener = Callable[[StateChange], None]


class WorkerNotReadyError(Exception):
    """wait_ready gave up, or a call needs a worker that is ready; one line for a person."""


class WorkerLostError(Exception):
    """The worker was lost before it answered a call."""


class Worker(Protocol):
    """One worker as its gateway sees it; all methods are called on the event loop."""

    @property
    def worker_id(self) -> str: ...

    @property
    def state(self) -> WorkerState: ...

    @property
    def detail(self) -> str: ...

    @property
    def card(self) -> ModelCard | None:
        """Of the last Welcome; kept while the worker is lost. None before the first."""
        ...

    @property
    def epoch(self) -> int:
        """Of the last Welcome: another one is another life of the worker. 0 before the first."""
        ...

    @property
    def stats(self) -> WorkerStats:
        """As last reported; all zero before the first report and while the worker is lost."""
        ...

    def add_state_listener(self, listener: StateListener) -> None:
        """Call ``listener`` on the event loop at each change of state or detail from now on."""
        ...

    def add_event_listener(self, listener: CacheListener) -> None:
        """Call ``listener`` on the event loop with what the worker's cache tells from now on.

        Each Welcome is news of AllBlocksCleared, ahead of the worker being ready: what was heard
        before it counts no more. What the worker still has stored then is told again.
        """
        ...

    async def start(self) -> None:
        """Begin to connect; returns at once. Called once, on the event loop to be used."""
        ...

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        """Raises WorkerNotReadyError at the timeout, and at once when the worker has failed."""
        ...

    def submit(self, request: AddRequest) -> RequestStream:
        """Never blocks and never raises for the worker's state.

        A worker that is not ready gives a stream that ends with a typed error at once. Raises
        ValueError when ``request_id`` is in use.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ask for the request's end; its stream ends with ABORT, or as it was about to anyway.

        Harmless for a request that has ended or was never known.
        """
        ...

    async def reset_cache(self) -> int:
        """Blocks dropped. Raises WorkerNotReadyError or WorkerLostError."""
        ...

    async def act_on_prefix(
        self,
        action: PrefixAction,
        token_ids: NDArray[np.int32],
        *,
        cache_salt: str = "",
        keep_num_tokens: int = 0,
    ) -> PrefixReply:
        """Act on what is stored of the prefix ``token_ids`` (1-D), past ``keep_num_tokens``.

        Raises WorkerNotReadyError or WorkerLostError.
        """
        ...

    def set_tenant_policies(
        self, policies: Sequence[TenantPolicy], shared_prefixes: Sequence[bytes] = ()
    ) -> None:
        """From now on these hold and no others, in this life of the worker and in later ones.
        ``shared_prefixes`` are the token ids (little-endian int32) that all tenants share.

        Never waits: a worker that is not ready is told when it is.
        """
        ...

    async def close(self) -> None:
        """End every stream (SHUTTING_DOWN) and everything that was started. Idempotent."""
        ...


class RequestStream:
    """Async iterator over one request's outputs; the last has a finish_reason, and only it.

    One consumer. The producer's :meth:`put` never waits: outputs that the consumer has not fetched
    are merged beyond MAX_PENDING_OUTPUTS, so a slow consumer costs token ids and no more.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._pending: deque[RequestOutput] = deque()
        self._is_finished = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the final output has been put (it may not have been fetched yet)."""
        return self._is_finished

    def put(self, output: RequestOutput) -> None:
        """Append; what comes after the final output is dropped."""
        if self._is_finished:
            return
        self._is_finished = output.finish_reason is not None
        self._pending.append(output)
        if len(self._pending) > MAX_PENDING_OUTPUTS:
            merged = merge_outputs(tuple(self._pending))
            self._pending.clear()
            self._pending.append(merged)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, code: ErrorCode, message: str) -> None:
        """End with a typed error, unless it has ended."""
        self.put(error_output(self.request_id, code, message))

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pending.popleft()


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one: tokens joined, and what is said once."""
    last = outputs[-1]
    cached = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
    queued = [o.queue_s for o in outputs if o.queue_s is not None]
    loaded = [o.load_s for o in outputs if o.load_s is not None]
    prefilled = [o.prefill_s for o in outputs if o.prefill_s is not None]
    evicted = [o.evicted for o in outputs if o.evicted is not None]
    return RequestOutput(
        request_id=last.request_id,
        token_ids=tuple(itertools.chain.from_iterable(o.token_ids for o in outputs)),
        num_cached_tokens=cached[-1] if cached else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        queue_s=queued[-1] if queued else None,
        prefill_s=prefilled[-1] if prefilled else None,
        num_host_tokens=max(o.num_host_tokens for o in outputs),
        num_disk_tokens=max(o.num_disk_tokens for o in outputs),
        evicted=evicted[-1] if evicted else None,
        load_s=loaded[-1] if loaded else None,
    )


def error_output(request_id: str, code: ErrorCode, message: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=RequestError(code=code, message=message),
    )


class StreamTable:
    """The streams that a worker has not finished yet, by request id."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str) -> RequestStream:
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = RequestStream(request_id)
        return stream

    def deliver(self, output: RequestOutput) -> None:
        """Outputs of unknown requests are dropped: their stream has ended."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        stream.put(output)
        if stream.is_finished:
            del self._streams[output.request_id]

    def fail(self, request_id: str, code: ErrorCode, message: str) -> None:
        self.deliver(error_output(request_id, code, message))

    def fail_all(self, code: ErrorCode, message: str) -> None:
        streams = tuple(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(code, message)


class WorkerStatusBoard:
    """The state of one worker, those who wait for it to be ready, and those who listen."""

    def __init__(self, worker_id: str, detail: str) -> None:
        self._worker_id = worker_id
        self._state = WorkerState.CONNECTING
        self._detail = detail
        self._listeners: list[StateListener] = []
        self._changed: asyncio.Future[None] | None = None

    @property
    def state(self) -> WorkerState:
        return self._state

    @property
    def detail(self) -> str:
        return self._detail

    def add_listener(self, listener: StateListener) -> None:
        self._listeners.append(listener)

    def set(self, state: WorkerState, detail: str = "") -> None:
        if (state, detail) == (self._state, self._detail):
            return
        self._state, self._detail = state, detail
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
        for listener in self._listeners:
            self._tell(listener)

    def _tell(self, listener: StateListener) -> None:
        try:
            listener(StateChange(self._worker_id, self._state, self._detail))
        except Exception:  # whoever listens must not keep the streams from being ended
            _log.exception("a listener to the state of worker %s failed", self._worker_id)

    async def wait_ready(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._state is not WorkerState.READY:
                    if self._state is WorkerState.FAILED:
                        raise WorkerNotReadyError(self._sentence("failed"))
                    await self._next_change()
        except TimeoutError:
            raise WorkerNotReadyError(self._sentence(f"not ready after {timeout_s:g} s")) from None

    async def _next_change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _sentence(self, problem: str) -> str:
        return f"worker {self._worker_id}: {problem}: {self._detail or self._state}"


def refusal_code(state: WorkerState) -> ErrorCode:
    """Why a worker in ``state`` (any but READY) takes no request."""
    return ErrorCode.SHUTTING_DOWN if state is WorkerState.DRAINING else ErrorCode.WORKER_LOST
