"""Which workers hold how much of a prompt, as far as the metadata store knows.

Owns the hashing of a prompt's chunks, off the event loop, and the bound on the wait for the store.
What it says is a hint; the worker's own tree is the truth. Knows nothing of how a worker is chosen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cache_store.block_hash import HASH_BYTES, Namespace, hash_blocks
from cache_store.events import EVENT_CHUNK_TOKENS
from cache_store.metadata.base import MetadataError, MetadataStore
from cache_store.shared_prefixes import SharedPrefixes
from model_worker.protocol import ModelCard

__all__ = ["LookupOutcome", "PrefixLocator", "chunk_hashes"]

WAIT_S = 0.02
MAX_CHUNKS = 4_096  # a million tokens


class LookupOutcome(StrEnum):
    FOUND = "found"
    NONE = "none"  # no worker holds any of it
    LATE = "late"  # the store took longer than the request was to wait
    FAILED = "failed"


class PrefixLocator:
    """``threads`` hash; ``wait_s`` bounds the wait for the store, hashing not included."""

    def __init__(self, store: MetadataStore, threads: Executor, *, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._threads = threads
        self._wait_s = wait_s
        self.shared: SharedPrefixes | None = None  # as the workers have been told of them
        self._late: set[asyncio.Task[Mapping[tuple[str, int], int]]] = set()
        self.outcomes: Counter[str] = Counter()

    async def locate(
        self, card: ModelCard, token_ids: NDArray[np.int32], cache_salt: str
    ) -> Mapping[tuple[str, int], int]:
        """Tokens held from the start of ``token_ids`` (1-D), by worker id and epoch. Empty where
        nothing is known, for whatever reason."""
        if len(token_ids) < EVENT_CHUNK_TOKENS or self._store.is_degraded:
            return {}
        loop = asyncio.get_running_loop()
        hashes = await loop.run_in_executor(
            self._threads, chunk_hashes, card, token_ids, cache_salt, self.shared
        )
        task = asyncio.create_task(self._ask(card, hashes))
        done, _ = await asyncio.wait({task}, timeout=self._wait_s)
        if not done:
            # It goes on without us, so that the store's own limit finds out whether it is gone.
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            self.outcomes[LookupOutcome.LATE] += 1
            return {}
        return task.result()

    async def close(self) -> None:
        for task in tuple(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _ask(self, card: ModelCard, hashes: bytes) -> Mapping[tuple[str, int], int]:
        try:
            located = await self._store.locate(card.fingerprint, hashes)
        except MetadataError:
            self.outcomes[LookupOutcome.FAILED] += 1
            return {}
        size = _chunk_blocks(card.block_size) * card.block_size
        found = {(item.worker_id, item.epoch): len(item.tiers) * size for item in located}
        self.outcomes[LookupOutcome.FOUND if found else LookupOutcome.NONE] += 1
        return found


def chunk_hashes(
    card: ModelCard,
    token_ids: NDArray[np.int32],
    cache_salt: str,
    shared: SharedPrefixes | None = None,
) -> bytes:
    """Those that the cache's events name: of the last block of each full chunk, joined. Behind a
    prefix that is shared, chunks begin anew, as they do in the cache."""
    namespace = Namespace(card.fingerprint, cache_salt=cache_salt)
    place = namespace if shared is None else shared.divide(namespace, token_ids)
    if isinstance(place, Namespace):
        return _chunks_in(place, token_ids, card.block_size)
    cut = place.num_head_tokens
    head = _chunks_in(place.head, token_ids[:cut], card.block_size)
    return head + _chunks_in(place.tail, token_ids[cut:], card.block_size)


def _chunks_in(namespace: Namespace, token_ids: NDArray[np.int32], block_size: int) -> bytes:
    step = _chunk_blocks(block_size)
    num_chunks = min(len(token_ids) // (step * block_size), MAX_CHUNKS)
    blocks = hash_blocks(namespace, token_ids[: num_chunks * step * block_size], block_size)
    rows = np.frombuffer(blocks.joined, dtype=np.uint8).reshape(num_chunks, step, HASH_BYTES)
    return rows[:, -1].tobytes()


def _chunk_blocks(block_size: int) -> int:
    return max(1, EVENT_CHUNK_TOKENS // block_size)
