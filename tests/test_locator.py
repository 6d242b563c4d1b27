"""Where a prompt is: hashed as the workers' events name it, and never waited for beyond a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.events import EVENT_CHUNK_TOKENS, BlockStored, Tier
from cache_store.metadata.base import BlockLocation, MetadataError, WorkerRecord
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.shared_prefixes import DividedNamespace, SharedPrefixes
from service.locator import PrefixLocator, chunk_hashes
from tests.scripted_worker import make_card

CARD = msgspec.structs.replace(make_card(), block_size=32)
WORKER = WorkerRecord(worker_id="w", epoch=3, endpoint="", fingerprint=CARD.fingerprint)
PROMPT = np.arange(1_000, dtype=np.int32)


class Store(MemoryMetadataStore):
    """Slow or failing when told."""

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.is_failing = False
        self.degraded = False

    @property
    def is_degraded(self) -> bool:
        return self.degraded

    async def locate(self, fingerprint: str, chunk_hashes: bytes) -> Sequence[BlockLocation]:
        await asyncio.sleep(self.delay_s)
        if self.is_failing:
            raise MetadataError("gone")
        return await super().locate(fingerprint, chunk_hashes)


async def made(num_chunks: int = 2, cache_salt: str = "") -> tuple[Store, PrefixLocator]:
    """Worker w holds the first chunks of PROMPT."""
    store = Store()
    hashes = chunk_hashes(CARD, PROMPT[: num_chunks * EVENT_CHUNK_TOKENS], cache_salt)
    await store.renew_worker(WORKER, 60.0)
    await store.apply_events(WORKER, [BlockStored(Tier.HOST, hashes)], 60.0)
    return store, PrefixLocator(store, ThreadPoolExecutor(1))


async def ask(
    locator: PrefixLocator, prompt: np.ndarray = PROMPT, salt: str = ""
) -> Mapping[tuple[str, int], int]:
    return await locator.locate(CARD, prompt, salt)


@pytest.mark.parametrize(("block_size", "step"), [(8, 32), (32, 8), (256, 1)])
def test_a_chunk_is_named_by_its_last_block(block_size: int, step: int) -> None:
    card = msgspec.structs.replace(CARD, block_size=block_size)
    blocks = list(hash_blocks(Namespace(card.fingerprint, cache_salt="x"), PROMPT, block_size))
    joined = chunk_hashes(card, PROMPT, "x")
    assert joined == b"".join(blocks[step * (n + 1) - 1] for n in range(3))


async def test_a_worker_is_found_with_the_tokens_it_holds() -> None:
    _, locator = await made()
    assert await ask(locator) == {("w", 3): 512}
    assert await ask(locator, PROMPT[:511]) == {("w", 3): 256}
    assert await ask(locator, PROMPT[:255]) == {}
    assert await ask(locator, PROMPT + 1) == {}
    assert locator.outcomes == {"found": 2, "none": 1}


async def test_another_salt_finds_nothing() -> None:
    _, locator = await made(cache_salt="tenant")
    assert await ask(locator) == {}
    assert await ask(locator, salt="tenant") == {("w", 3): 512}


async def test_a_slow_store_is_not_waited_for() -> None:
    store, locator = await made()
    store.delay_s = 0.3
    began = time.monotonic()
    assert await ask(locator) == {}
    assert time.monotonic() - began < 0.2
    assert locator.outcomes == {"late": 1}
    await locator.close()
    assert not locator._late


async def test_a_store_that_fails_or_is_out_of_reach_gives_no_hint() -> None:
    store, locator = await made()
    store.is_failing = True
    assert await ask(locator) == {}
    assert locator.outcomes == {"failed": 1}
    store.is_failing, store.degraded = False, True
    assert await ask(locator) == {}
    assert locator.outcomes == {"failed": 1}


def test_behind_a_shared_prefix_chunks_begin_anew() -> None:
    size = EVENT_CHUNK_TOKENS + CARD.block_size  # a chunk and a block
    shared = SharedPrefixes(CARD.block_size)
    shared.set([PROMPT[:size]])
    place = shared.divide(Namespace(CARD.fingerprint, cache_salt="x"), PROMPT)
    assert isinstance(place, DividedNamespace)
    joined = chunk_hashes(CARD, PROMPT, "x", shared)
    step = EVENT_CHUNK_TOKENS // CARD.block_size
    head = hash_blocks(place.head, PROMPT[:size], CARD.block_size)
    tail = hash_blocks(place.tail, PROMPT[size:], CARD.block_size)
    assert joined[:16] == head[step - 1]
    assert joined[16:32] == tail[step - 1]
    assert len(joined) // 16 == 1 + (len(PROMPT) - size) // EVENT_CHUNK_TOKENS
    assert chunk_hashes(CARD, PROMPT[1:], "x", shared) == chunk_hashes(CARD, PROMPT[1:], "x")
