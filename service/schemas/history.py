"""The lines of GET /v1/cache/history: a trace of requests in the form of Mooncake's, and more.

Owns their fields, and how hashes become the numbers that stand for them. The form is that of
https://github.com/kvcache-ai/Mooncake (FAST25-release/traces). Knows nothing of how a history is
kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from service.request_history import MAX_REQUESTS, RequestRecord

__all__ = [
    "BLOCKS_HEADER",
    "BLOCK_BYTES_HEADER",
    "LINES",
    "CachedTokens",
    "HistoryLimit",
    "HistoryLine",
    "history_lines",
]

LINES = "application/x-ndjson"
BLOCKS_HEADER = "X-Headstart-Blocks"  # device=N, host=N, disk=N: of all workers together
BLOCK_BYTES_HEADER = "X-Headstart-Block-Bytes"

HistoryLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUESTS)]


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were found, by tier."""

    device: int
    host: int
    disk: int


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``timestamp`` is in milliseconds since the first line's."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    output_hash_ids: list[int]
    block_size: int
    cached: CachedTokens
    tenant: str
    session: str


def history_lines(records: Iterable[RequestRecord]) -> Iterator[HistoryLine]:
    """Hashes become numbers in the order of their first appearance."""
    numbers: dict[int, int] = {}
    start: float | None = None
    for record in records:
        start = record.at if start is None else start
        ids = [numbers.setdefault(name, len(numbers)) for name in record.block_hashes.tolist()]
        yield HistoryLine(
            timestamp=round((record.at - start) * 1000),
            input_length=record.num_prompt_tokens,
            output_length=record.num_output_tokens,
            hash_ids=ids[: record.num_prompt_blocks],
            output_hash_ids=ids[record.num_prompt_blocks :],
            block_size=record.block_size,
            cached=CachedTokens(
                record.num_device_tokens, record.num_host_tokens, record.num_disk_tokens
            ),
            tenant=record.tenant,
            session=record.session,
        )
