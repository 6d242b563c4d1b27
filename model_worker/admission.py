"""What a worker takes on, and what it refuses before it is queued.

Owns the limits and the words of each refusal, and what is told of a request that got in. Knows
nothing of queues or of how a request is served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from cache_store.cache import Cache
from cache_store.events import Tier
from model_worker.protocol import (
    MAX_PRIORITY,
    MAX_RETENTION_S,
    PRIORITY_S,
    AddRequest,
    ErrorCode,
    EvictedPrefix,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from model_worker.request import Request, TokenIds


@dataclass(frozen=True, slots=True)
class EngineLimits:
    fingerprint: str
    block_size: int  # tokens
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    max_num_waiting: int
    block_bytes: Mapping[Tier, int] = field(default_factory=dict)  # of the tiers that there are


def decode_ids(encoded: bytes) -> TokenIds:
    """int32 (tokens,) from little-endian bytes; empty where they are no whole number of ids."""
    whole = encoded if len(encoded) % 4 == 0 else b""
    return np.frombuffer(whole, dtype="<i4").astype(np.int32)


def refusal(params: SamplingParams, prompt: TokenIds, limits: EngineLimits) -> RequestError | None:
    """Of what is wrong with the request itself, or too long for the model."""
    violation = params.violation(limits.vocab_size)
    if violation is not None:
        field, allowed = violation
        return RequestError(
            code=ErrorCode.INVALID_REQUEST, message=f"{field} {allowed}", param=field
        )
    if len(prompt) == 0 or prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        return RequestError(
            code=ErrorCode.INVALID_REQUEST,
            message=f"the prompt must hold token ids from 0 to {limits.vocab_size - 1}",
            param="prompt",
        )
    if len(prompt) >= limits.max_model_len:
        return RequestError(
            code=ErrorCode.CONTEXT_LENGTH,
            message=(
                f"the prompt has {len(prompt)} tokens; with at least one to generate it may "
                f"have at most {limits.max_model_len - 1} "
                f"(max_model_len {limits.max_model_len})"
            ),
        )
    return None


def capacity_refusal(
    params: SamplingParams,
    num_prompt: int,
    limits: EngineLimits,
    *,
    num_blocks: int,
    may_wait: bool,
) -> RequestError | None:
    """Of what is larger than the whole pool, of ``num_blocks``, or one too many to wait."""
    longest = min(num_prompt + params.max_tokens, limits.max_model_len)
    # One more than its tokens fill: a partial hit also holds the block that it copies from.
    needed = -(-longest // limits.block_size) + 1
    if needed > num_blocks:
        return RequestError(
            code=ErrorCode.NEVER_FITS,
            message=(
                f"prompt and max_tokens come to {longest} tokens, {needed} blocks; "
                f"the KV pool has {num_blocks}"
            ),
        )
    if not may_wait:
        return RequestError(
            code=ErrorCode.OVERLOADED,
            message=f"{limits.max_num_waiting} requests are waiting already",
        )
    return None


def grammar_error(problem: str) -> RequestError:
    """Of a grammar that cannot be followed, or not any further."""
    return RequestError(
        code=ErrorCode.INVALID_REQUEST, message=f"grammar: {problem}", param="grammar"
    )


def bonus_s(message: AddRequest) -> float:
    """How much later than now its blocks stand as used."""
    priority = max(-MAX_PRIORITY, min(message.priority, MAX_PRIORITY))
    retention_s = message.retention_s if math.isfinite(message.retention_s) else 0.0
    return priority * PRIORITY_S + max(0.0, min(retention_s, MAX_RETENTION_S))


def with_admission(output: RequestOutput, request: Request, cache: Cache) -> RequestOutput:
    """The first output of a request that was admitted, with what it has found in ``cache``, and
    what was there once."""
    assert request.admitted_s is not None
    return msgspec.structs.replace(
        output,
        num_cached_tokens=request.num_cached_tokens,
        queue_s=request.admitted_s - request.arrival_s - request.load_s,
        load_s=request.load_s,
        num_host_tokens=request.num_host_tokens,
        num_disk_tokens=request.num_disk_tokens,
        evicted=_evicted(request, cache),
    )


def _evicted(request: Request, cache: Cache) -> EvictedPrefix | None:
    num_cached_tokens = request.num_cached_tokens or 0
    num_wanted = request.num_prompt_tokens - 1  # the last one is computed in any case
    if num_cached_tokens >= num_wanted or request.sampling_params.num_prompt_logprobs is not None:
        return None
    first, block_size = num_cached_tokens // cache.block_size, cache.block_size
    departed = cache.departed(request.prompt_block_hashes, first)
    if departed is None:
        return None
    num_tokens = min((first + departed.num_blocks) * block_size, num_wanted) - num_cached_tokens
    return EvictedPrefix(
        num_tokens=num_tokens,
        ago_s=departed.ago_s,
        tier=departed.tier.value,
        cause=departed.cause.value,
    )
