"""The guide to sizes reckons as the code does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.block import KVCacheSpec
from cache_store.block_hash import HASH_VERSION
from cache_store.load_planner import FORGET_S
from cache_store.tiers.codec import make_codec
from cache_store.tiers.disk_format import DiskFormat
from cache_store.tiers.disk_store import DiskStore
from cache_store.transfer_desk import REST_AFTER_FAILURE_S
from model_worker.engine_loop import SAVE_TIMEOUT_S
from model_worker.lower_tiers import CUDA_SHARE_OF_FREE, WRITE_BATCH_BYTES
from model_worker.worker_config import WorkerConfig

GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "sizing.md").read_text()
SPECS = {
    "demo": KVCacheSpec(32, 30, 3, 64, "float32", 4),
    "Llama-3.1-8B": KVCacheSpec(32, 32, 8, 128, "bfloat16", 2),
    "Llama-3.1-70B": KVCacheSpec(32, 80, 8, 128, "bfloat16", 2),
}


def figures(model: str) -> list[int]:
    (row,) = re.findall(rf"^\| `{re.escape(model)}` .*$", GUIDE, re.M)
    return [int(cell.replace(",", "")) for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize("model", SPECS)
def test_a_token_costs_what_the_table_says(model: str, tmp_path: Path) -> None:
    spec = SPECS[model]
    codecs = [make_codec(name, spec) for name in ("exact", "int8")]
    below = [codec.payload_bytes // spec.block_size for codec in codecs]
    in_memory = [2**30 // codec.payload_bytes * spec.block_size for codec in codecs]
    on_disk = []
    for codec in codecs:
        form = DiskFormat("m", HASH_VERSION, spec.block_size, codec.payload_bytes, codec.name)
        store = DiskStore(tmp_path, form, 100 * 2**30)
        on_disk.append(store.num_slots * spec.block_size)
        store.close()
    assert figures(model) == [spec.bytes_per_token, *below, *in_memory, *on_disk]
    on_device = replace(spec, dtype="int8", bytes_per_element=1)
    assert on_device.bytes_per_token == below[1]
    ratio = spec.bytes_per_token / on_device.bytes_per_token
    assert f"{ratio:.1f} times ({spec.dtype})" in GUIDE


def test_the_numbers_in_the_text_are_the_codes() -> None:
    config = WorkerConfig(endpoint="", worker_id="w")
    assert (CUDA_SHARE_OF_FREE, config.disk_cache_size) == (0.25, 10 * 2**30)
    assert "a quarter of the free memory with a GPU" in GUIDE
    assert (REST_AFTER_FAILURE_S, FORGET_S, SAVE_TIMEOUT_S) == (10, 600, 5)
    assert "left alone for ten seconds" in GUIDE
    assert "fades by half\nin ten minutes" in GUIDE
    assert "for up to five seconds" in GUIDE
    assert WRITE_BATCH_BYTES == 16 * 2**20
    a_day = 200 * 86_400
    assert round(a_day * figures("Llama-3.1-8B")[0] / 1e12, 1) == 2.3
    assert round(a_day * figures("Llama-3.1-8B")[2] / 1e12, 1) == 1.2
