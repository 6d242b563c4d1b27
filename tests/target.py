"""A server to be asked, whichever it is, and how its answers are read.

Owns the clients and the reading of bodies, streams and metrics. Knows nothing of how a server is
started.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.http_kit import metric


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    http: httpx.Client
    openai: openai.OpenAI

    def chat(self, content: Any = "Count to twenty.", **fields: Any) -> httpx.Response:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        options = {"max_tokens": 8, "temperature": 0}
        return self.http.post("/v1/chat/completions", json={**body, **options, **fields})

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return self.http.post("/v1/completions", json={**body, **fields})

    @property
    def max_model_len(self) -> int:
        entry: dict[str, Any] = self.http.get(f"/v1/models/{self.model}").json()
        return int(entry["max_model_len"])


@contextlib.contextmanager
def target_at(url: str, model: str) -> Iterator[Target]:
    with (
        httpx.Client(base_url=url, timeout=120.0, verify=False) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official,
    ):
        yield Target(url, model, http, official)


def assert_error(response: httpx.Response, *statuses: int, param: str | None = None) -> Any:
    assert response.status_code in statuses, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in response.text
    if param is not None:
        assert error["param"] == param
    return error


def text_of(body: Any) -> str:
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed(events: list[Any], index: int = 0) -> str:
    """The joined text of one choice."""
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in mine
    )


def wait_until_idle(target: Target, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    names = ("num_requests_running", "num_requests_waiting", "requests_in_flight",
             "requests_queued")  # fmt: skip
    while any(metric(target.http, name) for name in names):
        assert time.monotonic() < deadline, {name: metric(target.http, name) for name in names}
        time.sleep(0.02)
    assert metric(target.http, "kv_cache_blocks", state="locked") == 0


def cached_tokens(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])
