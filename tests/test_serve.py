"""`headstart serve` as a process: what it prints, how it ends, and what survives its worker."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from model_worker.protocol import EXIT_CONFIG, parse_log_line
from tests.event_kit import Subscriber
from tests.http_kit import events_of, metric
from tests.models import save_model
from tests.server_kit import READY_S, RealServer, Stream, real_server, start_command
from tests.speaker import TEXT, said, save_speaker
from tests.target import Target, streamed, target_at, text_of

MODEL = "speaker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaker(tmp_path_factory.mktemp(MODEL))


def arguments(folder: Path) -> list[str]:
    return [
        *("--model", str(folder), "--served-model-name", MODEL, "--num-threads", "1"),
        *("--model-cache-dir", str(folder.parent / "cache"), "--kv-cache-memory", "8MiB"),
    ]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    with real_server(*arguments(folder), "--events-endpoint", events_of_blocks(folder)) as running:
        yield running


def events_of_blocks(folder: Path) -> str:
    return f"ipc://{folder.parent}/events"


@pytest.fixture(scope="module")
def target(server: RealServer) -> Iterator[Target]:
    with target_at(server.url, MODEL) as found:
        yield found


def assert_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


# ---------------------------------------------------------------- while it runs


def test_a_start_prints_the_memory_bill_and_where_to_go(server: RealServer) -> None:
    for line in (
        "KV per token: 2 x 2 layers x 1 kv heads x 16 x 4 B (float32) = 256 B",
        "KV pool: 1,024 blocks of 32 tokens = 32,768 tokens, 8.00 MiB of ",
        "Room for 16 conversations of 2,048 tokens",
    ):
        assert line in server.stderr
    assert f"Headstart 0.1.0 serves {MODEL}" in server.stdout
    assert f"Try        curl {server.url}/v1/chat/completions" in server.stdout


def test_only_the_worker_loads_torch(server: RealServer, target: Target) -> None:
    assert target.chat(max_tokens=1).status_code == 200  # all that an answer needs is loaded
    mapped = {
        pid: Path(f"/proc/{pid}/maps").read_text()
        for pid in (server.process.pid, server.worker_pid)
    }
    assert "/torch/lib/" not in mapped[server.process.pid]
    assert "/torch/lib/" in mapped[server.worker_pid]


def test_its_worker_tells_others_of_its_blocks(target: Target, folder: Path) -> None:
    messages = [{"role": "user", "content": "hear " * 40}]
    assert target.chat(messages=messages, max_tokens=1).status_code == 200
    subscriber = Subscriber(events_of_blocks(folder), f"kv@local@{MODEL}")
    with contextlib.closing(subscriber):
        events = [event for _, batch in subscriber.replayed(0) for event in batch.events]
    assert any(getattr(event, "block_size", 0) == 32 for event in events)


@pytest.mark.parametrize("max_tokens", [*range(1, 21), 40])
def test_characters_cut_apart_by_tokens_come_whole(target: Target, max_tokens: int) -> None:
    plain = target.chat(max_tokens=max_tokens).json()
    fields = {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    response = target.chat(stream=True, **fields)
    for line in response.content.split(b"\n"):
        line.decode("utf-8")  # each line for itself
    *events, usage, done = events_of(response)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text_of(plain) == said(max_tokens)
    # Only the very end of an answer may be half a character.
    assert "\ufffd" not in "".join(pieces[:-2])
    details = usage["usage"]["prompt_tokens_details"]  # what is cached may differ
    assert usage["usage"] == {**plain["usage"], "prompt_tokens_details": details}
    assert done == "[DONE]"


@pytest.mark.parametrize("stop", ["猫 🦊", "🚀", "👩\u200d🚀 끝n", "끝"])
def test_a_stop_string_of_cut_characters_never_leaks(target: Target, stop: str) -> None:
    expected = (TEXT * 3)[: (TEXT * 3).index(stop)]
    fields = {"stop": [stop], "max_tokens": 60}
    assert text_of(target.chat(**fields).json()) == expected
    assert streamed(events_of(target.chat(stream=True, **fields))) == expected


def test_a_killed_worker_ends_its_streams_and_comes_back(
    server: RealServer, target: Target
) -> None:
    assert text_of(target.chat(max_tokens=5).json()) == said(5)
    generated = metric(target.http, "worker_generated_tokens_total")
    pid = server.worker_pid
    with Stream(server.url, MODEL, prompt="Speak.", max_tokens=1900) as stream:
        assert stream.response.status_code == 200
        stream.events(3)
        os.kill(pid, signal.SIGKILL)
        *events, error, done = stream.events()
    assert done == "[DONE]"
    assert error["error"]["type"] == "service_unavailable_error"
    assert error["error"]["code"] == "worker_lost"
    assert all("error" not in event for event in events)

    unready = server.wait_health(503, 10.0)
    reason = unready.json()["error"]["message"]
    assert "was ended by SIGKILL; it is started again in 0.5 s" in reason
    refused = target.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] in ("no_worker", "not_ready")

    server.wait_health(200)
    assert server.worker_pid != pid
    assert text_of(target.chat(max_tokens=9).json()) == said(9)
    assert metric(target.http, "worker_generated_tokens_total") >= generated
    assert metric(target.http, "num_requests_running") == 0
    assert "Traceback" not in server.stderr


def test_sigterm_lets_a_stream_finish(server: RealServer) -> None:
    """The last of the tests that share the server."""
    pid = server.worker_pid
    with Stream(server.url, MODEL, prompt="Speak.", max_tokens=1000) as stream:
        events = stream.events(3)
        server.signal(signal.SIGTERM)
        unready = server.wait_health(503, 10.0)
        assert "shutting down" in unready.json()["error"]["message"]
        events += stream.events()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert streamed(events) == said(1000)
    assert server.wait_end() == 0
    assert_gone(pid)
    assert "Traceback" not in server.stderr


def test_a_second_signal_ends_it_at_once(folder: Path) -> None:
    with real_server(*arguments(folder)) as server:
        pid = server.worker_pid
        with Stream(server.url, MODEL, prompt="Speak.", max_tokens=1900) as stream:
            stream.events(3)
            server.signal(signal.SIGTERM)
            server.wait_health(503, 10.0)
            started = time.monotonic()
            server.signal(signal.SIGINT)
            assert server.wait_end() == 130
            assert time.monotonic() - started < 5.0
            with contextlib.suppress(Exception):  # however the connection ends
                stream.events()
        assert_gone(pid)
        assert "Traceback" not in server.stderr


# ---------------------------------------------------------------- starts that cannot work


@dataclass(frozen=True)
class BadStart:
    """``reason`` begins the line that says what is wrong."""

    arguments: tuple[str, ...]
    reason: str


def test_starts_that_cannot_work_say_why_in_one_line(tmp_path: Path) -> None:
    good = save_model("llama", tmp_path / "good")
    broken = save_model("llama", tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    worker = ("worker", "--link-endpoint", f"ipc://{tmp_path}/link")  # as serve's, but alone
    starts = [
        BadStart(
            ("serve", "--port", "0", "--model", str(broken)),
            f"error: Cannot read the weights {weights}: ",
        ),
        BadStart(
            (*worker, "--model", str(good), "--kv-cache-memory", "1KiB"),
            "error: There is no memory for one KV block: 1.00 KiB are available and a block of "
            "32 tokens takes 24.00 KiB; raise --kv-cache-memory",
        ),
    ]
    common = ("--model-cache-dir", str(tmp_path / "cache"), "--num-threads", "1")
    processes = [start_command(*start.arguments, *common) for start in starts]
    for start, process in zip(starts, processes, strict=True):
        out, err = process.communicate(timeout=READY_S)
        assert process.returncode == EXIT_CONFIG, err
        assert out == ""
        reasons = [line for line in err.splitlines() if not parse_log_line(line).is_progress]
        assert len(reasons) == 1, err
        assert reasons[0].startswith(start.reason), err
