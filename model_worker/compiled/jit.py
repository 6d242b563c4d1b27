"""How kernels are compiled, and where the result is kept for the next start.

Owns the decorator and the folder. numba notices a change in a function's own file only, and kernels
call each other across files; so the folder's name has a digest of all of them, and an upgrade never
runs what was compiled from other sources.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*, is_parallel: bool = False, is_exact: bool = False) -> Callable[[Function], Function]:
    """Compile at the first call, for the types it gets. The interpreter's lock is free meanwhile.

    ``is_parallel``: ``prange`` loops are shared out to threads. ``is_exact``: sums and divisions
    are done as written, which makes loops over floats several times slower.
    """
    vars(numba.config)["CACHE_DIR"] = str(_cache_folder())
    compiled: Any = numba.njit(parallel=is_parallel, fastmath=not is_exact, nogil=True, cache=True)
    typed: Callable[[Function], Function] = compiled
    return typed


def _cache_folder() -> Path:
    """Beside the sources; where that cannot be written, in the user's cache, or for this run."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for parent in (package / "__pycache__", Path.home() / ".cache" / "headstart"):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parent / name):
                return parent / name
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="headstart-kernels-"))
