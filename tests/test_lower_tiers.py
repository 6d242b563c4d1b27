"""The tiers below the device as they are configured: sizes, refusals that name a flag, restarts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.block_hash import Namespace
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from model_worker.loader.errors import ModelLoadError
from model_worker.lower_tiers import WorkerTiers, build_lower_tiers
from model_worker.memory import free_host_memory
from model_worker.worker_config import WorkerConfig
from tests.device_kit import make_spec, make_tier
from tests.disk_kit import raw_content

SPEC = make_spec()
BLOCK_BYTES = SPEC.bytes_per_block
NUM_DEVICE = 16
IDS = np.arange(1_000_000, 1_000_010, dtype=np.int32)  # two blocks and a half


@contextmanager
def lower_tiers(lines: list[str] | None = None, **settings: Any) -> Iterator[WorkerTiers | None]:
    config = WorkerConfig(endpoint="", worker_id="w", **settings)
    progress = (lambda line: None) if lines is None else lines.append
    tier = make_tier(SPEC, NUM_DEVICE)
    tiers = build_lower_tiers(config, tier, "model", lambda: None, lambda: None, progress)
    try:
        yield tiers
    finally:
        if tiers is not None:
            tiers.threads.close()


def make_cache(tiers: WorkerTiers) -> PrefixCache:
    policy = make_eviction_policy("lru")
    return PrefixCache(NUM_DEVICE, SPEC.block_size, policy, tiers.lower)


def store(cache: PrefixCache, namespace: Namespace) -> None:
    lease = cache.acquire(cache.match(namespace, IDS))
    assert cache.allocate(lease, len(IDS))
    cache.release(lease, IDS, len(IDS))
    while cache.is_saving:
        cache.advance()


def refusal(**settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught, lower_tiers(**settings):
        pass
    return str(caught.value)


def test_there_are_none_unless_asked_for() -> None:
    """On the CPU the device's memory is the host's, so a host tier is not the default."""
    with lower_tiers() as tiers:
        assert tiers is None
    with lower_tiers(host_cache_size=0) as tiers:
        assert tiers is None


def test_sizes_are_in_whole_blocks(tmp_path: Path) -> None:
    lines: list[str] = []
    settings: dict[str, Any] = {
        "host_cache_size": 10 * BLOCK_BYTES + 1,
        "disk_cache_dir": str(tmp_path),
        "disk_cache_size": 1_000_000,
    }
    with lower_tiers(lines, **settings) as tiers:
        assert tiers is not None
        assert tiers.disk is not None
        assert tiers.lower.num_blocks == {Tier.HOST: 10, Tier.DISK: tiers.disk.num_slots}
        assert 80 <= tiers.disk.num_slots <= 1_000_000 // (BLOCK_BYTES + 4096)
    assert lines[0] == "Host tier: 10 blocks = 40 tokens, 15.00 KiB (exact:float32)"
    assert lines[1].startswith(f"Disk tier: {tiers.disk.num_slots} blocks = ")
    assert lines[2] == f"0 blocks found in {tmp_path}"


def test_int8_holds_more_in_the_same_size() -> None:
    with lower_tiers(host_cache_size=10 * BLOCK_BYTES, host_cache_dtype="int8") as tiers:
        assert tiers is not None
        assert tiers.lower.num_blocks == {Tier.HOST: 26}  # 8 + 4 bytes a vector instead of 32


def test_a_host_tier_that_does_not_fit_names_its_flag() -> None:
    size = free_host_memory() * 2
    assert refusal(host_cache_size=size).startswith("--host-cache-size asks for ")
    few = BLOCK_BYTES - 1
    assert refusal(host_cache_size=few).startswith("--host-cache-size 1.50 KiB holds no block of ")


def test_a_disk_tier_that_cannot_be_names_its_flags(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    said = refusal(disk_cache_dir=str(file))
    assert said.startswith(f"--disk-cache-dir {file}, --disk-cache-size 10.00 GiB: ")
    assert "cannot be used" in said
    said = refusal(disk_cache_dir=str(tmp_path / "small"), disk_cache_size=2**14)
    assert "--disk-cache-size 16.00 KiB: a disk cache of 16384 bytes holds no block" in said
    said = refusal(disk_cache_dir=str(tmp_path / "d"), encryption_key_file=str(tmp_path / "none"))
    assert said.startswith("--encryption-key-file: the key file ")


def key_file(folder: Path) -> str:
    path = folder / f"{secrets.token_hex(4)}.key"
    path.write_bytes(secrets.token_bytes(32))
    path.chmod(0o600)
    return str(path)


def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"disk_cache_dir": str(tmp_path), "disk_cache_size": 1_000_000}
    namespace = Namespace("model", cache_salt="s")
    with lower_tiers(**settings) as tiers:
        assert tiers is not None
        cache = make_cache(tiers)
        assert tiers.restore_into(cache) == 0
        store(cache, namespace)
    lines: list[str] = []
    with lower_tiers(lines, **settings) as tiers:
        assert tiers is not None
        cache = make_cache(tiers)
        assert tiers.restore_into(cache) == 3
        assert tiers.found == []
        report = cache.inspect(namespace, IDS)
        assert (report.num_device_tokens, report.num_disk_tokens) == (0, 10)
        assert cache.inspect(Namespace("model"), IDS).num_disk_tokens == 0
        cache.check_integrity(())
    assert lines[-1] == f"3 blocks found in {tmp_path}"


def test_another_key_finds_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    settings: dict[str, Any] = {"disk_cache_dir": str(folder), "disk_cache_size": 1_000_000}
    with lower_tiers(**settings, encryption_key_file=key_file(tmp_path)) as tiers:
        assert tiers is not None
        store(make_cache(tiers), Namespace("model"))
    assert IDS[:4].tobytes() not in raw_content(folder)
    others: tuple[dict[str, Any], ...] = ({"encryption_key_file": key_file(tmp_path)}, {})
    for other in others:
        with lower_tiers(**settings, **other) as tiers:
            assert tiers is not None
            assert tiers.found == []
            assert tiers.restore_into(make_cache(tiers)) == 0


@pytest.mark.parametrize("changed", ["dtype", "model"])
def test_blocks_of_another_kind_are_not_found(tmp_path: Path, changed: str) -> None:
    settings: dict[str, Any] = {"disk_cache_dir": str(tmp_path), "disk_cache_size": 1_000_000}
    with lower_tiers(**settings) as tiers:
        assert tiers is not None
        store(make_cache(tiers), Namespace("model"))
    fingerprint = "another" if changed == "model" else "model"
    if changed == "dtype":
        settings["host_cache_dtype"] = "int8"
    config = WorkerConfig(endpoint="", worker_id="w", **settings)
    tiers = build_lower_tiers(
        config, make_tier(SPEC), fingerprint, lambda: None, lambda: None, lambda line: None
    )
    assert tiers is not None
    assert tiers.found == []
    tiers.threads.close()
