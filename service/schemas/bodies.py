"""The bodies of answers, as structs that are encoded once per answer or chunk.

Owns OpenAI's shapes of completions, chunks, usage and models. Knows nothing of how text came about.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from service.schemas.cache_explanation import CacheExplanation

__all__ = [
    "CachedTokens",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "FunctionCall",
    "FunctionCallDelta",
    "ModelEntry",
    "ModelList",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
    "encode",
]

_encoder = msgspec.json.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that came out of the cache, by the tier where they were found."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def num_tokens(self) -> int:
        return self.device + self.host + self.disk


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # always present, 0 included
    cached_tokens_by_tier: CachedTokens


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached: CachedTokens) -> Usage:
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached.num_tokens, cached),
        )


# ---------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """``content`` is null where there are tool calls and no text beside them."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    decoded_token: str


PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]
"""As vLLM has them: for each token of the prompt the candidates by id; null for the first."""


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    system_fingerprint: str
    history: str | UnsetType = UNSET  # of a session's answers
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    cache_explanation: CacheExplanation | UnsetType = UNSET  # where it was asked for
    object: str = "chat.completion"


class FunctionCallDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # in the last chunk
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    history: str | UnsetType = UNSET  # in the last chunks
    cache_explanation: CacheExplanation | UnsetType = UNSET
    object: str = "chat.completion.chunk"


# ---------------------------------------------------------------- completions


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """``text_offset`` is where each token's text begins in the choice's, in characters."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True):
    """Of a whole answer and of a chunk alike."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    history: str | UnsetType = UNSET
    cache_explanation: CacheExplanation | UnsetType = UNSET
    object: str = "text_completion"


# ---------------------------------------------------------------- models


class ModelEntry(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "headstart"


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelEntry, ...]
    object: str = "list"
