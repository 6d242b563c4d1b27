"""The recorded traces in benchmarks/data.

Owns the catalogue, with the hit rates that two simulators independent of this project found for
them. Knows nothing of caches, nor of the files' form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cache_store.simulation.trace import Trace, read_trace

DATA = Path(__file__).parent / "data"


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
    """Raises OSError for a missing file and TraceError for one that is no trace."""
    return read_trace(folder / source.file, source.block_tokens)
