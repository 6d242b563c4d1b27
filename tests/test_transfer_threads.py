"""Copies between real tiers, each way, beside the engine: what arrives, what fails, what ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cache_store.block_hash import HASH_VERSION
from cache_store.events import Tier
from cache_store.tiers.codec import make_codec
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.disk_format import DiskFormat, DiskStoreError
from cache_store.tiers.disk_store import DiskStore
from cache_store.tiers.host import HostTier
from cache_store.tiers.transfer_threads import TierStorage, TransferThreads
from cache_store.transfer import BlockKey, TransferOrder, TransferResult
from tests.device_kit import block_of, make_spec, make_tier
from tests.disk_kit import BLOCK_SIZE, chain, files_in, num_descriptors, raw_content

KEYS = chain(1, 6)
PARTIAL = chain(2, 1, num_last=2)[0]
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@dataclass
class Bench:
    device: DeviceTier
    host: HostTier
    disk: DiskStore
    threads: TransferThreads
    woken: threading.Event
    results: dict[int, TransferResult] = field(default_factory=dict)
    num_orders: int = 0

    def order(
        self, source: Tier, target: Tier, source_ids: list[int], target_ids: list[int],
        keys: list[BlockKey] | None = None,
    ) -> int:  # fmt: skip
        self.num_orders += 1
        names = () if Tier.DISK not in (source, target) else keys or KEYS[: len(source_ids)]
        self.threads.submit(
            TransferOrder(self.num_orders, source, target, source_ids, target_ids, names)
        )
        return self.num_orders

    def result(self, number: int) -> TransferResult:
        deadline = time.monotonic() + 10
        while number not in self.results:
            assert time.monotonic() < deadline, f"order {number} has no result"
            self.woken.wait(0.1)
            self.woken.clear()
            self.take()
        return self.results[number]

    def take(self) -> None:
        for result in self.threads.take_results():
            assert result.number not in self.results, "two results for one order"
            self.results[result.number] = result

    def copy(self, *arguments: Tier | list[int], keys: list[BlockKey] | None = None) -> None:
        """An order that has to succeed."""
        source, target, source_ids, target_ids = arguments
        assert isinstance(source, Tier)
        assert isinstance(target, Tier)
        assert isinstance(source_ids, list)
        assert isinstance(target_ids, list)
        result = self.result(self.order(source, target, source_ids, target_ids, keys))
        assert (result.num_done, result.error) == (len(source_ids), "")
        assert 0 <= result.seconds < 10

    def fill(self, block_id: int, value: float) -> None:
        self.device.keys[:, block_id] = value
        self.device.values[:, block_id] = value


@contextmanager
def bench(
    folder: Path, codec_name: str = "exact", write_blocks: int = 2, dtype: str = "float32"
) -> Iterator[Bench]:
    spec = make_spec(dtype, block_size=BLOCK_SIZE)
    device = make_tier(spec, num_blocks=8)
    codec = make_codec(codec_name, spec)
    form = DiskFormat("model", HASH_VERSION, BLOCK_SIZE, codec.payload_bytes, codec.name)
    disk = DiskStore(folder, form, 40 * 8192)
    disk.scan()
    host = HostTier(8, codec.payload_bytes, is_pinned=False)
    woken = threading.Event()
    threads = TransferThreads(TierStorage(device, codec, host, disk, write_blocks), woken.set)
    try:
        yield Bench(device, host, disk, threads, woken)
    finally:
        threads.close()


def test_to_host_and_back(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        before = [block_of(b.device, i) for i in range(8)]
        b.copy(DEVICE, HOST, [1, 5, 2], [7, 0, 3])
        for block_id in (1, 2, 5):
            b.fill(block_id, 9.0)
        b.copy(HOST, DEVICE, [3, 7, 0], [1, 5, 2])  # each somewhere else
        assert torch.equal(block_of(b.device, 1), before[2])
        assert torch.equal(block_of(b.device, 5), before[1])
        assert torch.equal(block_of(b.device, 2), before[5])
        for block_id in (0, 3, 4, 6, 7):
            assert torch.equal(block_of(b.device, block_id), before[block_id])


def test_to_disk_and_back(tmp_path: Path) -> None:
    """In batches of two: five blocks are three files."""
    with bench(tmp_path) as b:
        before = [block_of(b.device, i) for i in range(8)]
        b.copy(DEVICE, DISK, [0, 1, 2, 3, 4], [10, 11, 12, 13, 14])
        assert len(files_in(tmp_path)) == 3
        for block_id in range(8):
            b.fill(block_id, 9.0)
        b.copy(DISK, DEVICE, [14, 10], [0, 1], keys=[KEYS[4], KEYS[0]])
        assert torch.equal(block_of(b.device, 0), before[4])
        assert torch.equal(block_of(b.device, 1), before[0])


def test_from_host_to_disk_and_back(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        before = [block_of(b.device, i) for i in range(8)]
        b.copy(DEVICE, HOST, [1, 2], [4, 5])
        b.copy(HOST, DISK, [4, 5], [0, 1])
        b.host.payloads[4][:] = 0
        b.host.payloads[5][:] = 0
        b.copy(DISK, DEVICE, [0, 1], [6, 7])
        assert torch.equal(block_of(b.device, 6), before[1])
        assert torch.equal(block_of(b.device, 7), before[2])


def test_int8_differs_by_little_and_only_once(tmp_path: Path) -> None:
    """Host to disk is a copy of the coded bytes, not a second coding."""
    with bench(tmp_path, "int8") as b:
        before = block_of(b.device, 0)
        b.copy(DEVICE, HOST, [0], [0])
        coded = b.host.payloads[0].tobytes()
        b.copy(HOST, DISK, [0], [3])
        b.copy(DISK, DEVICE, [3], [1])
        b.copy(HOST, DEVICE, [0], [2])
        assert torch.equal(block_of(b.device, 1), block_of(b.device, 2))
        difference = (block_of(b.device, 1) - before).abs().max()
        assert 0 < float(difference) <= float(before.abs().max()) / 127
        b.copy(DEVICE, HOST, [2], [1])
        assert b.host.payloads[1].tobytes() == coded


@pytest.mark.parametrize("codec_name", ["exact", "int8"])
def test_int8_of_the_device_goes_down_and_comes_back_as_it_is(
    tmp_path: Path, codec_name: str
) -> None:
    """Numbers and scales bit for bit, by each way, whatever coding is asked for below."""
    with bench(tmp_path, codec_name, dtype="int8") as b:
        before = [tensor.clone() for tensor in b.device.tensors]
        b.copy(DEVICE, HOST, [0, 1], [3, 4])
        b.copy(HOST, DISK, [3], [2])
        b.copy(DEVICE, DISK, [2], [5], keys=[KEYS[1]])
        for tensor in b.device.tensors:
            tensor[:, :3] = 9
        b.copy(DISK, DEVICE, [2, 5], [4, 6])
        b.copy(HOST, DEVICE, [4], [5])
        for tensor, old in zip(b.device.tensors, before, strict=True):
            assert torch.equal(tensor[:, [4, 5, 6]], old[:, [0, 1, 2]])
            assert torch.equal(tensor[:, [3, 7]], old[:, [3, 7]])


@pytest.mark.parametrize("through_host", [False, True])
def test_rows_of_an_earlier_owner_do_not_reach_the_disk(tmp_path: Path, through_host: bool) -> None:
    with bench(tmp_path) as b:
        b.fill(3, 1.0)
        needle = torch.full((8,), 12345.678).view(torch.uint8).numpy().tobytes()
        for tensor in (b.device.keys, b.device.values):
            tensor[:, 3, 2:] = 12345.678
        if through_host:
            b.copy(DEVICE, HOST, [3], [1])
            b.copy(HOST, DISK, [1], [0], keys=[PARTIAL])
        else:
            b.copy(DEVICE, DISK, [3], [0], keys=[PARTIAL])
        assert needle not in raw_content(tmp_path)
        b.copy(DISK, DEVICE, [0], [4], keys=[PARTIAL])
        assert bool((block_of(b.device, 4, num_rows=2) == 1.0).all())


def test_a_corrupt_record_ends_its_order_and_the_blocks_before_it_arrive(tmp_path: Path) -> None:
    with bench(tmp_path, write_blocks=1) as b:
        before = [block_of(b.device, i) for i in range(8)]
        b.copy(DEVICE, DISK, [0, 1, 2, 3], [0, 1, 2, 3])
        damaged = files_in(tmp_path)[2]
        content = bytearray(damaged.read_bytes())
        content[4096 + 1200] ^= 1  # in the payload
        damaged.write_bytes(content)
        b.fill(7, 9.0)
        result = b.result(b.order(DISK, DEVICE, [0, 1, 2, 3], [4, 5, 6, 7]))
        assert result.num_done == 2
        assert "does not match its checksum" in result.error
        assert torch.equal(block_of(b.device, 4), before[0])
        assert torch.equal(block_of(b.device, 5), before[1])
        assert bool((block_of(b.device, 7) == 9.0).all())  # nothing after it was touched
        b.copy(DISK, DEVICE, [3], [7], keys=[KEYS[3]])  # and the lane goes on


def test_another_key_is_a_failure(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.copy(DEVICE, DISK, [0], [0], keys=[KEYS[0]])
        result = b.result(b.order(DISK, DEVICE, [0], [1], [KEYS[1]]))
        assert result.num_done == 0
        assert result.error


def test_a_disk_that_cannot_be_written_fails_the_order(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with bench(folder) as b:
        b.copy(DEVICE, DISK, [0, 1], [0, 1])
        hidden = tmp_path / "hidden"
        folder.rename(hidden)
        result = b.result(b.order(DEVICE, DISK, [2, 3], [2, 3], KEYS[2:4]))
        assert result.num_done == 0
        assert "cannot write" in result.error
        hidden.rename(folder)
        b.copy(DEVICE, DISK, [2, 3], [2, 3], keys=KEYS[2:4])


def test_a_deletion_comes_before_what_is_ordered_after_it(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        first = block_of(b.device, 1)
        b.copy(DEVICE, DISK, [0], [5], keys=[KEYS[0]])
        b.threads.delete(DISK, [5])
        number = b.order(DEVICE, DISK, [1], [5], [KEYS[1]])
        assert b.result(number).num_done == 1
        b.copy(DISK, DEVICE, [5], [7], keys=[KEYS[1]])
        assert torch.equal(block_of(b.device, 7), first)
        assert KEYS[0].tokens not in raw_content(tmp_path)
        b.threads.delete(DISK, [5])
        result = b.result(b.order(DISK, DEVICE, [5], [6], [KEYS[1]]))
        assert result.num_done == 0
        assert "holds no block" in result.error
        b.threads.delete(HOST, [0])  # memory that is given up needs nothing


@pytest.mark.parametrize("error", [DiskStoreError("no"), RuntimeError("nor this")])
def test_a_deletion_that_fails_does_not_stop_what_follows(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(slots: object) -> None:
        raise error

    with bench(tmp_path) as b:
        b.copy(DEVICE, DISK, [0], [5], keys=[KEYS[0]])
        monkeypatch.setattr(b.disk, "delete", fail)
        b.threads.delete(DISK, [5])
        b.copy(DISK, DEVICE, [5], [7], keys=[KEYS[0]])


def test_whatever_a_copy_raises_is_a_failed_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    with bench(tmp_path) as b:
        b.copy(DEVICE, DISK, [0], [5], keys=[KEYS[0]])
        with monkeypatch.context() as patch:
            patch.setattr(b.disk, "read", fail)
            result = b.result(b.order(DISK, DEVICE, [5], [7], [KEYS[0]]))
        assert (result.num_done, result.error) == (0, "MemoryError")
        b.copy(DISK, DEVICE, [5], [7], keys=[KEYS[0]])


def test_each_result_wakes_the_engine(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.woken.clear()
        number = b.order(DEVICE, HOST, [0], [0])
        assert b.woken.wait(10)
        b.take()
        assert b.results[number].num_done == 1


def test_closing_finishes_what_was_ordered(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        orders = [b.order(DEVICE, DISK, [i], [i], [KEYS[i]]) for i in range(6)]
        orders.append(b.order(DEVICE, HOST, [0, 1, 2], [0, 1, 2]))
        b.threads.close()
        b.take()
        assert sorted(b.results) == orders
        assert all(not result.error for result in b.results.values())
    assert sum(path.stat().st_size > 0 for path in files_in(tmp_path)) == 6


def num_threads() -> int:
    """Without the one that takes a host tier's pages, which ends by itself."""
    return sum(thread.name != "host-tier-pages" for thread in threading.enumerate())


def test_nothing_is_left_of_threads_and_files(tmp_path: Path) -> None:
    gc.collect()
    threads, descriptors = num_threads(), num_descriptors()
    for _ in range(5):
        with bench(tmp_path) as b:
            b.copy(DEVICE, DISK, [0, 1], [0, 1])
            b.copy(DISK, DEVICE, [0], [2])
            assert num_threads() == threads + 2
    assert (num_threads(), num_descriptors()) == (threads, descriptors)
