"""The words a gateway and a worker exchange, and what a worker process is started with.

Owns the message types, their version, and their byte form (msgpack through msgspec). Knows
nothing of sockets, threads, models or HTTP; this is the only module of the worker that the
gateway imports, and it needs no torch. What both ends of a link share beside the messages (keys,
timing) lives in :mod:`model_worker.link` and is exported from here too, and so is the check of a
grammar, for which a gateway needs no worker.

One link joins one gateway to one worker. A worker sends at most one :class:`StepFrame` per engine
step and link, which carries the new tokens of all of that link's requests. Frames are numbered
from 1 per link and epoch; a receiver that sees a gap or another epoch ends the link's requests.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache_store.events import CacheEvent
from model_worker.grammar_source import grammar_problem
from model_worker.link import (
    LinkError,
    LinkKeys,
    LinkTiming,
    Waker,
    derive_link_keys,
    link_keys_for,
    read_link_secret,
)
from model_worker.log_lines import (
    LOG_FORMATS,
    ParsedLogLine,
    configure_logging,
    log_event,
    parse_log_line,
)
from model_worker.request_output import (
    ErrorCode,
    EvictedPrefix,
    FinishReason,
    RequestError,
    RequestOutput,
    TokenLogprobs,
)
from model_worker.sampling_params import MAX_GRAMMAR_CHARS, MAX_LOGPROBS, Grammar, SamplingParams
from model_worker.tenant_policy import TenantPolicy
from model_worker.worker_config import EXIT_CONFIG, WorkerConfig
from model_worker.worker_stats import (
    AGE_BOUNDS_S,
    MAX_REPORTED_TENANTS,
    Ages,
    BlockReport,
    TenantUsage,
    TierReport,
    WorkerStats,
)

__all__ = [
    "AGE_BOUNDS_S",
    "EXIT_CONFIG",
    "LOG_FORMATS",
    "MAX_GRAMMAR_CHARS",
    "MAX_LOGPROBS",
    "MAX_PRIORITY",
    "MAX_REPORTED_TENANTS",
    "MAX_RETENTION_S",
    "PRIORITY_S",
    "PROTOCOL_VERSION",
    "Abort",
    "AddRequest",
    "Ages",
    "BlockReport",
    "CacheReset",
    "Command",
    "ErrorCode",
    "EvictedPrefix",
    "FinishReason",
    "GatewayMessage",
    "Goodbye",
    "Grammar",
    "Heartbeat",
    "Hello",
    "LinkError",
    "LinkKeys",
    "LinkTiming",
    "ModelCard",
    "ParsedLogLine",
    "PrefixAction",
    "PrefixCommand",
    "PrefixReply",
    "ProtocolVersion",
    "Refusal",
    "Reply",
    "RequestError",
    "RequestOutput",
    "ResetCache",
    "SamplingParams",
    "StepFrame",
    "TenantPolicies",
    "TenantPolicy",
    "TenantUsage",
    "TierReport",
    "TokenLogprobs",
    "TokenizerFile",
    "Waker",
    "Welcome",
    "WorkerConfig",
    "WorkerMessage",
    "WorkerStats",
    "WorkerStatus",
    "configure_logging",
    "decode_gateway_message",
    "decode_worker_message",
    "derive_link_keys",
    "encode",
    "grammar_problem",
    "link_keys_for",
    "log_event",
    "parse_log_line",
    "peek_request_id",
    "read_link_secret",
]


class ProtocolVersion(msgspec.Struct, frozen=True, array_like=True):
    """Major versions must agree; a peer speaks its own minor version and the one before it.

    Nothing that a peer does not know is sent to it; a field that it does not know it ignores. Only
    of sampling parameters it refuses those that it does not know, since an answer without them
    would be another one.
    """

    major: int
    minor: int

    def accepts(self, other: ProtocolVersion) -> bool:
        return self.major == other.major and abs(self.minor - other.minor) <= 1


PROTOCOL_VERSION = ProtocolVersion(1, 3)


# What a request may ask of eviction: a step of priority counts as a minute of recency.
MAX_PRIORITY = 10
PRIORITY_S = 60.0
MAX_RETENTION_S = 86_400.0


# ---------------------------------------------------------------- gateway -> worker


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    version: ProtocolVersion
    gateway_id: str


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """``prompt_token_ids`` are little-endian int32, so that no list of Python ints crosses."""

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # -10 to 10: each step counts as a minute of recency for its blocks
    retention_s: float = 0.0  # its blocks stand as if they were used this much later
    tenant: str = ""  # whom its work and its blocks are charged to


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    request_id: str


class ResetCache(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Drop every unlocked block, in all tiers. Answered with :class:`CacheReset`."""

    call_id: str


