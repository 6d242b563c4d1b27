"""How kernels are compiled, and where the result is kept for the next start.

Owns the decorator and the folder. numba notices a change in a function's own file only, and kernels
call each other across files; so the folder's name has a digest of all of them, and an upgrade never
runs what was compiled from other sources.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*, is_parallel: bool = False, is_exact: bool = False) -> Callable[[Function], Function]:
    """Compile at the first call, for the types it gets. The interpreter's lock is free meanwhile.

    ``is_parallel``: ``prange`` loops are shared out to threads. ``is_exact``: sums and divisions
    are done as written, which makes loops over floats several times slower.
    """
    vars(numba.config)["CACHE_DIR"] = str(_cache_folder())
    compiled: Any = numba.njit(
        parallel=is_parallel,
        fastmath=not is_exact,
        error_model="numpy",  # no exception out of the middle of a step: NaN, as everywhere else
        nogil=True,
        cache=True,
    )
    typed: Callable[[Function], Function] = compiled
    return typed


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
    name = f"kernels-{digest.hexdigest()[:16]}"
    for parent in (package / "__pycache__", Path("~/.cache/headstart")):
        try:
            parent = parent.expanduser()
            (parent / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parent / name):
                return parent / name
        except (OSError, RuntimeError):  # the latter where there is no home
            continue
    return Path(tempfile.mkdtemp(prefix="headstart-kernels-"))
