"""Traces of requests: which prompt blocks each request had, in the order of their arrival.

Owns the files' formats and the catalogue of those in benchmarks/data, with the hit rates that two
simulators independent of this project found for them. Knows nothing of caches.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
_FIELDS = (("timestamp", 0.001, "input_length", "hash_ids"), ("t", 1.0, "in", "h"))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``block_ids`` is 1-D int32; equal ids mean equal blocks after equal prefixes.

    The last block may be partly filled; ``num_tokens`` is the length of the prompt.
    """

    arrival_s: float
    block_ids: NDArray[np.int32]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceSource:
    """One file of the catalogue, and what is known of it.

    ``lru_by_capacity`` holds block hit rates under lru by capacity in blocks, and
    ``unbounded`` those of an unbounded cache by blocks and by tokens, all to 4 digits.
    ``tiered_device`` is the device's part, in blocks, where lower tiers are replayed.
    """

    name: str
    title: str
    file: str
    block_tokens: int
    capacities: tuple[int, ...]
    lru_by_capacity: Mapping[int, float]
    unbounded: tuple[float, float]
    tiered_device: int


@dataclass(frozen=True, slots=True)
class Trace:
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
        return len(np.unique(np.concatenate([request.block_ids for request in self.requests])))

    @property
    def num_longest_blocks(self) -> int:
        """A cache of fewer blocks cannot hold every prompt."""
        return max(len(request.block_ids) for request in self.requests)


CATALOGUE: tuple[TraceSource, ...] = (
    TraceSource(
        "conversation",
        "Mooncake conversation, 512-token blocks",
        "mooncake_conversation_trace.jsonl.gz",
        512,
        (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000),
        {1_000: 0.0445, 5_000: 0.1118, 10_000: 0.2116, 50_000: 0.3546, 100_000: 0.3637},
        (0.3664, 0.3736),
        5_000,
    ),
    TraceSource(
        "synthetic",
        "Mooncake synthetic, 512-token blocks",
        "mooncake_synthetic_trace.jsonl.gz",
        512,
        (1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
        {1_000: 0.0841, 5_000: 0.2793, 10_000: 0.4239, 20_000: 0.5718, 50_000: 0.6396},
        (0.6396, 0.6512),
        2_000,
    ),
    TraceSource(
        "agentic",
        "60 coding-agent sessions, 512-token blocks",
        "agentic_mix60_512_shared.jsonl.gz",
        512,
        (1_200, 2_000, 5_000, 10_000, 20_000),
        {2_000: 0.8341, 5_000: 0.9594, 10_000: 0.9697, 20_000: 0.9703},
        (0.9703, 0.9682),
        2_000,
    ),
    TraceSource(
        "airline",
        "tau-bench airline, 200 tool-calling chats, blocks of some 64 tokens",
        "trace_tau_airline_256c.jsonl.gz",
        64,
        (200, 500, 1_000, 2_000, 5_000),
        {200: 0.7929, 500: 0.9084, 1_000: 0.9676, 2_000: 0.9685},
        (0.9686, 0.9629),
        500,
    ),
)


def source_named(name: str) -> TraceSource:
    """Raises KeyError where the catalogue has none of that name."""
    return {source.name: source for source in CATALOGUE}[name]


def load_trace(source: TraceSource, folder: Path = DATA) -> Trace:
    """Raises OSError for a missing file and ValueError for one that is no trace."""
    with gzip.open(folder / source.file, "rt", encoding="utf-8") as lines:
        return Trace(source.block_tokens, tuple(_request(json.loads(line)) for line in lines))


def _request(row: dict[str, Any]) -> TraceRequest:
    for time_field, seconds, length_field, ids_field in _FIELDS:
        if ids_field in row:
            block_ids = np.asarray(row[ids_field], dtype=np.int32)
            return TraceRequest(row[time_field] * seconds, block_ids, row[length_field])
    raise ValueError(f"no request of a trace: {', '.join(row)}")
