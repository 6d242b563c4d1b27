"""A worker without a model, in this process: scripted tokens at an interval.

For tests of the gateway and for measuring it. Its usage is plausible: num_cached_tokens is the
longest prefix in common with an earlier prompt and answer; and so are its logprobs, of which
:mod:`service.workers.fake_request` says what they are. Knows nothing of links or processes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.events import AllBlocksCleared, CacheEvent
from model_worker.protocol import (
    AddRequest,
    ErrorCode,
    FinishReason,
    ModelCard,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    RequestOutput,
    TenantPolicy,
    WorkerStats,
)
from service.workers.base import (
    RequestStream,
    StateListener,
    StreamTable,
    WorkerNotReadyError,
    WorkerState,
    WorkerStatusBoard,
    refusal_code,
)
from service.workers.cache_news import CacheListener, CacheNewsBoard
from service.workers.fake_memory import FakeMemory
from service.workers.fake_request import FakeRequest

Script = Callable[[AddRequest], Iterable[int]]
"""The answer to a request, as token ids. Its end is a stop; what it raises fails the request."""

_NUM_RECORDED = 256  # prefix commands


class FakeWorker:
    """Implements the Worker contract (service.workers.base).

    Each ``token_interval`` seconds every running request gets one token; 0 gives one per turn of
    the event loop. At most ``max_num_seqs`` run, ``max_num_waiting`` more wait, the next is
    OVERLOADED. It is ready once started, unless told otherwise before.
    ``prefix_reply`` answers every prefix command.
    """

    def __init__(
        self,
        card: ModelCard,
        script: Script,
        token_interval: float = 0.0,
        *,
        worker_id: str = "fake",
        max_num_seqs: int = 256,
        max_num_waiting: int = 256,
    ) -> None:
        self._given_card = card
        self._card: ModelCard | None = None
        self._script = script
        self._token_interval = token_interval
        self._worker_id = worker_id
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._board = WorkerStatusBoard(worker_id, "not started")
        self._streams = StreamTable()
        self._waiting: deque[FakeRequest] = deque()
        self._running: dict[str, FakeRequest] = {}
        self._remembered = FakeMemory()
        self._totals = self._no_work_yet()
        self._epoch = 0
        self._is_new_life = True
        self._cache_news = CacheNewsBoard(worker_id)
        self._prefix_commands: deque[PrefixCommand] = deque(maxlen=_NUM_RECORDED)
        self.prefix_reply = PrefixReply(call_id="")
        self.tenant_policies: tuple[TenantPolicy, ...] = ()  # as told last
        self.shared_prefixes: tuple[bytes, ...] = ()
        self._has_work = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ the Worker contract

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def state(self) -> WorkerState:
        return self._board.state

    @property
    def detail(self) -> str:
        return self._board.detail

    @property
    def card(self) -> ModelCard | None:
        return self._card

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def stats(self) -> WorkerStats:
        num_used = sum(self._num_blocks(running) for running in self._running.values())
        num_kept = self._remembered.num_blocks(self._given_card.block_size)
        num_blocks = self._given_card.num_blocks
        num_locked = min(num_blocks, num_used)
        num_evictable = min(num_blocks - num_locked, num_kept)
        return msgspec.structs.replace(
            self._totals,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_locked_blocks=num_locked,
            num_evictable_blocks=num_evictable,
            num_free_blocks=num_blocks - num_locked - num_evictable,
            step_s=self._token_interval,
        )

    def add_state_listener(self, listener: StateListener) -> None:
        self._board.add_listener(listener)

    def add_event_listener(self, listener: CacheListener) -> None:
        self._cache_news.add_listener(listener)

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick(), name="headstart-fake-worker")
        if self.state is WorkerState.CONNECTING:
            self.set_ready()

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        await self._board.wait_ready(timeout_s)
        return self._given_card

    def submit(self, request: AddRequest) -> RequestStream:
        stream = self._streams.open(request.request_id)
        if self.state is not WorkerState.READY:
            self._fail(request.request_id, refusal_code(self.state), self.detail or self.state)
        elif len(self._waiting) >= self._max_num_waiting:
            self._fail(request.request_id, ErrorCode.OVERLOADED, "too many requests wait")
        else:
            self._enqueue(request)
        return stream

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._finish(RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    async def reset_cache(self) -> int:
        self._require_life()
        num_dropped = self.stats.num_evictable_blocks
        self._remembered.clear()
        self.tell(AllBlocksCleared())
        return num_dropped

    async def act_on_prefix(
        self,
        action: PrefixAction,
        token_ids: NDArray[np.int32],
        *,
        cache_salt: str = "",
        keep_num_tokens: int = 0,
    ) -> PrefixReply:
        self._require_life()
        command = PrefixCommand(
            call_id="",
            action=action,
            prompt_token_ids=token_ids.astype("<i4", copy=False).tobytes(),
            cache_salt=cache_salt,
            keep_num_tokens=keep_num_tokens,
        )
        self._prefix_commands.append(command)
        return self.prefix_reply

    def set_tenant_policies(
        self, policies: Sequence[TenantPolicy], shared_prefixes: Sequence[bytes] = ()
    ) -> None:
        self.tenant_policies = tuple(policies)
        self.shared_prefixes = tuple(shared_prefixes)

    async def close(self) -> None:
        if self.state is not WorkerState.FAILED:
            self._end(WorkerState.LOST, "closed", ErrorCode.SHUTTING_DOWN)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])

    # ------------------------------------------------------------ what a test may tell it

    def set_loading(self, detail: str = "loading") -> None:
        self._board.set(WorkerState.LOADING, detail)

    def set_ready(self) -> None:
        """As when it says Welcome; in a new life after a loss or a failure."""
        if self._is_new_life:
            self._is_new_life = False
            self._epoch += 1
        self._card = self._given_card
        self.tell(AllBlocksCleared())
        self._board.set(WorkerState.READY)

    def set_draining(self, detail: str = "shutting down") -> None:
        self._board.set(WorkerState.DRAINING, detail)

    def set_lost(self, reason: str = "the connection was closed") -> None:
        """As when its process dies: every stream ends with WORKER_LOST, the cache is gone."""
        self._remembered.clear()
        self._end(WorkerState.LOST, reason, ErrorCode.WORKER_LOST)

    def set_failed(self, reason: str) -> None:
        self._remembered.clear()
        self._end(WorkerState.FAILED, reason, ErrorCode.WORKER_LOST)

    def fail_request(
        self, request_id: str, code: ErrorCode = ErrorCode.INTERNAL, message: str = "it failed"
    ) -> None:
        """End one request with a typed error, wherever it stands."""
        self._fail(request_id, code, message)

    def tell(self, *events: CacheEvent) -> None:
        """Have its cache tell this."""
        self._cache_news.tell(self._epoch, events)

    @property
    def prefix_commands(self) -> tuple[PrefixCommand, ...]:
        """The latest that were asked for, at most 256, the oldest first."""
        return tuple(self._prefix_commands)

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._streams)

    # ------------------------------------------------------------ the scripted engine

    def _require_life(self) -> None:
        if self.state not in (WorkerState.READY, WorkerState.DRAINING):
            raise WorkerNotReadyError(f"worker {self._worker_id}: {self.detail or self.state}")

    def _no_work_yet(self) -> WorkerStats:
        num_blocks = self._given_card.num_blocks
        return WorkerStats(num_blocks=num_blocks, num_free_blocks=num_blocks)

    def _enqueue(self, request: AddRequest) -> None:
        prompt = np.frombuffer(request.prompt_token_ids, dtype="<i4")
        if len(prompt) >= self._given_card.max_model_len:
            limit = self._given_card.max_model_len
            problem = f"the prompt has {len(prompt)} tokens, the limit is {limit}"
            self._fail(request.request_id, ErrorCode.CONTEXT_LENGTH, problem)
            return
        try:
            tokens = iter(self._script(request))
        except Exception as error:  # a script may fail as it likes: that is what it is for
            self._fail(request.request_id, ErrorCode.INTERNAL, f"the script failed: {error!r}")
            return
        arrived_at = asyncio.get_running_loop().time()
        self._waiting.append(FakeRequest(request, prompt, tokens, arrived_at))
        self._has_work.set()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            if not self._waiting and not self._running:
                self._has_work.clear()
                await self._has_work.wait()
                next_at = loop.time()
            next_at += self._token_interval
            await asyncio.sleep(max(0.0, next_at - loop.time()))
            # What was missed while the loop was busy is not made up for: a real worker's tokens
            # would have come meanwhile, but one frame later each.
            next_at = max(next_at, loop.time() - self._token_interval)
            self._step(loop.time())

    def _step(self, now: float) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._admit(self._waiting.popleft(), now)
        num_generated = 0
        for running in tuple(self._running.values()):
            num_generated += self._advance(running, now)
        self._totals = msgspec.structs.replace(
            self._totals,
            steps_total=self._totals.steps_total + 1,
            generated_tokens_total=self._totals.generated_tokens_total + num_generated,
        )

    def _admit(self, request: FakeRequest, now: float) -> None:
        request.admitted_at = now
        request_id = request.request.request_id
        self._running[request_id] = request
        salt, prompt = request.request.cache_salt, request.prompt_token_ids
        scores = request.prompt_logprobs()
        num_cached = 0 if scores else self._remembered.longest_common_prefix(salt, prompt)
        num_computed = len(prompt) - num_cached
        self._totals = msgspec.structs.replace(
            self._totals,
            prompt_tokens_computed_total=self._totals.prompt_tokens_computed_total + num_computed,
        )
        self._remembered.remember(salt, prompt)
        self._streams.deliver(
            RequestOutput(
                request_id=request_id,
                num_cached_tokens=num_cached,
                queue_s=now - request.arrived_at,
                load_s=0.0,
                prompt_logprobs=scores,
            )
        )

    def _advance(self, running: FakeRequest, now: float) -> int:
        """One token more, or the end; the number of tokens that came."""
        request_id = running.request.request_id
        max_tokens = running.request.sampling_params.max_tokens  # 0 asks for the prompt's KV alone
        try:
            token = next(running.tokens, None) if max_tokens else None
        except Exception as error:  # a script may fail as it likes: that is what it is for
            self._fail(request_id, ErrorCode.INTERNAL, f"the script failed: {error!r}")
            return 0
        if token is None:
            end = FinishReason.STOP if max_tokens else FinishReason.LENGTH
            self._finish(RequestOutput(request_id=request_id, finish_reason=end))
            return 0
        running.output_token_ids.append(token)
        reason, stop_token_id = self._finish_reason(running, token)
        output = RequestOutput(
            request_id=request_id,
            token_ids=(token,),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            prefill_s=now - running.admitted_at if len(running.output_token_ids) == 1 else None,
            logprobs=running.logprobs_of(token),
        )
        if reason is None:
            self._streams.deliver(output)
        else:
            self._finish(output)
        return 1

    def _finish_reason(
        self, running: FakeRequest, token: int
    ) -> tuple[FinishReason | None, int | None]:
        params = running.request.sampling_params
        is_eos = token in self._given_card.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return FinishReason.STOP, token
        num_tokens = len(running.prompt_token_ids) + len(running.output_token_ids)
        is_full = num_tokens >= self._given_card.max_model_len
        if is_full or len(running.output_token_ids) >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, output: RequestOutput) -> None:
        running = self._running.pop(output.request_id, None)
        if running is None:
            self._waiting = deque(
                item for item in self._waiting if item.request.request_id != output.request_id
            )
        else:
            answer = np.asarray(running.output_token_ids, dtype=np.int32)
            known = np.concatenate((running.prompt_token_ids, answer))
            self._remembered.remember(running.request.cache_salt, known)
        self._streams.deliver(output)

    def _fail(self, request_id: str, code: ErrorCode, problem: str) -> None:
        self._running.pop(request_id, None)
        self._waiting = deque(
            item for item in self._waiting if item.request.request_id != request_id
        )
        self._streams.fail(request_id, code, f"worker {self._worker_id}: {problem}")

    def _end(self, state: WorkerState, reason: str, code: ErrorCode) -> None:
        self._is_new_life = True
        self._totals = self._no_work_yet()
        self._card = self._card if state is WorkerState.LOST else None
        self._waiting.clear()
        self._running.clear()
        self._board.set(state, reason)
        self._streams.fail_all(code, f"worker {self._worker_id}: {reason}")

    def _num_blocks(self, running: FakeRequest) -> int:
        num_tokens = len(running.prompt_token_ids) + len(running.output_token_ids)
        return -(-num_tokens // self._given_card.block_size)
