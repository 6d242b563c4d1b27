"""The folders of the disk tier: which is this process's, and what else of ours lies about.

Owns names, locks and the files that are of no use any more. Knows nothing of records. The layout:

    <disk_cache_dir>/<digest of the format, 32 hex>/<k>/lock
                                                       /<24 hex>.kv       a segment
                                                       /<24 hex>.kv.tmp   one being written

A process holds the flock of one folder k, the first that is free; it is held as long as the
process lives, however it dies. Segments of folders whose processes are gone are moved here; those
of a live one are left alone. A file is taken for ours by its name and by its first bytes, both:
nothing else is ever deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cache_store.tiers.disk_format import HEAD_BYTES, SEGMENT_MAGIC, DiskStoreError
from cache_store.tiers.disk_io import opened
from cache_store.tiers.disk_segment import TEMP_SUFFIX, FileSize, Space

MAX_PROCESSES = 64  # on one model in one folder
_LOCK = "lock"
_MODEL = re.compile(r"[0-9a-f]{32}")
_SLOT = re.compile(r"[0-9]{1,2}")
_SEGMENT = re.compile(r"[0-9a-f]{24}\.kv")


@dataclass(frozen=True, slots=True)
class StaleFile:
    """A segment of ours that nobody can use: another model's, version's or key's."""

    path: Path
    modified_at: float
    size: FileSize


class DiskFolder:
    """This process's folder ``path``, locked until ``close``.

    Raises DiskStoreError if it cannot be made, locked or read.
    """

    def __init__(self, root: Path, digest: bytes, space: Space) -> None:
        self._model = root / digest.hex()
        self._space = space
        self._stale: list[StaleFile] = []  # the oldest first
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self._model)
            self._lock, self.path = self._claim()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise DiskStoreError(
                f"the disk cache folder {root} cannot be used: {reason}"
            ) from error
        self._root = root

    def _claim(self) -> tuple[int, Path]:
        for number in range(MAX_PROCESSES):
            path = self._model / str(number)
            _make_private(path)
            lock = _try_lock(path)
            if lock is not None:
                return lock, path
        raise DiskStoreError(
            f"the disk cache folder {self._model} is in use by {MAX_PROCESSES} processes"
        )

    def new_segment(self) -> Path:
        """A name not used before; names sort by time."""
        return self.path / f"{time.time_ns():016x}{secrets.token_hex(4)}.kv"

    def take_over(self) -> list[Path]:
        """Tidy up after the dead; returns the live folders of other processes on this format.

        Temporary files are removed, segments of this format's dead folders are moved here, and
        those of other formats become stale files. Raises OSError for this folder only.
        """
        _remove_temporary(self.path)
        live = []
        for path in _folders(self._model, _SLOT):
            if path == self.path:
                continue
            with _locked(path) as is_dead:
                if not is_dead:
                    live.append(path)
                    continue
                _remove_temporary(path)
                for segment in segments_in(path):
                    with suppress(OSError):
                        segment.rename(self.path / segment.name)
                _remove_if_empty(path)
        for model in _folders(self._root, _MODEL):
            if model != self._model:
                self._find_stale(model)
        return live

    def _find_stale(self, model: Path) -> None:
        for path in _folders(model, _SLOT):
            with _locked(path) as is_dead:
                if is_dead:
                    _remove_temporary(path)
                    for segment in segments_in(path):
                        if read_head(segment).startswith(SEGMENT_MAGIC):
                            self.add_stale(segment)
                    _remove_if_empty(path)

    def add_stale(self, path: Path) -> None:
        """Count a file of ours that is of no use until its room is needed."""
        try:
            status = path.lstat()
        except OSError:
            return
        size = FileSize(self._space)
        size.measure(status)
        self._stale.append(StaleFile(path, status.st_mtime, size))
        self._stale.sort(key=lambda stale: stale.modified_at)

    @property
    def num_stale(self) -> int:
        return len(self._stale)

    def delete_oldest_stale(self) -> None:
        """One file less to count: deleted, or left alone where its model is served again."""
        stale = self._stale.pop(0)
        stale.size.forget()
        folder = stale.path.parent
        if folder == self.path:
            _unlink(stale.path)
            return
        with _locked(folder) as is_dead:
            if is_dead:
                _unlink(stale.path)
                _remove_if_empty(folder)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def segments_in(folder: Path) -> list[Path]:
    """Files with a segment's name, in the order of their names."""
    return [folder / name for name in _file_names(folder) if _SEGMENT.fullmatch(name)]


def read_head(path: Path) -> bytes:
    """The first HEAD_BYTES of a file; nothing if it cannot be read."""
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
            return os.pread(descriptor, HEAD_BYTES, 0)
    except OSError:
        return b""


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink():
        raise NotADirectoryError(0, f"{path.name} is a symbolic link")
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def _try_lock(folder: Path) -> int | None:
    """The descriptor that holds the folder's lock, or None if it is another's, or just removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(folder / _LOCK, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # One who tidies up may have removed the file after it was opened here.
        if _is_same(descriptor, folder / _LOCK):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: Path) -> None:
    """Of a folder whose lock is held here: nothing of the dead stays where nothing is left."""
    with suppress(OSError):
        if os.listdir(folder) == [_LOCK]:
            _unlink(folder / _LOCK)
            folder.rmdir()
            folder.parent.rmdir()  # if it was the last


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder that nobody holds; False, and no lock, if that cannot be."""
    try:
        lock = _try_lock(folder)
    except OSError:
        lock = None
    if lock is None:
        yield False
        return
    try:
        yield True
    finally:
        os.close(lock)


def _remove_temporary(folder: Path) -> None:
    for name in _file_names(folder):
        is_named = name.endswith(TEMP_SUFFIX) and _SEGMENT.fullmatch(name[: -len(TEMP_SUFFIX)])
        # one that was hardly begun is empty, or zeros after a power cut
        if is_named and SEGMENT_MAGIC.startswith(
            read_head(folder / name)[: len(SEGMENT_MAGIC)].rstrip(b"\0")
        ):
            _unlink(folder / name)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _file_names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return []


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return sorted(
                parent / entry.name
                for entry in entries
                if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
