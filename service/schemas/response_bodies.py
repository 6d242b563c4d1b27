"""The bodies of OpenAI's responses and of the events of their streams.

Owns the shapes of https://platform.openai.com/docs/api-reference/responses and
.../responses-streaming. Knows nothing of how a response came about.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from service.schemas.bodies import CachedTokens, TokenLogprob
from service.schemas.cache_explanation import CacheExplanation
from service.schemas.responses import FunctionTool, NamedFunction, TextConfig

__all__ = [
    "ArgumentsDelta",
    "ArgumentsDone",
    "ErrorEvent",
    "FunctionCall",
    "IncompleteDetails",
    "InputTokensDetails",
    "ItemEvent",
    "ItemList",
    "OutputItem",
    "OutputMessage",
    "OutputText",
    "OutputTokensDetails",
    "PartEvent",
    "PromptCacheDiagnostics",
    "Reasoning",
    "ResponseBody",
    "ResponseDeleted",
    "ResponseError",
    "ResponseEvent",
    "ResponseUsage",
    "StreamEvent",
    "TextDelta",
    "TextDone",
]


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class OutputMessage(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    status: str
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class FunctionCall(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | FunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """``cache_write_tokens`` were computed now, and are kept like the rest."""

    cached_tokens: int
    cache_write_tokens: int
    cached_tokens_by_tier: CachedTokens


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str = "max_output_tokens"


class Reasoning(msgspec.Struct, frozen=True):
    """There is none."""

    effort: None = None
    summary: None = None


class PromptCacheDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """``type`` is cache_miss, cache_hit, comparison_response_not_found or unavailable; the others
    are told of a miss. ``reason`` is model_changed, tools_changed or input_changed."""

    type: str
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """``created_at`` and ``completed_at`` are in seconds since 1970."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning = Reasoning()
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | NamedFunction
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    history: str | UnsetType = UNSET  # of a response that is stored, or goes on from one
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET  # where asked for
    cache_explanation: CacheExplanation | UnsetType = UNSET  # likewise


class ResponseDeleted(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    """A page of items, as JSON objects."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


# ---------------------------------------------------------------- events


class ResponseEvent(msgspec.Struct, frozen=True):
    """``type`` is response.created, in_progress, completed, incomplete or failed."""

    type: str
    sequence_number: int
    response: ResponseBody


class ItemEvent(msgspec.Struct, frozen=True):
    """``type`` is response.output_item.added or done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True):
    """``type`` is response.content_part.added or done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    part: OutputText
    content_index: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    logprobs: tuple[TokenLogprob, ...]
    content_index: int = 0
    type: str = "response.output_text.delta"


class TextDone(msgspec.Struct, frozen=True):
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    logprobs: tuple[TokenLogprob, ...]
    content_index: int = 0
    type: str = "response.output_text.done"


class ArgumentsDelta(msgspec.Struct, frozen=True):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    type: str = "response.function_call_arguments.delta"


class ArgumentsDone(msgspec.Struct, frozen=True):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"


class ErrorEvent(msgspec.Struct, frozen=True):
    sequence_number: int
    code: str | None
    message: str
    param: str | None
    type: str = "error"


StreamEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
