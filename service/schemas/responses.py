"""The bodies of answers, as structs that are encoded once per answer or chunk.

Owns OpenAI's shapes of completions, chunks, usage and models. Knows nothing of how text came about.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "Delta",
    "ModelEntry",
    "ModelList",
    "PromptTokensDetails",
    "Usage",
    "encode",
]

_encoder = msgspec.json.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    return _encoder.encode(body)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # always present, 0 included


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens),
        )


# ---------------------------------------------------------------- chat


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    stop_reason: str | int | None
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    system_fingerprint: str
    history: str | UnsetType = UNSET  # of a session's answers
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # in the last chunk
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    history: str | UnsetType = UNSET  # in the last chunks
    object: str = "chat.completion.chunk"


# ---------------------------------------------------------------- completions


class CompletionChoice(msgspec.Struct, frozen=True):
    """Of a whole answer and of a chunk alike."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    history: str | UnsetType = UNSET
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
