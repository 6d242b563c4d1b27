"""The KV pool's size by default and when asked for, from what is free."""

from __future__ import annotations

import pytest
import torch

from cache_store.block import KVCacheSpec
from model_worker import pool_budget
from model_worker.loader.errors import ModelLoadError
from model_worker.pool_budget import CPU_DEFAULT_CONVERSATIONS, plan_pool
from model_worker.protocol import WorkerConfig

GIB = 2**30
CPU = torch.device("cpu")
# 1 MiB a block of 32 tokens
SPEC = KVCacheSpec(
    block_size=32,
    num_layers=8,
    num_kv_heads=8,
    head_dim=64,
    dtype="float32",
    bytes_per_element=4,
)


def config(kv_cache_memory: int | None = None) -> WorkerConfig:
    return WorkerConfig(endpoint="ipc://x", worker_id="w", kv_cache_memory=kv_cache_memory)


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(pool_budget, "free_host_memory", lambda: num_bytes)


@pytest.mark.parametrize(
    ("free", "max_model_len", "num_blocks"),
    [
        (64 * GIB, 131_072, 4096 + 1),  # what one needs, though more than the usual 4 GiB
        (64 * GIB, 32_768, 4096),  # 4 GiB
        (8 * GIB, 32_768, 2048),  # a quarter of what is free
        (64 * GIB, 3_200, 101 * CPU_DEFAULT_CONVERSATIONS),
    ],
)
def test_by_default(
    monkeypatch: pytest.MonkeyPatch, free: int, max_model_len: int, num_blocks: int
) -> None:
    with_free(monkeypatch, free)
    assert SPEC.bytes_per_block == 2**20
    assert plan_pool(config(), SPEC, max_model_len, CPU).num_blocks == num_blocks


def test_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 8 * GIB)
    assert plan_pool(config(7 * GIB), SPEC, 1024, CPU).num_blocks == 7 * 1024


def test_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 8 * GIB)
    with pytest.raises(ModelLoadError) as caught:
        plan_pool(config(9 * GIB), SPEC, 1024, CPU)
    assert str(caught.value) == (
        "--kv-cache-memory asks for 9.00 GiB and 8.00 GiB are free once the weights are loaded"
    )
