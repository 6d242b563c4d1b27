"""How kernels are compiled, and where the result is kept for the next start.

Owns the decorator and the folder. numba notices a change in a function's own file only, and kernels
call each other across files; so the folder's name has a digest of all of them, and an upgrade never
runs what was compiled from other sources. Folders of sources that nobody runs any more are removed.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from filelock import FileLock
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "kernels-"
UNUSED_AFTER_S = 30 * 24 * 3600.0
LOCK_TIMEOUT_S = 30.0


def kernel(*, is_parallel: bool = False, is_exact: bool = False) -> Callable[[Function], Function]:
    """Compile at the first call, for the types it gets. The interpreter's lock is free meanwhile.

    ``is_parallel``: ``prange`` loops are shared out to threads. ``is_exact``: sums and divisions
    are done as written, which makes loops over floats several times slower.
    """
    vars(numba.config)["CACHE_DIR"] = str(_cache_folder())

    def compile_later(function: Function) -> Function:
        compiled: Any = numba.njit(
            parallel=is_parallel,
            fastmath=not is_exact,
            error_model="numpy",  # no exception out of the middle of a step: NaN, as elsewhere
            nogil=True,
            cache=True,
        )(function)
        make_cache: Any = _KernelCache
        compiled._cache = make_cache(function)
        typed: Function = compiled
        return typed

    return compile_later


class _KernelCache(FunctionCache):
    """numba's, for processes that compile into one folder at the same time.

    It reads an index, adds the next free number to it and writes the code to a file of that number:
    two that do so at once take the same number, and one of them then runs code for other types.
    """

    def save_overload(self, sig: object, data: object) -> None:
        """What cannot be kept serves this process all the same, and is compiled again by others."""
        folder = _cache_folder()
        keep: Any = super().save_overload
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock", timeout=LOCK_TIMEOUT_S):
                keep(sig, data)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            logger.warning("a compiled kernel cannot be kept in %s: %s", folder, error)


@functools.cache
def _cache_folder() -> Path:
    """Beside the sources; where that cannot be written, in the user's cache, or for this run.

    Of its own for each kind of CPU: machines that share a volume do not share machine code.
    """
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}".encode())
    name = f"{FOLDER_PREFIX}{digest.hexdigest()[:16]}"
    for parent in (package / "__pycache__", Path("~/.cache/headstart")):
        try:
            parent = parent.expanduser()
            (parent / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parent / name):
                os.utime(parent / name)
        except (OSError, RuntimeError):  # the latter where there is no home
            continue
        _remove_unused(parent)
        return parent / name
    folder = tempfile.mkdtemp(prefix="headstart-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _remove_unused(parent: Path) -> None:
    """Folders of kernels that no process has begun to use for a month. One that is still running
    has what it needs in memory; what it compiles anew it keeps in a folder that it makes again."""
    oldest = time.time() - UNUSED_AFTER_S
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            is_unused = folder.lstat().st_mtime < oldest
        except OSError:  # another process was quicker
            continue
        if is_unused:
            shutil.rmtree(folder, ignore_errors=True)  # refuses links, and files are not ours
