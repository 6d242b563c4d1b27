"""What a fake worker remembers of prompts and answers, so that its usage is plausible.

Owns the last few of them. Knows nothing of blocks: a prefix counts to the token.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_NUM_REMEMBERED = 64


class FakeMemory:
    def __init__(self) -> None:
        self._known: deque[tuple[str, NDArray[np.int32]]] = deque(maxlen=_NUM_REMEMBERED)

    def remember(self, cache_salt: str, token_ids: NDArray[np.int32]) -> None:
        self._known.append((cache_salt, token_ids))

    def clear(self) -> None:
        self._known.clear()

    def num_blocks(self, block_size: int) -> int:
        """That all of it would take."""
        return sum(-(-len(token_ids) // block_size) for _, token_ids in self._known)

    def longest_common_prefix(self, cache_salt: str, prompt: NDArray[np.int32]) -> int:
        """Tokens; at least the prompt's last one is never cached."""
        longest = 0
        for salt, known in self._known:
            if salt != cache_salt:
                continue
            num_compared = min(len(prompt) - 1, len(known))
            differing = np.flatnonzero(prompt[:num_compared] != known[:num_compared])
            longest = max(longest, int(differing[0]) if len(differing) else num_compared)
        return longest
