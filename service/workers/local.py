"""A worker that this gateway starts itself: a child process and the link to it.

Owns the child's life (start, restart with back-off, stop) and the private directory of the link's
socket. What happens on the link is RemoteWorker's. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import (
    EXIT_CONFIG,
    AddRequest,
    LinkTiming,
    ModelCard,
    PrefixAction,
    PrefixReply,
    TenantPolicy,
    WorkerConfig,
    WorkerStats,
)
from service.workers.base import (
    RequestStream,
    StateChange,
    StateListener,
    WorkerNotReadyError,
    WorkerState,
    WorkerStatusBoard,
    refusal_code,
)
from service.workers.cache_news import CacheListener
from service.workers.child_process import ChildExit, ChildProcess
from service.workers.remote import RemoteWorker

DEFAULT_COMMAND = (sys.executable, "-m", "model_worker")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds. The delay doubles with each death, until one that came after ``healthy_s`` ready."""

    initial_s: float = 0.5
    max_s: float = 30.0
    healthy_s: float = 60.0


class LocalWorker:
    """Implements the Worker contract (service.workers.base) with a child process.

    ``config.endpoint`` is an ipc endpoint, or empty for a socket in a private directory that this
    worker makes and removes. ``command`` is the child's, which gets the WorkerConfig as one line
    of JSON on its standard input. Its output goes to ``output`` (None: standard error).

    A child that ends is started again after a delay, unless it ended with EXIT_CONFIG: that is a
    mistake which no restart mends, and its last line on standard error says which.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        command: Sequence[str] = DEFAULT_COMMAND,
        timing: LinkTiming | None = None,
        restart: RestartPolicy | None = None,
        stop_timeout_s: float = 10.0,
        output: TextIO | None = None,
    ) -> None:
        self._command = tuple(command)
        self._restart = restart or RestartPolicy()
        self._stop_timeout_s = stop_timeout_s
        self._output = output
        self._directory: str | None = None
        if not config.endpoint:
            self._directory = _private_directory()
            endpoint = f"ipc://{self._directory}/link"
            config = msgspec.structs.replace(config, endpoint=endpoint)
        self._config = config
        self._board = WorkerStatusBoard(config.worker_id, "starting the worker process")
        self._remote = RemoteWorker(config.endpoint, worker_id=config.worker_id, timing=timing)
        self._remote.add_state_listener(self._follow_link)
        self._child: ChildProcess | None = None
        self._exit: asyncio.Future[ChildExit] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready_since: float | None = None
        self._is_running = False
        self._is_closing = False

    # ------------------------------------------------------------ the Worker contract

    @property
    def worker_id(self) -> str:
        return self._config.worker_id

    @property
    def state(self) -> WorkerState:
        return self._board.state

    @property
    def detail(self) -> str:
        return self._board.detail

    @property
    def card(self) -> ModelCard | None:
        return self._remote.card

    @property
    def epoch(self) -> int:
        return self._remote.epoch

    @property
    def stats(self) -> WorkerStats:
        return self._remote.stats

    def add_state_listener(self, listener: StateListener) -> None:
        self._board.add_listener(listener)

    def add_event_listener(self, listener: CacheListener) -> None:
        self._remote.add_event_listener(listener)

    async def start(self) -> None:
        await self._remote.start()
        self._supervisor = asyncio.create_task(self._supervise(), name="headstart-local-worker")

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        await self._board.wait_ready(timeout_s)
        assert self._remote.card is not None, "a worker is ready only once its card is known"
        return self._remote.card

    def submit(self, request: AddRequest) -> RequestStream:
        if self.state is WorkerState.READY:
            return self._remote.submit(request)
        stream = RequestStream(request.request_id)
        stream.fail(refusal_code(self.state), self._refusal())
        return stream

    def abort(self, request_id: str) -> None:
        self._remote.abort(request_id)

    async def reset_cache(self) -> int:
        self._require_child()
        return await self._remote.reset_cache()

    async def act_on_prefix(
        self,
        action: PrefixAction,
        token_ids: NDArray[np.int32],
        *,
        cache_salt: str = "",
        keep_num_tokens: int = 0,
    ) -> PrefixReply:
        self._require_child()
        return await self._remote.act_on_prefix(
            action, token_ids, cache_salt=cache_salt, keep_num_tokens=keep_num_tokens
        )

    def set_tenant_policies(
        self, policies: Sequence[TenantPolicy], shared_prefixes: Sequence[bytes] = ()
    ) -> None:
        self._remote.set_tenant_policies(policies, shared_prefixes)

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        try:
            await self._remote.close()
            await self._stop_child()
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            if self.state is not WorkerState.FAILED:
                self._board.set(WorkerState.LOST, "closed")

    # ------------------------------------------------------------ for whoever runs it

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        return None if self._child is None else self._child.pid

    @property
    def endpoint(self) -> str:
        return self._config.endpoint

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What the child that runs or ran last has printed, at most 50 lines."""
        return () if self._child is None else self._child.last_lines

    # ------------------------------------------------------------ the child's life

    def _require_child(self) -> None:
        """The link may not have noticed yet that the process is gone."""
        if self.state not in (WorkerState.READY, WorkerState.DRAINING):
            raise WorkerNotReadyError(self._refusal())

    def _refusal(self) -> str:
        return f"worker {self.worker_id}: {self.detail or self.state}"

    def _follow_link(self, change: StateChange) -> None:
        if not self._is_running or self._is_closing:
            return  # the process says more than the link: how it ended, and what comes next
        if change.state is WorkerState.CONNECTING:
            return  # a child that takes its time to start is no missing worker
        if change.state is WorkerState.READY:
            self._ready_since = asyncio.get_running_loop().time()
        self._board.set(change.state, change.detail)

    async def _supervise(self) -> None:
        delay_s = self._restart.initial_s
        while not self._is_closing:
            ended = await self._run_child()
            if ended is None or self._is_closing:
                return
            if ended.returncode == EXIT_CONFIG:
                self._board.set(WorkerState.FAILED, ended.last_stderr_line or ended.describe())
                return
            if self._was_healthy():
                delay_s = self._restart.initial_s
            detail = f"{ended.describe()}; it is started again in {delay_s:g} s"
            self._board.set(WorkerState.LOST, detail)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._restart.max_s)
            self._board.set(WorkerState.CONNECTING, "starting the worker process again")

    async def _run_child(self) -> ChildExit | None:
        """One run from start to end; None when it cannot be started at all."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ChildExit] = loop.create_future()

        def on_exit(child_exit: ChildExit) -> None:  # on the child's reading thread
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set_result, child_exit)

        self._ready_since = None
        config_line = msgspec.json.encode(self._config) + b"\n"
        try:
            self._child = ChildProcess(self._command, config_line, on_exit, self._output)
        except OSError as error:
            problem = f"cannot start {self._command[0]}: {error.strerror}"
            self._board.set(WorkerState.FAILED, problem)
            return None
        self._exit = ended
        self._is_running = True
        try:
            return await asyncio.shield(ended)
        finally:
            self._is_running = False

    def _was_healthy(self) -> bool:
        if self._ready_since is None:
            return False
        return asyncio.get_running_loop().time() - self._ready_since >= self._restart.healthy_s

    async def _stop_child(self) -> None:
        if self._child is not None and self._exit is not None:
            if not self._exit.done():
                self._child.terminate()
                await asyncio.wait([self._exit], timeout=self._stop_timeout_s)
            if not self._exit.done():
                self._child.kill()
            await self._exit
            self._child.join()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])


def _private_directory() -> str:
    """A new directory for this user alone (mode 0700), with a path short enough for a socket."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="headstart-", dir=parent if len(parent) < 80 else "/tmp")
