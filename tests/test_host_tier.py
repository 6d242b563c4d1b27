"""The host tier's memory: whole, stable, and taken in the background."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

from cache_store.tiers.host import HostTier


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_for_pages() -> None:
    until = time.monotonic() + 20
    while any(thread.name == "host-tier-pages" for thread in threading.enumerate()):
        assert time.monotonic() < until, "the pages are not taken"
        time.sleep(0.005)


def test_blocks_keep_what_is_stored_in_them() -> None:
    tier = HostTier(5, 1000, is_pinned=False)
    assert tier.num_blocks == 5
    for block_id in range(5):
        assert tier.payloads[block_id].shape == (1000,)
        tier.payloads[block_id][:] = block_id + 1
    for block_id in range(5):
        assert np.array_equal(tier.payloads[block_id], np.full(1000, block_id + 1, np.uint8))


def test_taking_the_pages_changes_nothing_that_is_stored_meanwhile() -> None:
    tier = HostTier(64, 2**20, is_pinned=False)
    for block_id in range(64):
        tier.payloads[block_id][:] = block_id
    wait_for_pages()
    for block_id in range(64):
        assert int(tier.payloads[block_id].min()) == int(tier.payloads[block_id].max()) == block_id


def test_the_memory_is_there_before_it_is_used_and_no_more_than_asked_for() -> None:
    wait_for_pages()
    before = resident_bytes()
    tier = HostTier(64, 2**20, is_pinned=False)
    wait_for_pages()
    taken = resident_bytes() - before
    assert 0.9 * 64 * 2**20 < taken < 1.1 * 64 * 2**20
    assert tier.num_blocks == 64
