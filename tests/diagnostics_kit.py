"""Requests that are asked one after the other and explained at once, with no server about them.

What is cached is made up as a cache would have it: the longest common prefix with what was served
in the same namespace, unless a test says what else was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import EvictedPrefix, RequestOutput
from service.diagnostics.analyst import Analyst
from service.diagnostics.explanation import Explanation
from service.diagnostics.trace import PromptSource, RequestTrace, TracedPrompt
from service.routes.chat import conversation_of
from service.schemas.chat import chat_request
from service.tokenizer import ModelTokenizer
from tests.gateway_kit import BLOCK_SIZE, make_tokenizer

__all__ = ["Asker", "first_difference", "lines", "said", "system", "tool", "user"]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(
    name: str, description: str = "what it does is told here at some length"
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def lines(seed: int, count: int = 12) -> str:
    """Text that no other seed has any part of, of about 30 tokens a line."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("bcdfghjklmnpqrstvwxz"))
    return "\n".join("".join(rng.choice(letters, 30)) for _ in range(count))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


class Asker:
    """``ids`` are the prompts so far."""

    def __init__(self, tokenizer: ModelTokenizer | None = None) -> None:
        self.tokenizer = make_tokenizer() if tokenizer is None else tokenizer
        self.analyst = Analyst(lambda: self.tokenizer)
        self.traces: list[RequestTrace] = []
        self.now = 0.0

    @property
    def ids(self) -> list[list[int]]:
        return [trace.prompt.token_ids.tolist() for trace in self.traces]

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        answer: str = "",
        variables: dict[str, Any] | None = None,
        **options: Any,
    ) -> Explanation:
        fields: dict[str, Any] = {"model": "m", "messages": list(messages)}
        if tools:
            fields["tools"] = list(tools)
        if variables:
            fields["chat_template_kwargs"] = variables
        conversation = conversation_of(chat_request(fields), is_canonical=False)
        text = self.tokenizer.chat_template.apply(conversation)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.ask_ids(ids, answer, source=PromptSource(conversation), **options)

    def complete(self, text: str, **options: Any) -> Explanation:
        return self.ask_ids(self.tokenizer.encode(text, add_special_tokens=False), **options)

    def ask_ids(
        self,
        ids: NDArray[np.int32],
        answer: str = "",
        *,
        cached: int | None = None,
        evicted: EvictedPrefix | None = None,
        worker: tuple[str, int] = ("w", 1),
        **prompt: Any,
    ) -> Explanation:
        fields = {"tenant": "acme", "fingerprint": "f", "block_size": BLOCK_SIZE} | prompt
        request_id = f"r{len(self.traces)}"
        traced = TracedPrompt(
            request_id=request_id, model="m", num_tokens=len(ids), token_ids=ids, **fields
        )
        self.now += 10.0
        trace = RequestTrace(traced, self.now, lambda: self.now, 1000.0 + self.now)
        trace.number = len(self.traces) + 1
        found = self._found(trace) if cached is None else cached
        trace.sent(*worker)
        output = RequestOutput(request_id=request_id, num_cached_tokens=found, evicted=evicted)
        trace.admitted(output, 0.0)
        trace.token(0.1)
        answered = self.tokenizer.encode(answer, add_special_tokens=False) if answer else ()
        trace.ended("stop", 0.1, list(answered))
        self.traces.append(trace)
        self.analyst.advance(self.traces)
        return self.analyst.explanations[trace.number]

    def _found(self, trace: RequestTrace) -> int:
        def namespace(each: RequestTrace) -> tuple[str, str, str]:
            return each.prompt.tenant, each.prompt.fingerprint, each.prompt.cache_salt

        ids = trace.prompt.token_ids[:-1].tolist()
        return max(
            (
                first_difference(ids, earlier.served_ids.tolist())
                for earlier in self.traces
                if namespace(earlier) == namespace(trace)
            ),
            default=0,
        )
