"""Cold-prefix coalescing: a block that one request is computing is not computed by another.

Owns the map from block hash to leader. A follower holds no block and no lock, never leads, and is
looked at again when its leader commits, is preempted, is aborted or fails: each of these takes the
hash out of the map. Knows nothing of queues.
"""

from __future__ import annotations

from collections.abc import Iterator

from model_worker.request import Request


class Coalescer:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[bytes, Request] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def is_waiting(self, request: Request) -> bool:
        """Whether the leader that this follower was last seen behind is still computing."""
        return request.waits_for is not None and request.waits_for in self._leaders

    def must_wait(self, request: Request, num_matched_tokens: int) -> bool:
        """Whether another request is computing the first full block that the tree lacks."""
        index = num_matched_tokens // self._block_size
        hashes = request.prompt_block_hashes
        request.waits_for = hashes[index] if index < len(hashes) else None
        return self.is_waiting(request)

    def lead(self, request: Request) -> None:
        """``request`` was admitted: it computes its prompt's full blocks from here on."""
        request.waits_for = None
        for block_hash in self._undone(request):
            self._leaders.setdefault(block_hash, request)

    def advance(self, request: Request, num_computed_before: int) -> None:
        """``request`` committed the blocks between ``num_computed_before`` and now."""
        first = num_computed_before // self._block_size
        for block_hash in request.prompt_block_hashes.between(first, self._num_done(request)):
            self._drop(block_hash, request)

    def leave(self, request: Request) -> None:
        """``request`` computes no more (finished, preempted, aborted or failed)."""
        for block_hash in self._undone(request):
            self._drop(block_hash, request)

    def _undone(self, request: Request) -> Iterator[bytes]:
        hashes = request.prompt_block_hashes
        return hashes.between(self._num_done(request), len(hashes))

    def _num_done(self, request: Request) -> int:
        return request.num_computed_tokens // self._block_size

    def _drop(self, block_hash: bytes, request: Request) -> None:
        if self._leaders.get(block_hash) is request:
            del self._leaders[block_hash]
