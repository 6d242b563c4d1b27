"""What fits, and how quick it can be at most: arithmetic from a shape, memory and speeds.

Owns the formulas of room and of floors. Floors are what no program can beat: a step of decode reads
all weights and all KV in use once (memory bandwidth), a prefill multiplies every new token with
every active weight and attends to every token before it (arithmetic). Real servers are slower.
Knows nothing of where shapes come from and of how a plan is shown.
"""

from __future__ import annotations

import msgspec

from cache_store.block import KVCacheSpec, num_blocks_for
from service.planning.shape import ModelShape

__all__ = ["KVPlan", "Plan", "PrefillPlan", "TierRoom", "Wanted", "make_plan"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_DISK_PAGE = 4_096
_DISK_RECORD = 256  # of a record beside tokens and KV, roughly
_TURN_TOKENS = 256


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, lengths in tokens, ``bandwidth`` in bytes and ``flops`` in operations per
    second, None where nobody has said. ``dtype`` is that of weights and of exact KV."""

    gpu_memory: int
    gpu_memory_utilization: float
    host_memory: int
    disk: int
    context: int
    concurrency: int
    shared_prefix: int
    block_size: int
    dtype: str
    kv_cache_dtypes: tuple[str, ...]  # auto | int8
    bandwidth: float | None
    flops: float | None


class TierRoom(msgspec.Struct, frozen=True, kw_only=True):
    """``num_conversations`` are whole ones of the asked length, the shared prefix kept once."""

    tier: str
    num_bytes: int
    num_tokens: int
    num_conversations: int


class KVPlan(msgspec.Struct, frozen=True, kw_only=True):
    """With one number format of the KV. The decode floors are of one step, in seconds, with one
    conversation of the asked length and with all that were asked for; None without a bandwidth."""

    kv_cache_dtype: str
    bytes_per_token: int
    bytes_per_conversation: int
    tiers: tuple[TierRoom, ...]
    holds_concurrency: bool  # all of them on the device at once
    decode_floor_one_s: float | None
    decode_floor_all_s: float | None


class PrefillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Computing the tokens from ``num_cached`` on up to ``num_tokens``."""

    num_tokens: int
    num_cached: int
    flops: float
    floor_s: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``pool_bytes`` is what the weights leave to KV; negative where they do not fit. The rest of
    the device's memory is for what a step computes."""

    model: str
    model_type: str
    num_weights: int
    weights_bytes: int
    pool_bytes: int
    kv_formula: str
    kv: tuple[KVPlan, ...]
    prefill: tuple[PrefillPlan, ...]
    wanted: Wanted


def make_plan(shape: ModelShape, wanted: Wanted) -> Plan:
    """``wanted`` must be of a length that the model is served with."""
    weights = shape.num_weights * _BYTES[wanted.dtype]
    pool = int(wanted.gpu_memory * wanted.gpu_memory_utilization) - weights
    return Plan(
        model=shape.name,
        model_type=shape.model_type,
        num_weights=shape.num_weights,
        weights_bytes=weights,
        pool_bytes=pool,
        kv_formula=f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x "
        f"{shape.head_dim} x bytes of a number",
        kv=tuple(_kv_plan(shape, wanted, pool, name) for name in wanted.kv_cache_dtypes),
        prefill=tuple(
            _prefill_plan(shape, wanted, num_cached) for num_cached in _cached_lengths(wanted)
        ),
        wanted=wanted,
    )


def spec_of(shape: ModelShape, wanted: Wanted, kv_cache_dtype: str) -> KVCacheSpec:
    stored = wanted.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    return KVCacheSpec(
        wanted.block_size,
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        stored,
        _BYTES[stored],
    )


def _kv_plan(shape: ModelShape, wanted: Wanted, pool: int, kv_cache_dtype: str) -> KVPlan:
    spec = spec_of(shape, wanted, kv_cache_dtype)
    record = spec.bytes_per_block + wanted.block_size * 4 + _DISK_RECORD
    on_disk = -(-record // _DISK_PAGE) * _DISK_PAGE
    sizes = (
        ("device", max(pool, 0), spec.bytes_per_block),
        ("host", wanted.host_memory, spec.bytes_per_block),
        ("disk", wanted.disk, on_disk),
    )
    tiers = tuple(
        _room(name, size, per, wanted) for name, size, per in sizes if size or name == "device"
    )
    return KVPlan(
        kv_cache_dtype=kv_cache_dtype if kv_cache_dtype != "auto" else wanted.dtype,
        bytes_per_token=spec.bytes_per_token,
        bytes_per_conversation=num_blocks_for(wanted.context, wanted.block_size)
        * spec.bytes_per_block,
        tiers=tiers,
        holds_concurrency=tiers[0].num_conversations >= wanted.concurrency,
        decode_floor_one_s=_decode_floor(shape, wanted, spec, 1),
        decode_floor_all_s=_decode_floor(shape, wanted, spec, wanted.concurrency),
    )


def _room(tier: str, num_bytes: int, block_bytes: int, wanted: Wanted) -> TierRoom:
    num_blocks = num_bytes // block_bytes
    shared = wanted.shared_prefix // wanted.block_size
    own = num_blocks_for(wanted.context, wanted.block_size) - shared
    free = num_blocks - shared
    return TierRoom(
        tier=tier,
        num_bytes=num_bytes,
        num_tokens=num_blocks * wanted.block_size,
        num_conversations=max(free, 0) // own,
    )


def _decode_floor(
    shape: ModelShape, wanted: Wanted, spec: KVCacheSpec, num_requests: int
) -> float | None:
    """What is read in one step, over the bandwidth. A prefix in common is read once."""
    if wanted.bandwidth is None:
        return None
    weights = shape.num_dense_weights + shape.num_head_weights
    if shape.num_experts:
        missed = 1.0 - shape.num_active_experts / shape.num_experts
        touched = shape.num_experts * (1.0 - missed**num_requests)  # by chance
        weights += int(shape.num_sparse_layers * touched * shape.expert_weights)
    own = wanted.context - wanted.shared_prefix
    num_tokens = wanted.shared_prefix + num_requests * own
    num_bytes = weights * _BYTES[wanted.dtype] + num_tokens * spec.bytes_per_token
    return num_bytes / wanted.bandwidth


def _cached_lengths(wanted: Wanted) -> list[int]:
    """Nothing, the shared prefix, and all but one turn of a conversation."""
    turn = max(wanted.context - _TURN_TOKENS, 0)
    return sorted({0, min(wanted.shared_prefix, wanted.context - 1), turn})


def _prefill_plan(shape: ModelShape, wanted: Wanted, num_cached: int) -> PrefillPlan:
    """A multiplication and an addition for each weight; for attention two of each for each pair of
    a token and one before it, head and dimension: scores, and the sum of values."""
    total, new = wanted.context, wanted.context - num_cached
    pairs = (total * (total + 1) - num_cached * (num_cached + 1)) // 2
    flops = 2.0 * shape.num_active_weights * new + 2.0 * shape.num_head_weights
    flops += 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    floor = None if wanted.flops is None else flops / wanted.flops
    return PrefillPlan(num_tokens=total, num_cached=num_cached, flops=flops, floor_s=floor)
