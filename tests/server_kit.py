"""`headstart serve` as an operator starts it: a child process with a real worker and engine.

Owns the process's life and what it prints. A start costs seconds, so whoever can share a server
takes a fixture of tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from tests.target import Target, target_at

ROOT = Path(__file__).resolve().parent.parent
READY_S = 180.0  # a start takes some seconds; a busy machine may take far longer
STOP_S = 60.0


def start_command(*arguments: str) -> subprocess.Popen[str]:
    """`headstart` with these arguments; both of its outputs are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("HEADSTART_")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class RealServer:
    """Ready once constructed by :func:`real_server`; ``url`` is then where it answers."""

    def __init__(self, *arguments: str) -> None:
        self.process = start_command("serve", "--port", "0", *arguments)
        self.url = ""
        self._stdout: list[str] = []
        self._stderr: list[str] = []
        self._has_url = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._stdout)),
            threading.Thread(target=self._read, args=(self.process.stderr, self._stderr)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                lines.append(line.rstrip("\n"))
                if found := re.search(r"API +(http://\S+)/v1", line):
                    self.url = found[1]
                    self._has_url.set()

    @property
    def stderr(self) -> str:
        """What it and its worker have printed there so far."""
        return "\n".join(self._stderr)

    @property
    def stdout(self) -> str:
        return "\n".join(self._stdout)

    @property
    def worker_pid(self) -> int:
        (worker,) = [
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if "model_worker" in child.cmdline()
        ]
        return worker

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._has_url.wait(0.05):
            assert self.process.poll() is None, f"the server ended early:\n{self.stderr}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.stderr}"
        assert self.health().status_code == 200

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=10.0)

    def wait_health(self, status: int, timeout_s: float = READY_S) -> httpx.Response:
        deadline = time.monotonic() + timeout_s
        while (response := self.health()).status_code != status:
            assert time.monotonic() < deadline, f"{response.text}\n{self.stderr}"
            time.sleep(0.05)
        return response

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        """The exit code; everything printed has been read."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(STOP_S)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait_end(10.0)
        if self.process.poll() is None:
            self.process.kill()
        self.wait_end()


@contextlib.contextmanager
def real_server(*arguments: str) -> Iterator[RealServer]:
    server = RealServer(*arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def real_target(model: str, *arguments: str) -> Iterator[Target]:
    """The clients of a server of its own; ``model`` is the name it serves."""
    with real_server(*arguments) as server, target_at(server.url, model) as target:
        yield target


class Stream:
    """A streamed answer that is read bit by bit, or left."""

    def __init__(
        self, url: str, model: str, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        body = {"model": model, "stream": True, "temperature": 0, "ignore_eos": True, **fields}
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        self._stack = contextlib.ExitStack()
        response = httpx.stream(
            "POST", f"{url}{path}", json=body, headers=headers, timeout=120.0, verify=False
        )
        self.response = self._stack.enter_context(response)
        self._lines = self.response.iter_lines()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def events(self, count: int | None = None) -> list[Any]:
        """The next ``count`` events, or all that are left."""
        events: list[Any] = []
        while len(events) != count and (line := next(self._lines, None)) is not None:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
        return events
