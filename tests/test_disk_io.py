"""Erasing: zeros for every reader, and room given back where the file system can."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from cache_store.tiers import disk_io


def erased(path: Path, offset: int, length: int) -> bytes:
    with disk_io.opened(path, os.O_RDWR) as descriptor:
        disk_io.erase(descriptor, offset, length)
    return path.read_bytes()


def test_a_hole_gives_its_room_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 65536)
    content = erased(path, 8192, 32768)
    assert content == b"x" * 8192 + bytes(32768) + b"x" * 24576
    assert path.stat().st_blocks * 512 == 32768


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV])
def test_without_holes_zeros_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            self.fallocate = lambda *_: -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    monkeypatch.setattr(disk_io, "_ZERO_CHUNK_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 65536)
    content = erased(path, 8192, 32768)
    assert content == b"x" * 8192 + bytes(32768) + b"x" * 24576


def test_a_failure_is_no_lack_of_holes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with disk_io.opened(path, os.O_RDONLY) as descriptor:
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            disk_io.punch_hole(descriptor, 0, 1)
        assert caught.value.errno == errno.EBADF


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with (
        pytest.raises(OSError, match="symbolic links"),
        disk_io.opened(tmp_path / "link", os.O_RDONLY),
    ):
        pass
