"""The system calls of the disk store: whole writes, whole reads, and erasing.

Owns what to do where the system does less than was asked. Knows nothing of records. Functions
raise OSError as the system does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
_ZERO_CHUNK_BYTES = 1 << 20
_PARTS_PER_CALL = 512  # the system takes at most 1,024 (IOV_MAX)


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """A descriptor that is closed at the end; never one of a symbolic link's target."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> int:
    """Write the parts one after another from ``offset``; returns the offset after them."""
    views = [memoryview(part).cast("B") for part in parts]
    views = [view for view in views if view.nbytes]
    while views:
        written = os.pwritev(descriptor, views[:_PARTS_PER_CALL], offset)
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += written
        views = _after(views, written)
    return offset


def read_all(descriptor: int, into: Sequence[memoryview], offset: int) -> bool:
    """Fill the buffers from ``offset``; False if the file ends before."""
    views = list(into)
    while views:
        num_read = os.preadv(descriptor, views, offset)
        if not num_read:
            return False
        offset += num_read
        views = _after(views, num_read)
    return True


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers once ``num_bytes`` of them are done."""
    index = 0
    while index < len(views) and num_bytes >= views[index].nbytes:
        num_bytes -= views[index].nbytes
        index += 1
    rest = views[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def erase(descriptor: int, offset: int, length: int) -> None:
    """Make the bytes zeros, and give their room back where the file system can."""
    if punch_hole(descriptor, offset, length):
        return
    zeros = bytes(min(length, _ZERO_CHUNK_BYTES))
    end = offset + length
    while offset < end:
        offset = write_all(descriptor, [memoryview(zeros)[: end - offset]], offset)


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """False where the file system, the kernel or the C library has no holes."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    size = ctypes.c_int64
    if fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, size(offset), size(length)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
        return False
    raise OSError(code, os.strerror(code))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
