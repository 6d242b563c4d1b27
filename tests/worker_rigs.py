"""Workers of each kind with a scripted engine, and the means to kill and revive them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from model_worker.protocol import (
    AddRequest,
    FinishReason,
    PrefixReply,
    RequestOutput,
    SamplingParams,
    WorkerConfig,
)
from service.workers.base import RequestStream, Worker, WorkerState
from service.workers.child_process import ChildExit, ChildProcess
from service.workers.fake import FakeWorker
from service.workers.local import LocalWorker, RestartPolicy
from service.workers.remote import RemoteWorker
from tests.scripted_worker import STEP_S, TIMING, make_card, next_token, scripted_command

SECRET = b"the secret of these tests"


class Rig(Protocol):
    worker: Worker

    async def open(self) -> None:
        """Start everything and wait until the worker is ready."""

    async def kill(self) -> None:
        """The worker dies without a word."""

    async def revive(self) -> None:
        """It is started again, unless it is by itself."""

    async def close(self) -> None: ...

    def policies_heard(self) -> list[tuple[str, int]]:
        """Tenant and cap on the device of each policy that has come to the worker."""


class FakeRig:
    def __init__(self) -> None:
        self.worker = FakeWorker(make_card(), counting_script, STEP_S)
        self.worker.prefix_reply = PrefixReply(
            call_id="", num_device_tokens=5, num_blocks_changed=3
        )

    async def open(self) -> None:
        await self.worker.start()
        await self.worker.wait_ready(5)

    async def kill(self) -> None:
        self.worker.set_lost()

    async def revive(self) -> None:
        self.worker.set_ready()

    async def close(self) -> None:
        await self.worker.close()

    def policies_heard(self) -> list[tuple[str, int]]:
        policies = self.worker.tenant_policies
        return [(policy.tenant, policy.max_device_bytes or 0) for policy in policies]


class LocalRig:
    def __init__(self, model: str = "scripted", *arguments: str) -> None:
        self.worker = LocalWorker(
            WorkerConfig(endpoint="", worker_id="local", model=model),
            command=scripted_command(*arguments),
            timing=TIMING,
            restart=RestartPolicy(initial_s=0.1, max_s=0.4, healthy_s=60.0),
            stop_timeout_s=1.0,
        )

    async def open(self) -> None:
        await self.worker.start()
        await self.worker.wait_ready(20)

    async def kill(self) -> None:
        send_signal(self.worker.pid, signal.SIGKILL)

    async def revive(self) -> None:
        return None

    async def close(self) -> None:
        await self.worker.close()

    def policies_heard(self) -> list[tuple[str, int]]:
        return policies_said_back(self.worker)


class RemoteRig:
    """A process started apart, over TCP with a shared secret."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        secret_file = directory / "secret"
        secret_file.write_bytes(SECRET)
        self.config = WorkerConfig(
            endpoint=f"tcp://127.0.0.1:{free_port()}",
            worker_id="remote",
            link_secret_file=str(secret_file),
            model="scripted",
        )
        self.worker = self.make_worker()
        self._arguments = arguments
        self._child: ChildProcess | None = None
        self._has_exited = threading.Event()

    def make_worker(self) -> RemoteWorker:
        return RemoteWorker(self.config.endpoint, SECRET, worker_id="remote", timing=TIMING)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def open(self) -> None:
        await self.revive()
        await self.worker.start()
        await self.worker.wait_ready(20)

    async def kill(self) -> None:
        send_signal(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._has_exited.wait, 5)

    async def revive(self) -> None:
        self._has_exited.clear()

        def on_exit(child_exit: ChildExit) -> None:
            self._has_exited.set()

        config_line = msgspec.json.encode(self.config) + b"\n"
        self._child = ChildProcess(scripted_command(*self._arguments), config_line, on_exit)

    async def close(self) -> None:
        await self.worker.close()
        if self._child is not None:
            self._child.kill()
            self._child.join()

    def policies_heard(self) -> list[tuple[str, int]]:
        return policies_said_back(self.worker)


def policies_said_back(worker: Worker) -> list[tuple[str, int]]:
    return [(usage.tenant, usage.num_device_blocks) for usage in worker.stats.tenants]


def counting_script(request: AddRequest) -> Iterable[int]:
    first = int(np.frombuffer(request.prompt_token_ids, "<i4")[0])
    return (next_token(first, position) for position in count())


def make_request(
    request_id: str, first: int = 100, max_tokens: int = 5, prompt_len: int = 3
) -> AddRequest:
    prompt = np.full(prompt_len, 7, dtype="<i4")
    prompt[0] = first
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt.tobytes(),
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


async def collect(stream: RequestStream, timeout_s: float = 10.0) -> list[RequestOutput]:
    """All outputs; fails when the stream does not end."""
    async with asyncio.timeout(timeout_s):
        return [output async for output in stream]


async def first_token(stream: RequestStream, timeout_s: float = 10.0) -> RequestOutput:
    """The first output with tokens: the request runs."""
    async with asyncio.timeout(timeout_s):
        async for output in stream:
            if output.token_ids:
                return output
    raise AssertionError("the stream ended without a token")


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def finish_reasons(outputs: Iterable[RequestOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


async def reach(worker: Worker, state: WorkerState, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while worker.state is not state:
            await asyncio.sleep(0.005)


def send_signal(pid: int | None, number: signal.Signals) -> None:
    assert pid is not None
    os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
