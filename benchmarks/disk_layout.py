"""How many blocks a file of the disk tier should hold: a file per block against segments.

    python -m benchmarks.disk_layout [--folder DIR] [--megabytes N] [--sealed] [--output FILE]

The disk store itself writes the same blocks in batches of 1 (a file per block), 8, 32 and 128, each
batch durable when its write returns, and reads them back: once in another order with the page cache
of the files dropped (cold), once again as they are (warm). Then it is opened anew and scanned.
Every figure is the median of the repetitions, which take turns over the batch sizes, since a
disk's speed drifts. Choose a folder on the disk in question: the default is the system's
temporary folder, which may be memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import print_table, save
from cache_store.block_hash import HASH_VERSION, Namespace, chain_hashes
from cache_store.cipher import KEY_BYTES, Cipher
from cache_store.tiers.disk_format import BlockKey, DiskFormat
from cache_store.tiers.disk_store import DiskStore
from cache_store.token_bytes import encode_tokens

SEED = 5
BLOCK_SIZE = 16
BATCHES = (1, 8, 32, 128)
# Of 16 tokens: a small model's int8 blocks, a 135M model's in float32, an 8B model's in bfloat16.
PAYLOADS = {"64 KiB": 64 << 10, "720 KiB": 720 << 10, "2 MiB": 2 << 20}


def random_chain(num_blocks: int) -> Iterator[BlockKey]:
    root = parent = Namespace("benchmark").root_hash
    ids = np.random.default_rng(SEED).integers(0, 128_000, (num_blocks, BLOCK_SIZE), dtype=np.int32)
    for row in ids:
        tokens = encode_tokens(row)
        block_hash = chain_hashes(parent, tokens, BLOCK_SIZE)[0]
        yield BlockKey(root, parent, block_hash, tokens)
        parent = block_hash


def drop_page_cache(folder: Path) -> None:
    """Of the files in the folder; what was written is clean, since each file was synced."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_seconds(
    store: DiskStore, keys: list[BlockKey], order: list[int], into: bytearray
) -> float:
    started = time.perf_counter()
    for slot in order:
        store.read(slot, keys[slot], into)
    return time.perf_counter() - started


def measure(
    folder: Path, payload_bytes: int, num_blocks: int, batch: int, cipher: Cipher | None
) -> dict[str, float]:
    """Seconds of each part, over ``num_blocks`` blocks in an empty folder."""
    format = DiskFormat("benchmark", HASH_VERSION, BLOCK_SIZE, payload_bytes, "exact:float32")
    max_bytes = 2 * num_blocks * (payload_bytes + (64 << 10))
    keys = list(random_chain(num_blocks))
    payload = np.random.default_rng(SEED).bytes(payload_bytes)
    store = DiskStore(folder, format, max_bytes, cipher)
    store.scan()
    started = time.perf_counter()
    for start in range(0, num_blocks, batch):
        slots = range(start, min(start + batch, num_blocks))
        store.write([(slot, keys[slot], payload) for slot in slots])
    write_s = time.perf_counter() - started
    # Runs of eight blocks, as a prompt's are promoted, in random order.
    starts = list(range(0, num_blocks, 8))
    random.Random(SEED).shuffle(starts)
    order = [slot for first in starts for slot in range(first, min(first + 8, num_blocks))]
    into = bytearray(payload_bytes)
    drop_page_cache(folder)
    cold_s = read_seconds(store, keys, order, into)
    warm_s = read_seconds(store, keys, order, into)
    usage = store.usage_bytes
    store.close()
    drop_page_cache(folder)
    started = time.perf_counter()
    store = DiskStore(folder, format, max_bytes, cipher)
    num_found = len(store.scan())
    scan_s = time.perf_counter() - started
    assert num_found == num_blocks
    store.close()
    return {
        "write_s": write_s,
        "read_cold_s": cold_s,
        "read_warm_s": warm_s,
        "scan_s": scan_s,
        "usage_bytes": usage,
    }


def measure_payload(
    parent: Path, payload_bytes: int, num_bytes: int, repetitions: int, cipher: Cipher | None
) -> Iterator[dict[str, Any]]:
    num_blocks = max(8, num_bytes // payload_bytes)
    runs: dict[int, list[dict[str, float]]] = defaultdict(list)
    for _ in range(repetitions):
        for batch in BATCHES:
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                runs[batch].append(measure(Path(folder), payload_bytes, num_blocks, batch, cipher))
    megabytes = num_blocks * payload_bytes / 1e6
    for batch, results in runs.items():
        median = {name: statistics.median(r[name] for r in results) for name in results[0]}
        yield {
            "payload_bytes": payload_bytes,
            "blocks_per_file": batch,
            "num_blocks": num_blocks,
            "write_mb_per_s": megabytes / median["write_s"],
            "read_cold_mb_per_s": megabytes / median["read_cold_s"],
            "read_warm_mb_per_s": megabytes / median["read_warm_s"],
            "scan_us_per_block": median["scan_s"] / num_blocks * 1e6,
            "bytes_on_disk_per_payload_byte": median["usage_bytes"] / (num_blocks * payload_bytes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=256, help="of payload in each run")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sealed", action="store_true", help="with a cipher")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cipher = Cipher(os.urandom(KEY_BYTES)) if arguments.sealed else None
    results = [
        result
        for payload_bytes in PAYLOADS.values()
        for result in measure_payload(
            arguments.folder or Path(tempfile.gettempdir()),
            payload_bytes,
            arguments.megabytes * 1_000_000,
            arguments.repetitions,
            cipher,
        )
    ]
    names = {size: name for name, size in PAYLOADS.items()}
    rows = [
        (
            names[result["payload_bytes"]],
            result["blocks_per_file"],
            f"{result['write_mb_per_s']:,.0f}",
            f"{result['read_cold_mb_per_s']:,.0f}",
            f"{result['read_warm_mb_per_s']:,.0f}",
            f"{result['scan_us_per_block']:,.0f}",
            f"{result['bytes_on_disk_per_payload_byte']:.3f}",
        )
        for result in results
    ]
    header = ("block", "per file", "write MB/s", "cold read MB/s", "warm read MB/s",
              "scan us/block", "disk/payload")  # fmt: skip
    print_table(rows, header)
    workload = f"{arguments.megabytes} MB of blocks; sealed: {arguments.sealed}"
    save("disk_layout", workload, results, arguments.output, SEED)


if __name__ == "__main__":
    main()