class PrefixAction(StrEnum):
    """What is to become of a stored prefix. Blocks that other prefixes share, or that a running
    request holds, are left alone by DEMOTE and DROP."""

    INSPECT = "inspect"
    PREFETCH = "prefetch"  # bring it to the device ahead of its request
    DEMOTE = "demote"  # off the device, into the next lower tier
    DROP = "drop"  # out of every tier, its bytes overwritten on disk


class PrefixCommand(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Act on the stored prefix of these tokens (little-endian int32), beyond the first
    ``keep_num_tokens``. Answered with :class:`PrefixReply`."""

    call_id: str
    action: PrefixAction
    prompt_token_ids: bytes
    cache_salt: str = ""
    keep_num_tokens: int = 0


class TenantPolicies(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The tenants that have a policy, all of them, and the prefixes that all tenants share (as
    little-endian int32): what was said before counts no more. Sent after each Welcome and when they
    change; not answered."""

    policies: tuple[TenantPolicy, ...]
    shared_prefixes: tuple[bytes, ...] = ()


Command = AddRequest | Abort | ResetCache | PrefixCommand | TenantPolicies


# ---------------------------------------------------------------- worker -> gateway


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # file name without a folder: tokenizer.json, tokenizer_config.json, ...
    content: bytes
    sha256: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway adopts from its workers; equal for all workers of one model."""

    model: str  # as given with --model
    served_model_names: tuple[str, ...]
    fingerprint: str
    block_size: int  # tokens
    hash_version: str
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_files: tuple[TokenizerFile, ...]
    kv_bytes_per_token: int
    num_blocks: int
    dtype: str
    device: str


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to Hello once the model is loaded; requests are accepted from here on.

    Cache events begin with it: the gateway takes the cache for empty, then hears of every change,
    and after a while of all that was stored before.
    """

    version: ProtocolVersion
    worker_id: str
    epoch: int
    model: ModelCard


class WorkerStatus(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to Hello while the model loads, and again on each change."""

    worker_id: str
    state: str  # "loading" | "failed" | "draining"
    detail: str  # one line for a person: what is being done, or why it failed


class Refusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to a Hello of a version that this worker does not speak; the link ends."""

    version: ProtocolVersion
    reason: str


class StepFrame(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    epoch: int
    sequence: int  # 1, 2, 3, ... per link
    outputs: tuple[RequestOutput, ...]
    stats: WorkerStats
    events: tuple[CacheEvent, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent by each side's I/O thread, so that a long step is not taken for death.

    ``sequence`` is that of the last StepFrame sent on the link (0 for none, and from a gateway):
    a receiver that is behind it has lost a frame.
    """

    epoch: int = 0
    sequence: int = 0


class Goodbye(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The last message of a link, from either side; the peer ends the link's requests at once."""

    reason: str


class CacheReset(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    call_id: str
    num_blocks_dropped: int


class PrefixReply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What was found before the action, in tokens by tier, and what the action came to.

    ``num_blocks_left`` are blocks that DROP or DEMOTE would have taken, had no request or transfer
    held them: to be asked for again.
    """

    call_id: str
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_blocks_changed: int = 0
    num_blocks_left: int = 0


Reply = CacheReset | PrefixReply
GatewayMessage = Hello | Command | Heartbeat | Goodbye
WorkerMessage = Welcome | WorkerStatus | Refusal | StepFrame | Heartbeat | Reply | Goodbye


class _RequestHead(msgspec.Struct, frozen=True, tag="AddRequest"):
    """As much of an AddRequest as names it, whatever its other fields hold."""

    request_id: str


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder[_RequestHead](_RequestHead)
_gateway_decoder = msgspec.msgpack.Decoder[GatewayMessage](GatewayMessage)
_worker_decoder = msgspec.msgpack.Decoder[WorkerMessage](WorkerMessage)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_gateway_message(frame: bytes) -> GatewayMessage:
    """Raises msgspec.DecodeError (or its subclass ValidationError) on anything else."""
    return _gateway_decoder.decode(frame)


def decode_worker_message(frame: bytes) -> WorkerMessage:
    """Raises msgspec.DecodeError (or its subclass ValidationError) on anything else."""
    return _worker_decoder.decode(frame)


def peek_request_id(frame: bytes) -> str | None:
    """The request_id of an AddRequest that does not decode as a whole; None for anything else.

    So that one request with a bad field can be refused by name instead of its link ended.
    """
    try:
        return _head_decoder.decode(frame).request_id
    except msgspec.DecodeError:
        return None
