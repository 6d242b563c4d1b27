"""One client for all servers: streamed text completions, and when their tokens came.

Owns the request's form and the clock. Knows of a server its URL and the few fields that it wants
beside OpenAI's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are of ``time.perf_counter``; ``cached_tokens`` is None where a server does not say."""

    started_s: float
    first_s: float  # the first text that the client saw
    last_s: float  # the last
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    text: str

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.started_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second of waiting for them."""
        return (self.completion_tokens - 1) / (self.last_s - self.first_s)


class CompletionClient:
    """``async with CompletionClient(url, "demo", fields) as client: await client.complete(...)``.

    ``fields`` go into each request's body; a value that is a callable is given the number of
    tokens asked for. Without ``has_usage_option`` a server is trusted to send usage unasked.
    """

    def __init__(
        self, url: str, model: str, fields: Mapping[str, Any], has_usage_option: bool = True
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._fields = fields
        self._has_usage_option = has_usage_option
        # A connection each: some servers close idle ones just when the next request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, limits=limits, trust_env=False)

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self._has_usage_option:
            body["stream_options"] = {"include_usage": True}
        for name, value in self._fields.items():
            body[name] = value(max_tokens) if callable(value) else value
        return body

    async def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Greedy, ``max_tokens`` long where the server can go past an end-of-sequence token.

        Raises httpx.HTTPError, and RuntimeError for a stream that has no text or no usage.
        """
        body = self.body(prompt, max_tokens)
        first = last = None
        text = ""
        usage: dict[str, Any] | None = None
        started = time.perf_counter()
        async with self._http.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise RuntimeError(
                    f"{response.status_code} from {self._url}: {response.text[:200]}"
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"an error in the stream of {self._url}")
                piece = "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
                if piece:
                    last = time.perf_counter()
                    first = first or last
                    text += piece
                usage = chunk.get("usage") or usage
        if first is None or last is None or usage is None:
            raise RuntimeError(f"no text or no usage in the stream of {self._url}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            started,
            first,
            last,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            details.get("cached_tokens"),
            text,
        )
