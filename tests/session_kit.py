"""A gateway whose fake worker answers in tokens of our choice, and what it was sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from model_worker.protocol import AddRequest, PrefixAction, PrefixCommand
from tests import http_kit
from tests.gateway_kit import MODEL_NAME, byte_ids_of, make_tokenizer

TURN_END = 3  # <|im_end|> of the tiny tokenizer


def ids_in(content: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(content, dtype="<i4").tolist()
    return ids


@dataclass
class Talk:
    """A server and all that its worker was asked. Answers are the given texts, one token a byte
    (other tokens than encoding them gives) and the end of the turn."""

    served: http_kit.Served = field(init=False)
    client: httpx.Client = field(init=False)
    answers: list[str] = field(default_factory=list)
    requests: list[AddRequest] = field(default_factory=list)

    def script(self, request: AddRequest) -> Iterable[int]:
        self.requests.append(request)
        said = self.answers.pop(0) if self.answers else "fine"
        return (*byte_ids_of(said), TURN_END)

    @property
    def prompts(self) -> list[list[int]]:
        return [ids_in(request.prompt_token_ids) for request in self.requests]

    def commands(self, action: PrefixAction) -> list[PrefixCommand]:
        return [item for item in self.served.worker.prefix_commands if item.action is action]

    def chat(
        self, messages: Sequence[dict[str, Any]], session: str | None = "s", **fields: Any
    ) -> httpx.Response:
        headers = {} if session is None else {"X-Session-ID": session}
        headers |= fields.pop("headers", {})
        body = {"model": MODEL_NAME, "messages": list(messages), **fields}
        return self.client.post("/v1/chat/completions", json=body, headers=headers)

    def text_of(self, number: int) -> str:
        return make_tokenizer().decode_exactly(self.prompts[number])


@contextlib.contextmanager
def talking(*answers: str, **options: Any) -> Iterator[Talk]:
    talk = Talk(answers=list(answers))
    script = options.pop("script", talk.script)
    with http_kit.serving(script, **options) as served, served.client() as client:
        talk.served, talk.client = served, client
        yield talk


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def wait_for(condition: Callable[[], Any], seconds: float = 10.0, pause_s: float = 0.01) -> None:
    """``pause_s``: longer where asking costs time that what is waited for needs itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause_s)
