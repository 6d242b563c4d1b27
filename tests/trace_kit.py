"""Recorded traces as the records of a history would have them.

Owns the hashes that stand for a trace's numbers. Knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.traces import TraceSource, load_trace


def hashes_of_trace(source: TraceSource) -> Iterator[np.ndarray]:
    """Of each request, 1-D uint64, uniform."""
    trace = load_trace(source)
    largest = max(int(request.block_ids.max()) for request in trace.requests)
    names = np.random.default_rng(0).integers(0, 2**64, largest + 1, dtype=np.uint64)
    return (names[request.block_ids] for request in trace.requests)
