"""Where the last tokens of a sequence stood before in the same sequence.

Owns two hash tables from runs of tokens to the place after their latest occurrence. Knows nothing
of requests or drafts: a wrong answer is impossible (what is found is compared), a missed one is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

# The longer run is asked first: it is right more often. The shorter finds the beginning of a quote.
RUN_LENGTHS = (6, 3)
# So that few runs take each other's place; a table is twice as large when it has just grown.
_SLOTS_PER_TOKEN = 4
_FEW_TOKENS = 24  # up to here a loop is quicker than numpy's calls
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Knuth, TAOCP vol. 3, 6.4)
_MASK = 2**64 - 1
_MIN_BITS = 8


@dataclass(frozen=True, slots=True)
class Occurrence:
    """``run_length`` tokens that end before position ``end`` are those at the end."""

    end: int
    run_length: int


class NgramIndex:
    """Amortised O(1) per token that is appended, O(1) per question; 32 to 64 bytes per token."""

    def __init__(self) -> None:
        self._bits = 0
        self._num_indexed = 0  # runs that end before this position are in the tables
        self._tables: list[NDArray[np.int32]] = []

    def find(self, token_ids: TokenIds) -> Occurrence | None:
        """The latest earlier occurrence of the last tokens, if there is one.

        ``token_ids`` (tokens,) are those of the call before and what was appended since.
        """
        num_tokens = len(token_ids)
        self._take(token_ids)
        for length, table in zip(RUN_LENGTHS, self._tables, strict=True):
            if num_tokens <= length:
                continue
            run = token_ids[num_tokens - length :]
            end = int(table[self._slot(run.tolist())])
            if end and np.array_equal(token_ids[end - length : end], run):
                return Occurrence(end, length)
        return None

    def _take(self, token_ids: TokenIds) -> None:
        """Index the runs that have a token after them."""
        stop = len(token_ids)
        if _SLOTS_PER_TOKEN * stop > 1 << self._bits:
            self._bits = max(_MIN_BITS, (_SLOTS_PER_TOKEN * stop).bit_length())
            self._tables = [np.zeros(1 << self._bits, dtype=np.int32) for _ in RUN_LENGTHS]
            self._num_indexed = 0
        first = self._num_indexed
        for length, table in zip(RUN_LENGTHS, self._tables, strict=True):
            # ends of runs: each with a token at that position
            ends = range(max(first, length), stop)
            if len(ends) > _FEW_TOKENS:
                slots = self._slots(token_ids[ends.start - length : stop - 1], length)
                table[slots] = np.arange(ends.start, stop)  # of equal slots the last one stays
            else:
                tokens = token_ids[max(0, ends.start - length) : stop].tolist()
                for offset, end in enumerate(ends):
                    table[self._slot(tokens[offset : offset + length])] = end
        self._num_indexed = max(first, stop)

    def _slot(self, run: list[int]) -> int:
        code = 0
        for token_id in run:
            code = (code + token_id) * _MULTIPLIER & _MASK
        return code >> (64 - self._bits)

    def _slots(self, token_ids: TokenIds, length: int) -> NDArray[np.int64]:
        """``_slot`` of every run of ``length`` in ``token_ids``, in order."""
        tokens = token_ids.astype(np.uint64)
        num_runs = len(tokens) - length + 1
        codes = np.zeros(num_runs, dtype=np.uint64)
        for offset in range(length):
            codes += tokens[offset : offset + num_runs]
            codes *= np.uint64(_MULTIPLIER)
        return (codes >> np.uint64(64 - self._bits)).astype(np.int64)
