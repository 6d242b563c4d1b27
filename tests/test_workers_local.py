"""LocalWorker: how its child starts, ends, is started again and is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from model_worker.protocol import ErrorCode, LinkError, WorkerConfig
from service.workers.base import StateChange, WorkerNotReadyError, WorkerState
from service.workers.local import DEFAULT_COMMAND, LocalWorker, RestartPolicy
from tests.scripted_worker import EXIT_TOKEN, TIMING, make_card, scripted_command
from tests.worker_rigs import collect, make_request, reach, send_signal, tokens_of

ROOT = Path(__file__).resolve().parent.parent


def make_worker(
    model: str = "scripted",
    *,
    endpoint: str = "",
    command: list[str] | None = None,
    restart: RestartPolicy | None = None,
    stop_timeout_s: float = 2.0,
    output: io.StringIO | None = None,
) -> LocalWorker:
    return LocalWorker(
        WorkerConfig(endpoint=endpoint, worker_id="local", model=model),
        command=command or scripted_command(),
        timing=TIMING,
        restart=restart or RestartPolicy(initial_s=0.05, max_s=0.1),
        stop_timeout_s=stop_timeout_s,
        output=output,
    )


@contextlib.asynccontextmanager
async def started(worker: LocalWorker) -> AsyncIterator[LocalWorker]:
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_child_is_the_worker_package_unless_told_otherwise() -> None:
    assert (sys.executable, "-m", "model_worker") == DEFAULT_COMMAND


async def test_the_socket_is_private_and_removed() -> None:
    async with started(make_worker()) as worker:
        await worker.wait_ready(20)
        directory = Path(worker.endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert os.listdir(directory) == ["link"]
    assert not directory.exists()


async def test_a_given_endpoint_is_used(tmp_path: Path) -> None:
    async with started(make_worker(endpoint=f"ipc://{tmp_path}/given")) as worker:
        await worker.wait_ready(20)
        assert (tmp_path / "given").exists()
    assert tmp_path.exists()


def test_an_illegal_endpoint_is_refused_at_construction() -> None:
    with pytest.raises(LinkError):
        make_worker(endpoint="tcp://127.0.0.1:7000")


async def test_loading_is_told() -> None:
    changes: list[StateChange] = []
    worker = make_worker("slow-load")
    worker.add_state_listener(changes.append)
    async with started(worker):
        assert await worker.wait_ready(20) == make_card("slow-load")
    assert StateChange("local", WorkerState.LOADING, "reading weights 40 %") in changes


async def test_a_slow_start_is_not_called_a_missing_worker() -> None:
    command = [sys.executable, "-c", "import sys, time; sys.stdin.readline(); time.sleep(30)"]
    async with started(make_worker(command=command)) as worker:
        await asyncio.sleep(TIMING.answer_s + 0.3)
        assert worker.state is WorkerState.CONNECTING
        assert worker.detail == "starting the worker process"


async def test_what_the_child_prints_is_passed_on_and_kept() -> None:
    output = io.StringIO()
    script = (
        "import sys; sys.stdin.readline()\n"
        "for n in range(70): print('line', n, flush=True)\n"
        "sys.stderr.write('half a li'); sys.stderr.flush(); sys.stderr.write('ne\\nno newline')\n"
        "sys.stderr.flush(); sys.exit(78)"
    )
    async with started(
        make_worker(command=[sys.executable, "-c", script], output=output)
    ) as worker:
        await reach(worker, WorkerState.FAILED)
    lines = output.getvalue().splitlines()
    assert [line for line in lines if line.startswith("line")] == [f"line {n}" for n in range(70)]
    assert "half a line" in lines
    assert lines[-1] == "no newline"
    assert len(worker.last_lines) == 50
    assert worker.last_lines[-1] == "no newline"


async def test_the_child_gets_its_configuration_as_one_line() -> None:
    output = io.StringIO()
    script = "import sys; print(sys.stdin.readline()); sys.exit(78)"
    async with started(
        make_worker("some/model", command=[sys.executable, "-c", script], output=output)
    ) as worker:
        await reach(worker, WorkerState.FAILED)
    told = json.loads(output.getvalue().splitlines()[0])
    assert told["endpoint"] == worker.endpoint
    assert (told["worker_id"], told["model"]) == ("local", "some/model")


async def test_a_configuration_error_is_final_and_names_its_reason() -> None:
    async with started(make_worker("unreadable")) as worker:
        with pytest.raises(
            WorkerNotReadyError, match="worker local: failed: model 'unreadable': no such file"
        ):
            await worker.wait_ready(20)
        pid = worker.pid
        outputs = await collect(worker.submit(make_request("r")), timeout_s=1)
        assert outputs[0].error is not None
        assert outputs[0].error.message == "worker local: model 'unreadable': no such file"
        await asyncio.sleep(0.3)  # six times the first delay
        assert worker.pid == pid
    assert worker.state is WorkerState.FAILED


async def test_a_command_that_does_not_exist_is_final() -> None:
    async with started(make_worker(command=["/no/such/program"])) as worker:
        with pytest.raises(WorkerNotReadyError, match="cannot start /no/such/program: No such"):
            await worker.wait_ready(5)


async def test_a_child_that_dies_at_work_is_reported_and_replaced() -> None:
    changes: list[StateChange] = []
    worker = make_worker()
    worker.add_state_listener(changes.append)
    async with started(worker):
        await worker.wait_ready(20)
        first_pid = worker.pid
        outputs = await collect(worker.submit(make_request("r", first=EXIT_TOKEN, max_tokens=9)))
        assert outputs[-1].error is not None
        assert outputs[-1].error.code is ErrorCode.WORKER_LOST
        await reach(worker, WorkerState.READY, timeout_s=20)
        assert worker.pid != first_pid
        again = await collect(worker.submit(make_request("r", first=30, max_tokens=2)))
        assert tokens_of(again) == [30, 31]
    reports = [change.detail for change in changes if change.state is WorkerState.LOST]
    assert (
        "the worker process ended with status 3: scripted worker: told to exit; "
        "it is started again in 0.05 s"
    ) in reports


async def test_a_signal_is_named() -> None:
    details: list[str] = []
    worker = make_worker()
    worker.add_state_listener(lambda change: details.append(change.detail))
    async with started(worker):
        await worker.wait_ready(20)
        send_signal(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while not any("was ended by SIGKILL" in detail for detail in details):
                await asyncio.sleep(0.01)


async def test_restarts_back_off_to_a_limit() -> None:
    delays: list[str] = []
    script = "import sys; sys.stdin.readline(); sys.exit('no memory')"
    restart = RestartPolicy(initial_s=0.02, max_s=0.08)
    worker = make_worker(command=[sys.executable, "-c", script], restart=restart)
    worker.add_state_listener(
        lambda change: delays.append(change.detail) if change.state is WorkerState.LOST else None
    )
    async with started(worker):
        async with asyncio.timeout(20):
            while len(delays) < 5:
                await asyncio.sleep(0.01)
    assert delays[:5] == [
        f"the worker process ended with status 1: no memory; it is started again in {delay} s"
        for delay in ("0.02", "0.04", "0.08", "0.08", "0.08")
    ]


async def test_health_resets_the_delay() -> None:
    delays: list[str] = []
    restart = RestartPolicy(initial_s=0.02, max_s=10.0, healthy_s=0.0)
    worker = make_worker(restart=restart)
    worker.add_state_listener(lambda change: delays.append(change.detail))
    async with started(worker):
        for _ in range(2):
            await reach(worker, WorkerState.READY, timeout_s=20)
            send_signal(worker.pid, signal.SIGKILL)
            await reach(worker, WorkerState.CONNECTING, timeout_s=20)
    assert sum(detail.endswith("again in 0.02 s") for detail in delays) == 2


async def test_close_during_the_delay_is_prompt() -> None:
    restart = RestartPolicy(initial_s=60.0)
    script = "import sys; sys.exit(1)"
    worker = make_worker(command=[sys.executable, "-c", script], restart=restart)
    await worker.start()
    await reach(worker, WorkerState.LOST)
    started_at = time.monotonic()
    await worker.close()
    assert time.monotonic() - started_at < 1.0


async def test_close_ends_the_child_with_sigterm() -> None:
    async with started(make_worker()) as worker:
        await worker.wait_ready(20)
        pid = worker.pid
    assert pid is not None
    assert not is_alive(pid)
    assert worker.state is WorkerState.LOST


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    command = scripted_command("--ignore-sigterm")
    worker = make_worker(command=command, stop_timeout_s=0.3)
    await worker.start()
    await worker.wait_ready(20)
    pid = worker.pid
    assert pid is not None
    started_at = time.monotonic()
    await worker.close()
    assert 0.3 <= time.monotonic() - started_at < 2.0
    assert not is_alive(pid)


PARENT = """
import asyncio, sys
from model_worker.protocol import WorkerConfig
from service.workers.local import LocalWorker
from tests.scripted_worker import scripted_command

async def main():
    worker = LocalWorker(
        WorkerConfig(endpoint="ipc://" + sys.argv[1] + "/link", worker_id="w"),
        command=scripted_command(),
    )
    await worker.start()
    await worker.wait_ready(20)
    print(worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_child_ends_when_its_parent_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    give_up_at = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert not is_alive(child)
