"""Blocks, stores and folders for the tests of the disk store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cache_store.block_hash import HASH_VERSION, Namespace, chain_hashes
from cache_store.cipher import Cipher
from cache_store.tiers.disk_format import DiskFormat
from cache_store.tiers.disk_index import FoundBlock
from cache_store.tiers.disk_store import DiskStore
from cache_store.token_bytes import encode_tokens
from cache_store.transfer import BlockKey

BLOCK_SIZE = 4
FORMAT = DiskFormat("model-a", HASH_VERSION, BLOCK_SIZE, 5000, "exact:float32")
STRIDE = 8192
SEGMENT_BYTES = 4096 + STRIDE + 64  # of a file with one block, its name included
FOLDER_BYTES = 4 * 4096
CIPHERS = (None, Cipher(b"k" * 32))
ROOT = Namespace(FORMAT.fingerprint).root_hash


def chain(seed: int, num_blocks: int, num_last: int = BLOCK_SIZE) -> list[BlockKey]:
    """Consecutive blocks of one prompt, of which the last holds ``num_last`` tokens."""
    ids = np.random.default_rng(seed).integers(1 << 24, 1 << 30, num_blocks * BLOCK_SIZE)
    keys: list[BlockKey] = []
    parent = ROOT
    for index in range(num_blocks):
        count = num_last if index == num_blocks - 1 else BLOCK_SIZE
        start = index * BLOCK_SIZE
        tokens = encode_tokens(ids[start : start + count].astype(np.int32))
        block_hash = chain_hashes(parent, tokens, count)[0]
        keys.append(BlockKey(ROOT, parent, block_hash, tokens))
        parent = block_hash
    return keys


def first_block(seed: int) -> BlockKey:
    return chain(seed, 1)[0]


def payload(key: BlockKey, format: DiskFormat = FORMAT) -> bytes:
    """What belongs to a key: other bytes for each, none of them zero."""
    noise = hashlib.shake_128(key.root_hash + key.block_hash + key.tokens)
    return noise.digest(format.payload_bytes).replace(b"\0", b"\1")


def max_bytes_for(num_slots: int) -> int:
    return FOLDER_BYTES + num_slots * SEGMENT_BYTES


def open_store(
    folder: Path, num_slots: int = 64, cipher: Cipher | None = None
) -> tuple[DiskStore, dict[BlockKey, int]]:
    """A store that has adopted all it found; the slots by key."""
    store = DiskStore(folder, FORMAT, max_bytes_for(num_slots), cipher)
    assert store.num_slots == num_slots
    return store, adopt_all(store, store.scan())


def adopt_all(store: DiskStore, found: Iterable[FoundBlock]) -> dict[BlockKey, int]:
    slots: dict[BlockKey, int] = {}
    for slot, block in enumerate(found):
        assert block.key not in slots, "a key twice"
        store.adopt(slot, block.ref)
        slots[block.key] = slot
    return slots


def put(store: DiskStore, keys: Iterable[BlockKey], first_slot: int = 0) -> dict[BlockKey, int]:
    slots = {key: slot for slot, key in enumerate(keys, first_slot)}
    store.write([(slot, key, payload(key)) for key, slot in slots.items()])
    return slots


def get(store: DiskStore, slot: int, key: BlockKey) -> bytes:
    into = bytearray(FORMAT.payload_bytes)
    store.read(slot, key, into)
    return bytes(into)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def the_file(folder: Path) -> Path:
    (path,) = files_in(folder)
    return path


def raw_content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in files_in(folder))


def folder_bytes(folder: Path) -> int:
    """Size of a folder: of each file and folder its length or its blocks, the larger."""
    paths = [folder, *folder.rglob("*")]
    stats = [path.lstat() for path in paths]
    return sum(max(status.st_size, status.st_blocks * 512) for status in stats)


def file_bytes(folder: Path) -> int:
    """Real blocks of the segments."""
    return sum(path.stat().st_blocks * 512 for path in files_in(folder))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
