"""What a worker says of one request: its tokens, their scores, and how it ended.

Owns these messages. They travel in the frames of :mod:`model_worker.protocol`, which exports them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = [
    "ErrorCode",
    "EvictedPrefix",
    "FinishReason",
    "RequestError",
    "RequestOutput",
    "TokenLogprobs",
]


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or one of stop_token_ids
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the gateway asked for it
    ERROR = "error"  # RequestOutput.error says why


class ErrorCode(StrEnum):
    """Why a request ended without an answer."""

    INVALID_REQUEST = "invalid_request"  # a parameter the worker cannot accept
    CONTEXT_LENGTH = "context_length_exceeded"  # longer than max_model_len
    NEVER_FITS = "never_fits"  # larger than the whole KV pool
    OVERLOADED = "overloaded"  # the worker's waiting queue is full
    SHUTTING_DOWN = "shutting_down"
    WORKER_LOST = "worker_lost"  # the process died or the link broke
    INTERNAL = "internal_error"


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    code: ErrorCode
    message: str  # one sentence for the client; never a traceback, never prompt text
    param: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model held one token, and the likeliest ones in its place.

    Natural logarithms of the probabilities that the model's logits give, before penalties, bias,
    temperature, filters and grammar; finite, at least -9999. ``rank`` 1 is the likeliest token.
    ``top_ids`` are as many as were asked for, the likeliest first, ``top_logprobs`` theirs.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class EvictedPrefix(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``num_tokens`` of the prompt, right behind the cached ones, were stored once, in whole blocks
    of which the first left ``tier`` ``ago_s`` seconds ago. The words are those of
    cache_store.ghosts; a later version may have more."""

    num_tokens: int
    ago_s: float
    tier: str
    cause: str


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step did for one request. The last one of a request has a finish_reason.

    ``token_ids`` include the token that ended the request, end-of-sequence or another stop token,
    which ``stop_token_id`` then names: it counts as generated and is not part of the text.

    ``num_cached_tokens`` is set exactly once, at the request's first admission (a message without
    tokens, or the first with them). Times are seconds of the worker's clock.

    ``logprobs`` has one entry per token of ``token_ids``, if the request asked for them. So has
    ``prompt_logprobs`` per token of the prompt, in its order, over one output or several; the first
    token's entry is None, since nothing precedes it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: RequestError | None = None
    queue_s: float | None = None  # arrival to first admission; with num_cached_tokens
    prefill_s: float | None = None  # first step to first token; with the first token
    num_host_tokens: int = 0  # of the cached tokens, those promoted; with num_cached_tokens
    num_disk_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    evicted: EvictedPrefix | None = None  # with num_cached_tokens; since 1.3
    load_s: float | None = None  # wait for blocks of lower tiers, between the two; with queue_s
