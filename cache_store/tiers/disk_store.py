"""Whole KV blocks in files: written in batches, read back verified, erased at once.

Owns which record of which file each slot is, the limit, and what a start finds. It decides nothing:
which block goes to which slot, and which one leaves, its caller says. Knows nothing of tensors.

One thread at a time calls it (the disk I/O thread); ``num_slots`` and ``usage_bytes`` may be read
by any thread at any time and cost nothing.

Durability: a batch is one file, with one fsync of it and one of its folder, so what ``write``
returned from is there after a power cut. Erasing is visible at once to every reader of the file,
and durable when the file system next commits (seconds). A power cut in between can bring an erased
record back, never a wrong one.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cache_store.cipher import Cipher
from cache_store.tiers.disk_folder import DiskFolder, read_head, segments_in
from cache_store.tiers.disk_format import (
    HEAD_BYTES,
    PAGE_BYTES,
    Buffer,
    CorruptBlock,
    DiskFormat,
    DiskStoreError,
    HeadKind,
    MissingBlock,
    RecordCodec,
)
from cache_store.tiers.disk_index import FoundBlock, choose
from cache_store.tiers.disk_segment import ENTRY_BYTES, Record, Segment, Space
from cache_store.token_bytes import TOKEN_BYTES
from cache_store.transfer import BlockKey

_FOLDER_BYTES = 4 * PAGE_BYTES  # the folders themselves and the lock

logger = logging.getLogger(__name__)


class DiskStore:
    """Blocks by slot number, 0 to ``num_slots`` - 1, in a folder that stays within ``max_bytes``.

    Each live process has a share of its own, so two on one folder take up to twice ``max_bytes``.
    ``num_slots`` assumes the worst, a file per block; as long as no more slots are in use, there
    is room.

    Raises DiskStoreError if the folder cannot be used or ``max_bytes`` holds no block.
    """

    def __init__(
        self,
        folder: Path | str,
        format: DiskFormat,
        max_bytes: int,
        cipher: Cipher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._codec = RecordCodec(format, cipher)
        self._clock = clock
        self._limit_bytes = max_bytes - _FOLDER_BYTES
        self.num_slots = max(0, self._limit_bytes // self._segment_bytes(1))
        if not self.num_slots:
            raise DiskStoreError(
                f"a disk cache of {max_bytes} bytes holds no block: "
                f"one takes {self._segment_bytes(1) + _FOLDER_BYTES} bytes with its file"
            )
        self._space = Space()
        self._folder = DiskFolder(Path(folder), format.digest, self._space)
        self._segments: dict[Path, Segment] = {}
        self._slots: dict[int, Record] = {}
        self._has_scanned = False

    @property
    def usage_bytes(self) -> int:
        """Real blocks on disk of all files that count: this store's own, one that is being
        written, and stale ones."""
        return self._space.real_bytes

    def scan(self) -> list[FoundBlock]:
        """What earlier processes left, and what live ones have stored by now; called once, first.

        At most ``num_slots`` blocks, a key once, parents before children; the caller adopts or
        discards each. Everything else of this process's own is erased. No payload is read.
        Another process's blocks are only read: one that it erases is then a failed read here.
        Raises DiskStoreError.
        """
        assert not self._has_scanned, "a store is scanned once"
        self._has_scanned = True
        try:
            live_folders = self._folder.take_over()
            found = self._load_own()
        except OSError as error:
            raise self._failed("read", error) from error
        own = {block.ref for block in found}
        for path in (path for folder in live_folders for path in segments_in(folder)):
            found += self._load_foreign(path)
        block_bytes = self._codec.format.block_size * TOKEN_BYTES
        chosen = choose(found, own, block_bytes, self.num_slots)
        self.discard(own.difference(block.ref for block in chosen))
        self._make_room(0)
        return chosen

    def _load_own(self) -> list[FoundBlock]:
        found = []
        num_stale = num_plain = 0
        for path in segments_in(self._folder.path):
            kind = self._codec.head_kind(read_head(path))
            segment = Segment(path, self._codec, self._space)
            if kind is HeadKind.SAME:
                try:
                    found += _found(segment)
                except OSError:  # the device cannot read it: of no use, and perhaps full of ids
                    segment.remove()
                if segment.num_live:
                    self._segments[path] = segment
            elif kind is HeadKind.PLAIN:
                segment.remove()
                num_plain += 1
            elif kind is HeadKind.OTHER:
                self._folder.add_stale(path)
                num_stale += 1
        if num_stale:
            logger.warning(
                "%d files in %s have another key or format version; they are not used, and are "
                "deleted when room is needed",
                *(num_stale, self._folder.path),
            )
        if num_plain:
            logger.warning("%d files that were not encrypted have been deleted", num_plain)
        return found

    def _load_foreign(self, path: Path) -> list[FoundBlock]:
        if self._codec.head_kind(read_head(path)) is not HeadKind.SAME:
            return []
        try:
            return _found(Segment(path, self._codec, self._space, is_own=False))
        except OSError:  # its process has deleted it
            return []

    def adopt(self, slot: int, ref: Record) -> None:
        """Put a found block in a free slot."""
        self._check_slot(slot)
        assert slot not in self._slots, f"slot {slot} is in use"
        self._slots[slot] = ref

    def discard(self, refs: Iterable[Record]) -> None:
        """Erase found blocks that no slot has. Another process's are only let go."""
        groups: dict[Segment, list[Record]] = defaultdict(list)
        for ref in refs:
            if ref.segment is not None and ref.segment.is_own:
                groups[ref.segment].append(ref)
        failure = None
        for segment, records in groups.items():
            try:
                segment.erase(records)
            except DiskStoreError as error:
                failure = error
            self._forget_if_empty(segment)
        if failure is not None:
            raise failure

    def write(self, items: Sequence[tuple[int, BlockKey, Buffer]]) -> None:
        """Store blocks (slot, key, payload) as one file; what the slots held before is erased.

        A payload is contiguous memory of ``payload_bytes``. Raises DiskStoreError, and then none
        of the blocks is stored and the slots are empty.
        """
        assert self._has_scanned, "scan first: what lies in the folder is not counted yet"
        slots = [slot for slot, _, _ in items]
        assert len(set(slots)) == len(slots), "one slot twice in a batch"
        if not items:
            return
        self.delete([slot for slot in slots if slot in self._slots])
        for slot in slots:
            self._check_slot(slot)
        self._make_room(self._segment_bytes(len(items)))
        blocks = [(key, payload) for _, key, payload in items]
        path = self._folder.new_segment()
        try:
            segment = Segment.create(path, self._codec, self._space, blocks, self._clock())
        except OSError as error:
            raise self._failed("write", error) from error
        self._segments[path] = segment
        for slot, record in zip(slots, segment.records, strict=True):
            assert record is not None
            self._slots[slot] = record

    def read(self, slot: int, key: BlockKey, into: bytearray | memoryview) -> None:
        """Fill ``into``, writable contiguous memory of ``payload_bytes``, with a slot's payload.

        Namespace, parent, token ids and checksums are verified. Raises CorruptBlock if anything
        differs, MissingBlock if the block may well have been erased, DiskStoreError if it cannot be
        read; ``into`` then holds anything.
        """
        view = memoryview(into).cast("B")
        size = self._codec.format.payload_bytes
        assert view.nbytes == size, f"{view.nbytes} bytes for a payload of {size}"
        record = self._slots.get(slot)
        if record is None or record.segment is None:
            raise MissingBlock(f"slot {slot} of the disk cache holds no block")
        try:
            record.segment.read(record.index, key, view)
        except CorruptBlock as error:
            if record.segment.is_own:
                raise
            raise MissingBlock(f"{error}: its process may have erased it") from None
        except OSError as error:
            raise self._failed("read", error) from error

    def delete(self, slots: Iterable[int]) -> None:
        """Empty slots: their bytes, token ids included, are gone from the files on return.

        A slot that is empty already is passed over. Raises DiskStoreError if bytes could not be
        taken out; the slots are empty even so.
        """
        records = [self._slots.pop(slot) for slot in set(slots) if slot in self._slots]
        self.discard(records)

    def purge_stale(self) -> None:
        """Delete the files of other models, format versions and keys now, whatever room there is:
        their token ids are out of reach of ``delete``."""
        while self._folder.num_stale:
            self._folder.delete_oldest_stale()

    def close(self) -> None:
        """Release the folder; the blocks stay. Nothing else may be called afterwards."""
        self._folder.close()

    def _make_room(self, num_bytes: int) -> None:
        """Stale files go first, then holes are closed, those that need the fewest moves first."""
        while self._space.charged_bytes + num_bytes > self._limit_bytes:
            if self._folder.num_stale:
                self._folder.delete_oldest_stale()
                continue
            holed = (segment for segment in self._segments.values() if segment.num_holes)
            segment = max(holed, key=lambda s: s.num_holes / s.num_live, default=None)
            if segment is None:
                raise DiskStoreError("the disk cache is full: more blocks than it has slots")
            segment.close_holes()
            self._forget_if_empty(segment)

    def _forget_if_empty(self, segment: Segment) -> None:
        if not segment.num_live:
            self._segments.pop(segment.path, None)

    def _segment_bytes(self, num_blocks: int) -> int:
        return HEAD_BYTES + num_blocks * self._codec.stride + ENTRY_BYTES

    def _check_slot(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} of {self.num_slots}"

    def _failed(self, verb: str, error: OSError) -> DiskStoreError:
        reason = error.strerror or type(error).__name__
        return DiskStoreError(f"the disk cache in {self._folder.path} cannot {verb}: {reason}")


def _found(segment: Segment) -> list[FoundBlock]:
    return [FoundBlock(meta.key, meta.stored_at, record) for record, meta in segment.load()]
