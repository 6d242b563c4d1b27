"""Content digests of large files, computed once and remembered.

Owns the digest (xxh3_128 over the xxh3_128 of fixed chunks, so that chunks can be hashed by
several threads) and a small file that remembers it by path, size and modification time: a restart
does not read 140 GB again. Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

CHUNK_BYTES = 64 * 1024 * 1024
READ_BYTES = 4 * 1024 * 1024
_MAX_THREADS = 8


class DigestCache:
    """Digests of files, remembered in ``file``.

    Safe for several processes: the file is replaced as a whole, so a reader sees one version or
    another, and a lost entry only costs another hashing. Not for several threads.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def digests(self, paths: Sequence[Path]) -> list[str]:
        """Hex digests of ``paths`` in order; reads only files whose size or time changed."""
        known = self._read()
        keys = [_key(path) for path in paths]
        missing = [path for path, key in zip(paths, keys, strict=True) if key not in known]
        if missing:
            for path, digest in zip(missing, _hash_files(missing), strict=True):
                known[_key(path)] = digest
            self._write(known)
        return [known[key] for key in keys]

    def _read(self) -> dict[str, str]:
        try:
            entries = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {key: value for key, value in entries.items() if isinstance(value, str)}

    def _write(self, entries: dict[str, str]) -> None:
        # A cache that cannot be written must not keep a model from being served.
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent, prefix=self._file.name)
            with os.fdopen(handle, "w", encoding="utf-8") as target:
                json.dump(entries, target, indent=0, sort_keys=True)
            os.replace(name, self._file)


def _key(path: Path) -> str:
    real = path.resolve()
    status = real.stat()
    return f"{status.st_size}:{status.st_mtime_ns}:{real}"


def _hash_files(paths: Sequence[Path]) -> list[str]:
    chunks = [
        (path, start) for path in paths for start in range(0, max(1, _size(path)), CHUNK_BYTES)
    ]
    # xxhash and file reads release the interpreter lock, so threads use the cores.
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        hashed = list(pool.map(_hash_chunk, chunks))
    whole = {path: xxhash.xxh3_128() for path in paths}
    for (path, _), digest in zip(chunks, hashed, strict=True):
        whole[path].update(digest)
    return [f"{_size(path):x}-{whole[path].hexdigest()}" for path in paths]


def _size(path: Path) -> int:
    return path.stat().st_size


def _hash_chunk(chunk: tuple[Path, int]) -> bytes:
    path, start = chunk
    state = xxhash.xxh3_128()
    left = CHUNK_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (data := file.read(min(READ_BYTES, left))):
            state.update(data)
            left -= len(data)
    return state.digest()
