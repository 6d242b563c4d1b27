"""A gateway process's life: ready, signalled, drained or ended at once."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import httpx
import msgspec
import pytest

from service import run
from service.config import ConfigError
from tests import gateway_kit

ROOT = Path(__file__).resolve().parent.parent

# The real process with a worker that needs no model: {interval} seconds a token. The card comes in
# a file, since making one takes libraries that a gateway does without.
PROCESS = """
import asyncio, pathlib, sys
import msgspec
from model_worker.protocol import ModelCard
from service.config import GatewayConfig
from service.run import GatewayProcess, listen
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry

async def main():
    card = msgspec.msgpack.decode(pathlib.Path({card!r}).read_bytes(), type=ModelCard)
    worker = FakeWorker(card, lambda request: {ids} * 100, {interval})
    config = GatewayConfig(port=0, drain_timeout={drain})
    return await GatewayProcess(
        config, WorkerRegistry([worker]), listen(config.host, config.port)
    ).run()

sys.exit(asyncio.run(main()))
"""


@pytest.fixture(scope="module")
def card_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("card") / "card"
    file.write_bytes(msgspec.msgpack.encode(gateway_kit.make_card()))
    return file


class Process:
    """A gateway process and the lines it prints."""

    def __init__(self, card_file: Path, interval: float, drain: float) -> None:
        ids = gateway_kit.ids_of("one two three four five")
        code = PROCESS.format(card=str(card_file), ids=ids, interval=interval, drain=drain)
        self._lines: Queue[str] = Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.wait_for(r"API +(http://\S+)/v1")[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def wait_for(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout
        seen = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                seen += (line := self._lines.get(timeout=0.1))
                if match := re.search(pattern, line):
                    return match
        raise AssertionError(f"{pattern!r} did not come: {seen}")

    def stream(self, max_tokens: int) -> Iterator[str]:
        """The lines of a streamed answer."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}],
                "stream": True, "max_tokens": max_tokens}  # fmt: skip
        url = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200
            yield from (line for line in response.iter_lines() if line.startswith("data:"))

    def end(self, timeout: float = 60.0) -> int:
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(card_file: Path, interval: float = 0.01, drain: float = 30.0) -> Iterator[Process]:
    process = Process(card_file, interval, drain)
    try:
        yield process
    finally:
        process.close()


def test_a_signal_lets_running_requests_finish(card_file: Path) -> None:
    with running(card_file, interval=0.02) as process:
        stream = process.stream(max_tokens=100)
        lines = [next(stream), next(stream)]
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("stopping: running requests .* num_requests=1 seconds=30")
        refused = httpx.get(f"{process.url}/health", timeout=10)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        lines += list(stream)
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2].replace(" ", "")
        assert process.end() == 0


def test_the_drain_is_bounded_and_says_so_to_the_client(card_file: Path) -> None:
    with running(card_file, interval=0.2, drain=0.5) as process:
        stream = process.stream(max_tokens=200)
        next(stream)
        next(stream)
        process.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert any('"error"' in line for line in rest)
        assert not any('"finish_reason":"length"' in line.replace(" ", "") for line in rest)
        assert process.end(20) == 0


def test_a_second_signal_ends_it_at_once(card_file: Path) -> None:
    with running(card_file, interval=0.2) as process:
        stream = process.stream(max_tokens=200)
        next(stream)
        next(stream)
        process.process.send_signal(signal.SIGINT)
        process.wait_for("stopping: running requests .* num_requests=1 ")
        started_at = time.monotonic()
        process.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.HTTPError):
            list(stream)
        assert process.end(20) == 130
        assert time.monotonic() - started_at < 15  # not the 30 s of a drain


def test_the_curl_line_works_and_an_idle_process_ends_quickly(
    card_file: Path, tmp_path: Path
) -> None:
    with running(card_file, interval=0.0) as process:
        line = process.wait_for(r"Try +(curl .*)")[1]
        script = tmp_path / "try.sh"
        script.write_text(f"exec {line} --silent --max-time 30\n")
        result = subprocess.run(
            ["sh", str(script)], capture_output=True, text=True, timeout=60, check=True
        )
        assert '"cached_tokens"' in result.stdout
        started_at = time.monotonic()
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 0  # idle: nothing to wait for
        assert time.monotonic() - started_at < 15  # not the 30 s of a drain


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_the_address_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert run.client_url(host, 80) == url


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--host no\.such\.host\.invalid: there is no such"):
        run.listen("no.such.host.invalid", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--port {port}: another program already"):
            run.listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"^cannot listen on 192\.0\.2\.1 port 0: "):
        run.listen("192.0.2.1", 0)
