"""Two token sequences side by side: where they part, and what of the one stands in the other again.

Owns the arithmetic, on int32 arrays. Knows nothing of text, messages or caches.

Runs are found by hashes of all windows of RUN tokens (Rabin, Karp, 1987), with wrapping 64-bit
arithmetic; nothing but a hint to a person depends on two of them not colliding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["RUN", "Divergence", "anchors", "compare", "num_common"]

RUN = 16  # tokens, a power of two: what is shorter than that is equal by chance or by the template
MAX_TOKENS = 65_536  # of each side that are looked at behind the divergence
_SAMPLED = 16  # every so manieth window is an anchor
_BASE = 0x9E3779B97F4A7C15  # odd, so that each token keeps its weight

TokenIds = NDArray[np.int32]  # 1-D
Hashes = NDArray[np.uint64]  # 1-D
Mask = NDArray[np.bool_]  # 1-D


@dataclass(frozen=True, slots=True)
class Divergence:
    """``index`` tokens are common. Of what follows, ``is_equal`` marks the tokens that stand in the
    other sequence too, in runs of at least RUN; ``resumes_at`` and ``other_resumes_at`` are where
    the first such run begins in the one and in the other, counted from the start, None without
    any."""

    index: int
    is_equal: Mask
    resumes_at: int | None = None
    other_resumes_at: int | None = None

    @property
    def num_equal(self) -> int:
        return int(np.count_nonzero(self.is_equal))

    def num_equal_from(self, position: int) -> int:
        """As :attr:`num_equal`, of the tokens from ``position`` on."""
        return int(np.count_nonzero(self.is_equal[max(0, position - self.index) :]))


def num_common(left: TokenIds, right: TokenIds) -> int:
    """The length of the longest common prefix."""
    size = min(len(left), len(right))
    differing = left[:size] != right[:size]
    first = int(differing.argmax()) if size else 0
    return first if size and differing[first] else size


def compare(ids: TokenIds, other: TokenIds) -> Divergence:
    """Where ``ids`` leaves ``other``, and what of ``other`` comes again in it."""
    index = num_common(ids, other)
    rest, others = ids[index : index + MAX_TOKENS], other[index : index + MAX_TOKENS]
    is_equal = np.zeros(len(rest), dtype=np.bool_)
    if min(len(rest), len(others)) < RUN:
        return Divergence(index, is_equal)
    windows, other_windows = _window_hashes(rest), _window_hashes(others)
    known = np.sort(other_windows)
    nearest = np.minimum(np.searchsorted(known, windows), len(known) - 1)
    found = np.flatnonzero(known[nearest] == windows)
    if not len(found):
        return Divergence(index, is_equal)
    edges = np.zeros(len(rest) + 1, dtype=np.int32)
    edges[found] += 1  # no index stands twice in either
    edges[found + RUN] -= 1
    is_equal = np.cumsum(edges[:-1]) > 0
    first = int(found[0])
    other_first = int(np.flatnonzero(other_windows == windows[first])[0])
    return Divergence(index, is_equal, index + first, index + other_first)


def anchors(ids: TokenIds) -> list[int]:
    """Hashes of those windows that their own content chooses, so that equal text has equal anchors
    wherever it stands; one for each sixteen tokens or so."""
    if len(ids) < RUN:
        return []
    windows = _window_hashes(ids[:MAX_TOKENS])
    chosen: list[int] = windows[(windows >> np.uint64(32)) % np.uint64(_SAMPLED) == 0].tolist()
    return chosen


def _window_hashes(ids: TokenIds) -> Hashes:
    """Of the windows of RUN tokens that begin at each position: (len(ids) - RUN + 1,)."""
    total = ids.astype(np.uint64) + np.uint64(1)
    base, span = _BASE, 1
    while span < RUN:  # of twice as many tokens each time
        total = total[:-span] * np.uint64(base) + total[span:]
        base, span = base * base % 2**64, 2 * span
    total ^= total >> np.uint64(29)
    total *= np.uint64(_BASE)
    return total
