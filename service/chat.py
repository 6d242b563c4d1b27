"""The terminal chat: a conversation over the HTTP API, and what the cache saved in each turn.

Owns the loop of reading a line, streaming an answer and printing its figures. It is an ordinary
client: it knows the server by its address only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from service.config import ChatConfig

__all__ = ["ChatClient", "ChatError", "TurnStats", "run"]

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


class ChatError(Exception):
    """The server cannot be reached or refused; one line."""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """One answer in figures; times in seconds since the request was sent."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float | None  # None when no text came
    total_s: float
    num_host_tokens: int = 0  # of the cached ones
    num_disk_tokens: int = 0

    def line(self) -> str:
        parts = [f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached"]
        below = (("host memory", self.num_host_tokens), ("disk", self.num_disk_tokens))
        if tiers := ", ".join(f"{count} from {name}" for name, count in below if count):
            parts[0] += f" ({tiers})"
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
            decode_s = self.total_s - self.ttft_s
            if self.num_output_tokens > 1 and decode_s > 0:
                parts.append(f"{(self.num_output_tokens - 1) / decode_s:.1f} tokens/s")
        return " · ".join(parts)


class ChatClient:
    """Talks to one server. Raises ChatError for whatever goes wrong on the way."""

    def __init__(self, chat: ChatConfig, http: httpx.Client) -> None:
        self._url = f"{chat.url}/v1"
        self._http = http
        self._headers = {"Authorization": f"Bearer {chat.api_key}"} if chat.api_key else {}
        self.stats: TurnStats | None = None  # of the last answer that ended by itself

    def first_model(self) -> str:
        try:
            response = self._http.get(f"{self._url}/models", headers=self._headers)
            _raise_for_error(response)
            models = response.json()["data"]
        except httpx.HTTPError as error:
            raise ChatError(_unreachable(self._url, error)) from None
        except (ValueError, KeyError, TypeError):
            raise ChatError(f"{self._url} is not an OpenAI-compatible server") from None
        if not models:
            raise ChatError(f"{self._url} serves no model yet")
        return str(models[0]["id"])

    def answer(self, model: str, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The answer's text as it comes; ``stats`` are set once it is whole."""
        self.stats = None
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_at = time.perf_counter()
        first_at: float | None = None
        usage: dict[str, Any] = {}
        try:
            with self._http.stream(
                "POST", f"{self._url}/chat/completions", json=body, headers=self._headers
            ) as response:
                _raise_for_error(response)
                for chunk in _events(response):
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", ()):
                        text = choice["delta"].get("content")
                        if text:
                            first_at = first_at or time.perf_counter()
                            yield text
        except httpx.HTTPError as error:
            raise ChatError(_unreachable(self._url, error)) from None
        ended_at = time.perf_counter()
        details = usage.get("prompt_tokens_details") or {}
        tiers = details.get("cached_tokens_by_tier") or {}
        self.stats = TurnStats(
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_cached_tokens=details.get("cached_tokens", 0),
            num_output_tokens=usage.get("completion_tokens", 0),
            ttft_s=None if first_at is None else first_at - sent_at,
            total_s=ended_at - sent_at,
            num_host_tokens=tiers.get("host", 0),
            num_disk_tokens=tiers.get("disk", 0),
        )


def run(chat: ChatConfig) -> int:
    """Converse until the person leaves; returns the process's exit code."""
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    timeout = httpx.Timeout(10.0, read=None)  # a long prompt on a slow machine takes its time
    with httpx.Client(timeout=timeout) as http:
        client = ChatClient(chat, http)
        try:
            model = chat.model or client.first_model()
        except ChatError as error:
            errors.print(f"headstart: {escape(str(error))}")
            return 1
        console.print(f"[bold]{escape(model)}[/] at {escape(chat.url)}\n[dim]{_HELP}[/]")
        _converse(console, client, model)
    return 0


def _converse(console: Console, client: ChatClient, model: str) -> None:
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = console.input("\n[bold green]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
            console.print("[dim]forgotten[/]")
        elif line.startswith("/"):
            console.print(f"[dim]{_HELP}[/]")
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _print_answer(console, client, model, messages)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


def _print_answer(
    console: Console, client: ChatClient, model: str, messages: Sequence[dict[str, str]]
) -> str:
    """The text that was printed; empty when the turn should be forgotten."""
    parts: list[str] = []
    try:
        for text in client.answer(model, messages):
            parts.append(text)
            console.out(text, end="", highlight=False)
    except ChatError as error:
        console.print(f"\n[red]{escape(str(error))}[/]")
        return ""
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/]")
        return "".join(parts)
    if client.stats is not None:
        console.print(f"\n[dim]{client.stats.line()}[/]")
    return "".join(parts)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ChatError("the server sent an event that is not JSON") from None
        if "error" in event:
            raise ChatError(_error_message(event) or "the server ended the answer with an error")
        yield event


def _raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = _error_message(response.json())
    except ValueError:
        message = None
    raise ChatError(message or f"the server answered {response.status_code}")


def _error_message(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


def _unreachable(url: str, error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError):
        return f"nothing answers at {url}: is the server running?"
    return f"the connection to {url} broke: {type(error).__name__}"
