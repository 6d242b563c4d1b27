"""Answers of /v1/responses: a ``response``, and the events that build one.

Owns which event says what, and the ids of the items. The shapes are OpenAI's:
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from service.answer_text import ScoredToken
from service.deltas import Delta, TextDelta
from service.errors import GatewayError
from service.logprobs import chat_logprobs
from service.schemas import bodies
from service.schemas import response_bodies as written
from service.schemas.bodies import TokenLogprob, Usage
from service.schemas.responses import ResponsesRequest
from service.shapes.base import AnswerIdentity, CallSoFar, Choice
from service.sse import ServerEvent
from service.vocabulary import Vocabulary

__all__ = ["ResponsesShape"]

_IN_PROGRESS = "in_progress"


class ResponsesShape:
    """``is_stored`` says whether the response can be asked for later; whoever learns that it cannot
    sets it to False."""

    def __init__(
        self,
        identity: AnswerIdentity,
        asked: ResponsesRequest,
        vocabulary: Vocabulary,
        *,
        is_stored: bool,
        diagnostics: written.PromptCacheDiagnostics | UnsetType = UNSET,
    ) -> None:
        self._diagnostics = diagnostics
        self._identity = identity
        self._asked = asked
        self._vocabulary = vocabulary
        self.is_stored = is_stored
        self._hex = identity.id.partition("-")[2]
        self._num_events = 0
        self._num_items = 0
        self._message: _OpenMessage | None = None
        self._call: CallSoFar | None = None

    # ------------------------------------------------------------ a stream

    def opening(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        body = self._body(_IN_PROGRESS)
        return (
            self._told(written.ResponseEvent("response.created", self._next(), body)),
            self._told(written.ResponseEvent("response.in_progress", self._next(), body)),
        )

    def delta(
        self, index: int, delta: Delta, choice: Choice, usage: Usage
    ) -> Sequence[ServerEvent]:
        if isinstance(delta, TextDelta):
            return tuple(self._more_text(delta))
        return tuple(self._more_call(delta.call_id, delta.name, delta.arguments))

    def ending(self, index: int, choice: Choice, usage: Usage) -> Sequence[ServerEvent]:
        events: list[ServerEvent] = []
        if not self._num_items and choice.finish_reason == "stop":
            events += self._open_message()  # an answer that says nothing is one
        return (*events, *self._close(_item_status(choice)))

    def closing(self, choices: Sequence[Choice], usage: Usage) -> Sequence[ServerEvent]:
        body = self.finished(choices, usage)
        return (self._told(written.ResponseEvent(f"response.{body.status}", self._next(), body)),)

    def failure(self, error: GatewayError) -> Sequence[ServerEvent]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = msgspec.structs.replace(
            self._body("failed"), error=written.ResponseError(code, error.message), store=False
        )
        return (
            self._told(
                written.ErrorEvent(self._next(), error.code or code, error.message, error.param)
            ),
            self._told(written.ResponseEvent("response.failed", self._next(), body)),
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return bodies.encode(self.finished(choices, usage))

    def finished(self, choices: Sequence[Choice], usage: Usage) -> written.ResponseBody:
        """The response at its end."""
        (choice,) = choices
        is_cut = choice.finish_reason == "length"
        cached = usage.prompt_tokens_details
        return msgspec.structs.replace(
            self._body("incomplete" if is_cut else "completed"),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=written.IncompleteDetails() if is_cut else None,
            output=tuple(self._output(choice)),
            usage=written.ResponseUsage(
                usage.prompt_tokens,
                written.InputTokensDetails(
                    cached.cached_tokens,
                    usage.prompt_tokens - cached.cached_tokens,
                    cached.cached_tokens_by_tier,
                ),
                usage.completion_tokens,
                usage.total_tokens,
            ),
            cache_explanation=self._identity.notes.cache_explanation,
        )

    # ------------------------------------------------------------ items

    def _output(self, choice: Choice) -> Iterator[written.OutputItem]:
        parts = choice.parts()
        if not parts and choice.finish_reason == "stop":
            parts = [""]
        scores: Sequence[ScoredToken] = choice.scores
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            status = _item_status(choice) if is_last else "completed"
            if isinstance(part, str):
                text = written.OutputText(part, logprobs=self._logprobs(scores))
                scores = ()  # all are told of with the first text
                yield written.OutputMessage(self._item_id("msg", number), status, (text,))
            else:
                yield self._function_call(part, number, status)

    def _function_call(self, call: CallSoFar, number: int, status: str) -> written.FunctionCall:
        return written.FunctionCall(
            self._item_id("fc", number), status, call.call_id, call.name, call.arguments
        )

    def _more_text(self, delta: TextDelta) -> Iterator[ServerEvent]:
        logprobs = self._logprobs(delta.scores)
        if self._message is None:
            if not delta.text:
                return
            yield from self._close("completed")
            yield from self._open_message()
        message = self._message
        assert message is not None
        message.pieces.append(delta.text)
        message.logprobs += logprobs
        if delta.text or logprobs:
            yield self._told(
                written.TextDelta(
                    self._next(), message.item_id, message.number, delta.text, logprobs
                )
            )

    def _more_call(self, call_id: str, name: str, arguments: str) -> Iterator[ServerEvent]:
        if name:
            yield from self._close("completed")
            self._call = CallSoFar(call_id, name)
            item = self._function_call(self._call, self._num_items, _IN_PROGRESS)
            yield self._item_event("added", item)
            self._num_items += 1
        call, number = self._call, self._num_items - 1
        assert call is not None
        call.pieces.append(arguments)
        if arguments:
            item_id = self._item_id("fc", number)
            yield self._told(written.ArgumentsDelta(self._next(), item_id, number, arguments))

    def _open_message(self) -> Iterator[ServerEvent]:
        message = _OpenMessage(self._item_id("msg", self._num_items), self._num_items)
        yield self._item_event("added", written.OutputMessage(message.item_id, _IN_PROGRESS))
        yield self._part_event("added", message, written.OutputText(""))
        self._message = message
        self._num_items += 1

    def _close(self, status: str) -> Iterator[ServerEvent]:
        """End the item that is open, if one is."""
        message, call, number = self._message, self._call, self._num_items - 1
        self._message = self._call = None
        if message is not None:
            text, logprobs = "".join(message.pieces), tuple(message.logprobs)
            yield self._told(
                written.TextDone(self._next(), message.item_id, number, text, logprobs)
            )
            part = written.OutputText(text, logprobs=logprobs)
            yield self._part_event("done", message, part)
            item = written.OutputMessage(message.item_id, status, (part,))
            yield self._item_event("done", item, number)
        if call is not None:
            done = self._function_call(call, number, status)
            yield self._told(
                written.ArgumentsDone(self._next(), done.id, number, call.name, call.arguments)
            )
            yield self._item_event("done", done, number)

    # ------------------------------------------------------------ pieces

    def _body(self, status: str) -> written.ResponseBody:
        asked, me = self._asked, self._identity
        return written.ResponseBody(
            id=f"resp_{self._hex}",
            created_at=me.created,
            status=status,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata,
            model=me.model,
            parallel_tool_calls=asked.parallel_tool_calls,
            previous_response_id=asked.previous_response_id,
            prompt_cache_key=asked.prompt_cache_key,
            store=self.is_stored,
            temperature=asked.temperature,
            text=asked.text,
            tool_choice=asked.tool_choice,
            tools=asked.tools,
            top_logprobs=asked.top_logprobs,
            top_p=asked.top_p,
            history=me.history or UNSET,
            prompt_cache_diagnostics=self._diagnostics,
        )

    def _item_event(
        self, what: str, item: written.OutputItem, number: int | None = None
    ) -> ServerEvent:
        number = self._num_items if number is None else number
        kind = f"response.output_item.{what}"
        return self._told(written.ItemEvent(kind, self._next(), number, item))

    def _part_event(
        self, what: str, message: _OpenMessage, part: written.OutputText
    ) -> ServerEvent:
        kind = f"response.content_part.{what}"
        return self._told(
            written.PartEvent(kind, self._next(), message.item_id, message.number, part)
        )

    def _item_id(self, kind: str, number: int) -> str:
        return f"{kind}_{self._hex}_{number}"

    def _logprobs(self, scores: Sequence[ScoredToken]) -> tuple[TokenLogprob, ...]:
        if not self._asked.has_logprobs:
            return ()
        return chat_logprobs(scores, self._vocabulary).content

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _told(self, event: written.StreamEvent) -> ServerEvent:
        return ServerEvent(bodies.encode(event), event.type)


class _OpenMessage:
    """A message that is being said; ``number`` is its place in the output."""

    def __init__(self, item_id: str, number: int) -> None:
        self.item_id = item_id
        self.number = number
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []


def _item_status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"
