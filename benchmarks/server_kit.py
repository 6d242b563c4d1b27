"""A real `headstart serve` in a child process, and a client that measures it.

Owns the child and ends it by its id. Serves on loopback only.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType

import httpx

READY_TIMEOUT_S = 180.0


class Server:
    """``with Server("--cache", "none") as server``: ready inside the block, stopped after it."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "service.cli", "serve", "--model", "demo"]
        self._command = [*command, "--port", str(port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        give_up = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError("the server is not ready in time")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)


@dataclass(frozen=True)
class ChatTiming:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def chat_ttft(client: httpx.Client, server: Server, system: str, question: str) -> ChatTiming:
    """One streamed chat of a few tokens; ends with its usage chunk."""
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ],
        "max_tokens": 3,
        "temperature": 0,
        # A token without text would only show with the next one: forbid the special ones.
        "logit_bias": {str(token_id): -100 for token_id in range(17)},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first: float | None = None
    usage = None
    with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            choices = chunk["choices"]
            if first is None and choices and choices[0]["delta"].get("content"):
                first = time.perf_counter() - started
            usage = chunk.get("usage") or usage
    assert first is not None
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ChatTiming(first, usage["prompt_tokens"], cached)
