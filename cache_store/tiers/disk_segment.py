"""One segment file: the records of one batch, written once and then only erased.

Owns the file and where in it each record lies. Knows nothing of slots, of limits or of which
records are wanted. A record is erased in place (a hole, or zeros), the dead end of a file is cut
off, and a file without a live record is removed. Not thread-safe.

A segment becomes visible by its rename, whole. ``close_holes`` is the one later write: it copies
the last records into holes before it cuts them off, a record's header after the rest of it, so
that a process killed in between leaves a record twice and never half of one that counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache_store.tiers.disk_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    Buffer,
    CorruptBlock,
    DiskStoreError,
    RecordCodec,
    RecordMeta,
)
from cache_store.tiers.disk_io import erase, opened, read_all, sync_folder, write_all
from cache_store.transfer import BlockKey

ENTRY_BYTES = 64  # of a file's name in its folder
_SECTOR_BYTES = 512  # the unit of st_blocks
TEMP_SUFFIX = ".tmp"


@dataclass(slots=True)
class Space:
    """What the files of one store take.

    ``charged_bytes`` count against its limit: the files' lengths, holes included, and their names.
    Lengths are the same on every file system, with holes or without, so what fits by them always
    fits. ``real_bytes`` are the blocks that the files have just now.
    """

    charged_bytes: int = 0
    real_bytes: int = 0


class FileSize:
    """One file's share of a Space."""

    __slots__ = ("_charged", "_real", "_space")

    def __init__(self, space: Space) -> None:
        self._space = space
        self._charged = self._real = 0

    @property
    def charged_bytes(self) -> int:
        return self._charged

    def measure(self, status: os.stat_result) -> None:
        whole = -(-status.st_size // PAGE_BYTES) * PAGE_BYTES
        self._set(whole + ENTRY_BYTES, status.st_blocks * _SECTOR_BYTES)

    def expect(self, num_bytes: int) -> None:
        """Of a file that is being written: as if it were there."""
        self._set(num_bytes + ENTRY_BYTES, num_bytes)

    def forget(self) -> None:
        self._set(0, 0)

    def _set(self, charged: int, real: int) -> None:
        self._space.charged_bytes += charged - self._charged
        self._space.real_bytes += real - self._real
        self._charged, self._real = charged, real


class Record:
    """Where one record lies; ``segment`` is None once it is erased."""

    __slots__ = ("index", "segment")

    def __init__(self, segment: Segment, index: int) -> None:
        self.segment: Segment | None = segment
        self.index = index


class Segment:
    """A finished file. ``records[i]`` is None where record i is erased.

    A segment that is not ``is_own`` belongs to another process: it is read, never written, and
    takes no space of this store.
    """

    def __init__(
        self, path: Path, codec: RecordCodec, space: Space, *, is_own: bool = True
    ) -> None:
        self.path = path
        self.is_own = is_own
        self.records: list[Record | None] = []
        self.num_live = 0
        self._codec = codec
        self._size = FileSize(space)

    @property
    def num_holes(self) -> int:
        return len(self.records) - self.num_live

    @classmethod
    def create(
        cls,
        path: Path,
        codec: RecordCodec,
        space: Space,
        blocks: Sequence[tuple[BlockKey, Buffer]],
        stored_at: float,
    ) -> Segment:
        """Write a whole segment: a temporary file, fsync, rename, fsync of the folder.

        Raises OSError, with nothing left of it.
        """
        segment = cls(path, codec, space)
        segment._size.expect(HEAD_BYTES + len(blocks) * codec.stride)
        temporary = path.with_name(path.name + TEMP_SUFFIX)
        try:
            with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                offset = write_all(descriptor, [codec.head], 0)
                for key, payload in blocks:
                    parts = codec.encode(key, stored_at, payload)
                    offset = write_all(descriptor, parts, offset)
                os.fsync(descriptor)
                status = os.fstat(descriptor)
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException:
            for name in (temporary, path):
                with suppress(OSError):
                    name.unlink(missing_ok=True)
            segment._size.forget()
            raise
        segment.records = [Record(segment, index) for index in range(len(blocks))]
        segment.num_live = len(blocks)
        segment._size.measure(status)
        return segment

    def load(self) -> list[tuple[Record, RecordMeta]]:
        """Find the records of an existing file from their leads alone. What is damaged or cut
        short is erased, if the file is this store's. Raises OSError."""
        codec = self._codec
        is_clean = True
        found = []
        with opened(self.path, os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
            num_bytes = max(0, status.st_size - HEAD_BYTES)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no payload is read ahead
            for index in range(num_bytes // codec.stride):
                try:
                    meta = self._read_lead(descriptor, index)
                except CorruptBlock:
                    meta, is_clean = None, False
                record = Record(self, index) if meta else None
                self.records.append(record)
                if record is not None and meta is not None:
                    found.append((record, meta))
        self.num_live = len(found)
        if self.is_own:
            self._size.measure(status)
            if not is_clean or num_bytes % codec.stride or not (self.records and self.records[-1]):
                self._erase_dead()
        return found

    def _read_lead(self, descriptor: int, index: int) -> RecordMeta | None:
        lead = memoryview(bytearray(self._codec.lead_bytes))
        if not read_all(descriptor, [lead], self._offset(index)):
            raise CorruptBlock("a record on disk is cut short")
        return self._codec.decode_lead(lead)

    def read(self, index: int, key: BlockKey, into: memoryview) -> None:
        """Fill ``into`` with the payload of the record, all of it verified. Raises CorruptBlock
        (``into`` then holds anything) and OSError."""
        codec = self._codec
        lead = memoryview(bytearray(codec.lead_bytes))
        stored = codec.payload_buffer(into)
        with opened(self.path, os.O_RDONLY) as descriptor:
            is_whole = read_all(descriptor, [lead, stored], self._offset(index))
        if not is_whole:
            raise CorruptBlock("a record on disk is cut short")
        meta = codec.decode_lead(lead)
        if meta is None or meta.key != key:
            raise CorruptBlock("a record on disk is another block's, or erased")
        codec.check_payload(meta, stored, into)

    def erase(self, records: Iterable[Record]) -> None:
        """Take these records' bytes out of the file. Where that fails the whole file goes, since
        deletion counts for more than the others in it. Raises DiskStoreError if even that fails."""
        dead = []
        for record in records:
            assert self.records[record.index] is record, "erased twice"
            self.records[record.index] = record.segment = None
            dead.append(record.index)
        self.num_live -= len(dead)
        self._erase_dead(sorted(dead))

    def _erase_dead(self, dead: Sequence[int] | None = None) -> None:
        """``dead`` are the indices whose bytes may still be there; None means all that are not
        live."""
        while self.records and self.records[-1] is None:
            self.records.pop()
        if not self.records:
            self.remove()
            return
        if dead is None:
            dead = [index for index, record in enumerate(self.records) if record is None]
        try:
            with opened(self.path, os.O_RDWR) as descriptor:
                os.ftruncate(descriptor, self._offset(len(self.records)))
                for start, count in _runs(dead, len(self.records)):
                    erase(descriptor, self._offset(start), count * self._codec.stride)
                self._size.measure(os.fstat(descriptor))
        except OSError:
            self.remove()

    def close_holes(self) -> None:
        """Move the last records into the holes and cut the file; it is then as short as can be."""
        try:
            with opened(self.path, os.O_RDWR) as descriptor:
                hole = 0
                while self.num_holes:
                    hole = self.records.index(None, hole)
                    self._move_last(descriptor, hole)
                self._size.measure(os.fstat(descriptor))
        except OSError:
            self.remove()

    def _move_last(self, descriptor: int, hole: int) -> None:
        record = self.records[-1]
        assert record is not None, "a file ends with a live record"
        content = memoryview(bytearray(self._codec.stride))
        source, target = self._offset(record.index), self._offset(hole)
        if not read_all(descriptor, [content], source):
            raise OSError("a segment is cut short")
        write_all(descriptor, [content[HEADER_BYTES:]], target + HEADER_BYTES)
        write_all(descriptor, [content[:HEADER_BYTES]], target)
        self.records[hole], record.index = record, hole
        self.records.pop()
        while self.records[-1] is None:
            self.records.pop()
        os.ftruncate(descriptor, self._offset(len(self.records)))

    def remove(self) -> None:
        """Delete the file; its records are gone. Raises DiskStoreError."""
        for record in self.records:
            if record is not None:
                record.segment = None
        self.records.clear()
        self.num_live = 0
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise DiskStoreError(f"cannot delete {self.path}: {error.strerror}") from error
        self._size.forget()

    def _offset(self, index: int) -> int:
        return HEAD_BYTES + index * self._codec.stride


def _runs(indices: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers below ``end`` in a sorted sequence."""
    start = count = 0
    for index in indices:
        if index >= end:
            break
        if count and index == start + count:
            count += 1
            continue
        if count:
            yield start, count
        start, count = index, 1
    if count:
        yield start, count
