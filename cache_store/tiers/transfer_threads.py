"""Carries out transfers beside the engine: one thread for host memory, one for the disk.

Owns the threads, their queues and the copying of each block from tier to tier. Knows nothing of the
tree: an order names ids, and for the disk the keys that are verified on the way.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_store.events import Tier
from cache_store.tiers.codec import BlockCodec, PayloadRows
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.device_blocks import DeviceBlocks, device_blocks
from cache_store.tiers.disk_format import CorruptBlock, DiskStoreError, MissingBlock
from cache_store.tiers.disk_store import DiskStore
from cache_store.tiers.host import HostTier
from cache_store.transfer import TransferOrder, TransferResult

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class TierStorage:
    """Where payloads are; a tier that does not exist is None. ``write_blocks``: a batch to disk."""

    device: DeviceTier
    codec: BlockCodec
    host: HostTier | None
    disk: DiskStore | None
    write_blocks: int = 64


@dataclass(frozen=True, slots=True)
class _Deletion:
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Task:
    order: TransferOrder
    ordered_at: float


class TransferThreads:
    """The TransferExecutor of a worker. ``on_result`` is called by a transfer thread whenever a
    result can be taken: it wakes the engine, and does no more."""

    def __init__(self, storage: TierStorage, on_result: Callable[[], None]) -> None:
        self._on_result = on_result
        self._results: deque[TransferResult] = deque()
        self._lanes: dict[Tier, _Lane] = {}
        for tier, part in ((Tier.HOST, storage.host), (Tier.DISK, storage.disk)):
            if part is not None:
                self._lanes[tier] = _Lane(tier, storage, self._post)

    def submit(self, order: TransferOrder) -> None:
        lane = Tier.DISK if Tier.DISK in (order.source, order.target) else Tier.HOST
        self._lanes[lane].put(_Task(order, time.monotonic()))

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        if tier is Tier.DISK:
            self._lanes[tier].put(_Deletion(block_ids))

    def take_results(self) -> list[TransferResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        for lane in self._lanes.values():
            lane.join()

    def _post(self, result: TransferResult) -> None:
        self._results.append(result)
        self._on_result()


class _Lane:
    """One thread, which does what it is told in order."""

    def __init__(
        self, tier: Tier, storage: TierStorage, post: Callable[[TransferResult], None]
    ) -> None:
        self._storage = storage
        self._post = post
        self._tasks: queue.SimpleQueue[_Task | _Deletion | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"transfer-{tier.value}", daemon=True
        )
        self._thread.start()

    def put(self, task: _Task | _Deletion | None) -> None:
        self._tasks.put(task)

    def join(self) -> None:
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("%s has not ended after %.0f s", self._thread.name, _CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        copier = _Copier(self._storage)
        while (task := self._tasks.get()) is not None:
            if isinstance(task, _Deletion):
                copier.delete(task.block_ids)
                continue
            num_done, failure = copier.copy(task.order)
            seconds = time.monotonic() - task.ordered_at
            error = _words_of(failure)
            if failure is not None:
                order = task.order
                logger.warning(
                    "%s to %s: %d of %d blocks: %s",
                    order.source,
                    order.target,
                    num_done,
                    len(order.source_ids),
                    error,
                )
            is_corrupt = isinstance(failure, CorruptBlock) and not isinstance(failure, MissingBlock)
            self._post(TransferResult(task.order.number, num_done, seconds, error, is_corrupt))
        if self._storage.disk is not None and self._thread.name.endswith(Tier.DISK.value):
            self._storage.disk.close()


class _Copier:
    """The copying itself, with the buffers that one thread needs for it."""

    def __init__(self, storage: TierStorage) -> None:
        self._codec = storage.codec
        self._host = storage.host
        self._disk = storage.disk
        self._write_blocks = storage.write_blocks
        self._device: DeviceBlocks = device_blocks(storage.device, storage.codec)
        self._staging = self._device.new_rows(0)

    def copy(self, order: TransferOrder) -> tuple[int, Exception | None]:
        """How many leading blocks arrived, and why the next one did not (None if all did)."""
        num_done = 0
        try:
            for count in self._copy(order):
                num_done += count
        except DiskStoreError as error:
            return num_done, error
        except Exception as error:  # whatever it is, the blocks are a miss and the engine goes on
            logger.exception("a transfer failed")
            return num_done, error
        return num_done, None

    def delete(self, block_ids: Sequence[int]) -> None:
        assert self._disk is not None
        try:
            self._disk.delete(block_ids)
        except DiskStoreError as error:
            logger.warning("blocks on disk could not be erased: %s", error)
        except Exception:  # a thread that ends would leave every later order without a result
            logger.exception("blocks on disk could not be erased")

    def _copy(self, order: TransferOrder) -> Iterator[int]:
        """Yields how many more blocks have arrived."""
        num_blocks = len(order.source_ids)
        if order.target is Tier.DISK:
            for start in range(0, num_blocks, self._write_blocks):
                yield self._write_batch(order, start)
        elif order.source is Tier.DISK:
            for start in range(0, num_blocks, self._device.batch_blocks):
                yield from self._read_batch(order, start)
        else:
            assert self._host is not None
            if order.target is Tier.HOST:
                rows = PayloadRows(self._host.payloads, order.target_ids)
                self._device.store(order.source_ids, rows)
            else:
                rows = PayloadRows(self._host.payloads, order.source_ids)
                self._device.load(rows, order.target_ids)
            yield num_blocks

    def _read_batch(self, order: TransferOrder, start: int) -> Iterator[int]:
        """What is read before a failure arrives."""
        assert self._disk is not None
        stop = min(start + self._device.batch_blocks, len(order.source_ids))
        rows = self._staging_rows(stop - start)
        num_read = 0
        failure: Exception | None = None
        try:
            for index in range(start, stop):
                self._disk.read(order.source_ids[index], order.keys[index], rows[num_read].data)
                num_read += 1
        except Exception as error:
            failure = error
        self._device.load(
            PayloadRows(rows, range(num_read)), order.target_ids[start : start + num_read]
        )
        yield num_read
        if failure is not None:
            raise failure

    def _write_batch(self, order: TransferOrder, start: int) -> int:
        assert self._disk is not None
        stop = min(start + self._write_blocks, len(order.source_ids))
        rows = self._staging_rows(stop - start)
        sources = order.source_ids[start:stop]
        if order.source is Tier.HOST:
            assert self._host is not None
            for row, source_id in zip(rows, sources, strict=True):
                np.copyto(row, self._host.payloads[source_id])
        else:
            self._device.store(sources, PayloadRows(rows, range(stop - start)))
        items = []
        for index, row in enumerate(rows, start):
            # A partly filled block's other rows may be what an earlier owner left there.
            self._codec.clear_rows(row, order.keys[index].num_rows)
            items.append((order.target_ids[index], order.keys[index], row.data))
        self._disk.write(items)
        return stop - start

    def _staging_rows(self, num_rows: int) -> NDArray[np.uint8]:
        if len(self._staging) < num_rows:
            self._staging = self._device.new_rows(num_rows)
        return self._staging[:num_rows]


def _words_of(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return str(failure) if isinstance(failure, DiskStoreError) else type(failure).__name__
