"""Traces of requests: which blocks each request had, in the order of their arrival.

Owns the forms that a trace can have, one JSON object a line: that of Mooncake's traces
(https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), which a gateway's history has too
(docs/api.md), and a short one with t, in and h. Knows nothing of caches.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trace", "TraceError", "TraceRequest", "parse_trace", "read_trace"]

_FORMS = (("timestamp", 0.001, "input_length", "hash_ids"), ("t", 1.0, "in", "h"))
_TIERS = ("device", "host", "disk")
_GZIP = b"\x1f\x8b"


def _no_blocks() -> NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


class TraceError(ValueError):
    """What was read is no trace; one line that names the line and the field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``block_ids`` and ``answer_ids`` are 1-D int32; equal ids mean equal blocks after equal
    prefixes. Those of the answer are of blocks that end in it.

    The last block of a prompt may be partly filled, or be left out; ``num_tokens`` is the length of
    the prompt. ``num_found_tokens`` is what a server found of it, if the trace says so.
    """

    arrival_s: float
    block_ids: NDArray[np.int32]
    num_tokens: int
    answer_ids: NDArray[np.int32] = field(default_factory=_no_blocks)
    num_found_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """``block_tokens`` is how many tokens a block has."""

    block_tokens: int
    requests: tuple[TraceRequest, ...] = field(repr=False)

    @property
    def num_blocks(self) -> int:
        """Prompt blocks of all requests together."""
        return sum(len(request.block_ids) for request in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_unique_blocks(self) -> int:
        """A cache of so many blocks never evicts."""
        ids = [part for item in self.requests for part in (item.block_ids, item.answer_ids)]
        return len(np.unique(np.concatenate(ids)))

    @property
    def num_longest_blocks(self) -> int:
        """A cache of fewer blocks cannot hold every request."""
        return max(len(item.block_ids) + len(item.answer_ids) for item in self.requests)

    @property
    def num_found_tokens(self) -> int | None:
        """What a server found of all prompts; None unless the trace says it of every request."""
        found = [request.num_found_tokens for request in self.requests]
        known = [count for count in found if count is not None]
        return sum(known) if len(known) == len(found) else None


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """From a file, compressed by gzip or not. Raises OSError, or TraceError as
    :func:`parse_trace` does."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == _GZIP
    opened = gzip.open if is_compressed else open
    with opened(path, "rt", encoding="utf-8") as lines:
        try:
            return parse_trace(lines, block_tokens)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error):
            raise TraceError(f"{path.name} is neither text nor whole gzip") from None


def parse_trace(lines: Iterable[str], block_tokens: int | None = None) -> Trace:
    """Ids become numbers from 0 on in the order of their appearance.

    ``block_tokens`` goes before what the lines say. Raises TraceError for a line that is no
    request, for block sizes that differ or that nothing says, and where there is no request.
    """
    numbers: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for number, row in _rows(lines):
        try:
            requests.append(_request(row, numbers))
            said = row.get("block_size")
            if block_tokens is None and said is not None:
                block_tokens = _count(said, "block_size", least=1)
            elif requests[1:] and said not in (None, block_tokens):
                raise TraceError(f"block_size is {said}, and {block_tokens} before")
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
    if not requests:
        raise TraceError("there is no request in it")
    if block_tokens is None:
        raise TraceError("no line has a block_size, so it has to be given")
    return Trace(block_tokens, tuple(requests))


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise TraceError(f"line {number}: no JSON object")
        yield number, row


def _request(row: Mapping[str, Any], numbers: dict[int, int]) -> TraceRequest:
    for time_field, seconds, length_field, ids_field in _FORMS:
        if ids_field in row:
            return TraceRequest(
                _time(row.get(time_field), time_field) * seconds,
                _ids(row[ids_field], ids_field, numbers),
                _count(row.get(length_field), length_field),
                _ids(row.get("output_hash_ids") or (), "output_hash_ids", numbers),
                _found(row.get("cached")),
            )
    raise TraceError(f"no request of a trace: {', '.join(row)[:200]}")


def _ids(value: Any, name: str, numbers: dict[int, int]) -> NDArray[np.int32]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise TraceError(f"{name} must be a list of whole numbers")
    known = [numbers.setdefault(item, len(numbers)) for item in value]
    if len(set(known)) < len(known):
        raise TraceError(f"{name} has a number twice, and a block does not follow itself")
    return np.asarray(known, dtype=np.int32)


def _time(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TraceError(f"{name} must be a number")
    return float(value)


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise TraceError(f"{name} must be a whole number of at least {least}")
    return int(value)


def _found(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TraceError("cached must be an object")
    return sum(_count(value.get(tier, 0), f"cached.{tier}") for tier in _TIERS)
