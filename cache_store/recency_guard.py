"""Whether keeping what was used last would have found more than what is kept, on a sample.

Owns a shadow of lru: the names, no more, of those sampled blocks that lru would have now; and the
account of what it would have found beyond what was there. Knows nothing of nodes, of worths or of
how the cache orders its blocks; whoever orders asks ``is_active``.

Blocks are sampled by their hash, which says of all uses of a block whether they count, so that a
shadow of a share of the capacity hits as lru does with all of it (SHARDS, Waldspurger, Park,
Garthwaite, Ahmad, FAST 2015). Under lru a path is used from its end to its root, so that whoever is
found has all before it found too, and each block can be counted by itself.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from cache_store.block_hash import HASH_BYTES

_WORDS = HASH_BYTES // 8  # of 8 bytes, the first of which is what is known of a block here


class RecencyGuard:
    """Active while more was lost to lru, of late, than is allowed: MAX_LOSS of the blocks asked for
    and START_LOSS of the capacity. What was gained on it before is set against that, but no more
    than MAX_GAIN times what is allowed, so that traffic that has changed is noticed.

    Once active it stays so until an eighth of what is allowed is left; order by use loses no more.
    """

    MAX_SAMPLES = 4096  # blocks that the shadow has
    MAX_LOSS = 1 / 400
    START_LOSS = 1 / 64
    MAX_GAIN = 4
    RELEASE = 7 / 8  # of what is allowed
    MEMORY = 16  # after so many times the capacity, what was counted has half its weight

    def __init__(self) -> None:
        self.is_active = False
        self._num_blocks = 0
        self._size = 1.0  # of the shadow
        self._limit = 2**64  # of a sampled block's first word
        self._shadow: OrderedDict[int, None] = OrderedDict()  # in the order of last use
        self._asked = 0.0
        self._lost = 0.0

    def __len__(self) -> int:
        return len(self._shadow)

    def add_capacity(self, num_blocks: int) -> None:
        """Before the first request: the shadow is of a cache with so many blocks more."""
        self._num_blocks += num_blocks
        share = min(1.0, self.MAX_SAMPLES / self._num_blocks)
        self._size = max(1.0, share * self._num_blocks)
        self._limit = int(share * 2**64)

    def count(self, hashes: bytes, num_present: int) -> None:
        """A part of the path of a request, its last part first: the joined hashes of its blocks,
        the first ``num_present`` of which were there when the request came."""
        words = np.frombuffer(hashes, "<u8")[::_WORDS]
        sampled = np.arange(len(words))
        if self._limit < 2**64:
            sampled = np.flatnonzero(words < np.uint64(self._limit))
        self._asked += len(sampled)
        shadow = self._shadow
        for index, word in zip(sampled[::-1].tolist(), words[sampled][::-1].tolist(), strict=True):
            if word in shadow:
                shadow.move_to_end(word)
                self._lost += index >= num_present
            else:
                shadow[word] = None
                self._lost -= index < num_present

    def finish(self) -> bool:
        """All of the path was counted. Whether ``is_active`` has changed."""
        while len(self._shadow) > self._size:
            self._shadow.popitem(last=False)
        if self._asked > 2 * self.MEMORY * self._size:
            self._asked /= 2
            self._lost /= 2
        allowed = self.MAX_LOSS * self._asked + self.START_LOSS * self._size
        self._lost = max(self._lost, -self.MAX_GAIN * allowed)
        was_active = self.is_active
        self.is_active = self._lost > (self.RELEASE * allowed if was_active else allowed)
        return self.is_active != was_active
