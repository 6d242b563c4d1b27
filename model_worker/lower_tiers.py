"""The tiers below the device, as a worker is configured to have them: sized, built and joined.

Owns the defaults by device, the memory and the files, and the threads that copy. Knows nothing of
requests or of what is stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cache_store.block import KVCacheSpec
from cache_store.block_hash import HASH_VERSION
from cache_store.cipher import Cipher, CipherError
from cache_store.events import Tier
from cache_store.load_planner import LoadPlanner
from cache_store.prefix_cache import PrefixCache
from cache_store.restore import StoredBlock
from cache_store.tiers.codec import BlockCodec, make_codec
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.disk_format import DiskFormat, DiskStoreError
from cache_store.tiers.disk_index import FoundBlock
from cache_store.tiers.disk_store import DiskStore
from cache_store.tiers.host import HostTier
from cache_store.tiers.transfer_threads import TierStorage, TransferThreads
from cache_store.transfer_desk import LowerTiers
from model_worker.loader.errors import ModelLoadError
from model_worker.memory import free_host_memory, size_text
from model_worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

CUDA_SHARE_OF_FREE = 0.25
# Written to disk at once: large enough for an fsync to be worth it, small enough that reading the
# blocks back one by one is not delayed by long.
WRITE_BATCH_BYTES = 16 * 2**20


@dataclass(frozen=True)
class WorkerTiers:
    """What is below the device; ``lower`` is what a cache is given. ``found`` is what was on disk
    when the worker started, until a cache has taken it up: it holds token ids. ``block_bytes`` is
    what a block counts in each tier."""

    lower: LowerTiers
    threads: TransferThreads
    host: HostTier | None
    disk: DiskStore | None
    found: list[FoundBlock]
    block_bytes: Mapping[Tier, int]

    def restore_into(self, cache: PrefixCache) -> int:
        """Let the cache know what was found on disk; the number of blocks. Once, and before any
        transfer."""
        if self.disk is None or not self.found:
            return 0
        ids = cache.restore([StoredBlock(each.key, each.stored_at) for each in self.found])
        useless = []
        for each, disk_id in zip(self.found, ids, strict=True):
            if disk_id is None:
                useless.append(each.ref)
            else:
                self.disk.adopt(disk_id, each.ref)
        try:
            self.disk.discard(useless)
        except DiskStoreError as error:  # they are of no use, and no harm
            logger.warning("blocks on disk could not be erased: %s", error)
        num_restored = len(self.found) - len(useless)
        self.found.clear()
        return num_restored


def build_lower_tiers(
    config: WorkerConfig,
    device: DeviceTier,
    fingerprint: str,
    prefill_token_s: Callable[[], float | None],
    wake: Callable[[], None],
    progress: Callable[[str], None],
) -> WorkerTiers | None:
    """None if there are none. ``wake`` is called from the threads when a transfer has ended.

    Raises ModelLoadError for memory that is not there, a folder that cannot be used, and a key
    file that cannot be read.
    """
    codec = make_codec(config.host_cache_dtype, device.spec)
    num_blocks: dict[Tier, int] = {}
    host = _build_host(config, device, codec)
    if host is not None:
        num_blocks[Tier.HOST] = host.num_blocks
        progress(_line("Host tier", host.num_blocks, device.spec, codec))
    disk: DiskStore | None = None
    found: list[FoundBlock] = []
    if config.disk_cache_dir is not None:
        disk, found = _open_disk(config, codec, device.spec, fingerprint)
        num_blocks[Tier.DISK] = disk.num_slots
        progress(_line("Disk tier", disk.num_slots, device.spec, codec))
        progress(f"{len(found):,} blocks found in {config.disk_cache_dir}")
    if not num_blocks:
        return None
    write_blocks = max(1, WRITE_BATCH_BYTES // codec.payload_bytes)
    threads = TransferThreads(TierStorage(device, codec, host, disk, write_blocks), wake)
    planner = LoadPlanner(device.spec.block_size, prefill_token_s, time.monotonic)
    lower = LowerTiers(num_blocks, threads, planner, time.monotonic, write_blocks)
    block_bytes = {Tier.HOST: codec.payload_bytes}
    if disk is not None:
        block_bytes[Tier.DISK] = config.disk_cache_size // disk.num_slots  # as its size counts it
    return WorkerTiers(lower, threads, host, disk, found, block_bytes)


def _build_host(config: WorkerConfig, device: DeviceTier, codec: BlockCodec) -> HostTier | None:
    is_cuda = device.keys.device.type == "cuda"
    size = config.host_cache_size
    if size is None:
        size = int(free_host_memory() * CUDA_SHARE_OF_FREE) if is_cuda else 0
    elif size > (free := free_host_memory()):
        raise ModelLoadError(
            f"--host-cache-size asks for {size_text(size)} and {size_text(free)} are free once "
            "the KV pool is made"
        )
    num_blocks = size // codec.payload_bytes
    if num_blocks == 0:
        if config.host_cache_size:
            raise ModelLoadError(
                f"--host-cache-size {size_text(size)} holds no block of "
                f"{size_text(codec.payload_bytes)}"
            )
        return None
    try:
        return HostTier(num_blocks, codec.payload_bytes, is_pinned=is_cuda)
    except (MemoryError, OSError, RuntimeError) as error:
        raise ModelLoadError(
            f"the host tier of {size_text(size)} cannot be allocated: lower --host-cache-size"
        ) from error


def _open_disk(
    config: WorkerConfig, codec: BlockCodec, spec: KVCacheSpec, fingerprint: str
) -> tuple[DiskStore, list[FoundBlock]]:
    assert config.disk_cache_dir is not None
    key_file = config.encryption_key_file
    form = DiskFormat(fingerprint, HASH_VERSION, spec.block_size, codec.payload_bytes, codec.name)
    try:
        cipher = None if key_file is None else Cipher.from_key_file(Path(key_file))
    except CipherError as error:
        raise ModelLoadError(f"--encryption-key-file: {error}") from error
    try:
        store = DiskStore(Path(config.disk_cache_dir), form, config.disk_cache_size, cipher)
        return store, store.scan()
    except DiskStoreError as error:
        raise ModelLoadError(
            f"--disk-cache-dir {config.disk_cache_dir}, "
            f"--disk-cache-size {size_text(config.disk_cache_size)}: {error}"
        ) from error


def _line(name: str, num_blocks: int, spec: KVCacheSpec, codec: BlockCodec) -> str:
    size = size_text(num_blocks * codec.payload_bytes)
    num_tokens = num_blocks * spec.block_size
    return f"{name}: {num_blocks:,} blocks = {num_tokens:,} tokens, {size} ({codec.name})"
