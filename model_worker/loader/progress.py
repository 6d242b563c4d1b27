"""How loading reports what it is doing: one line of text at a time.

Owns the callback's type and the silencing of transformers' own bars and warnings while we load,
so that a start-up shows our lines only. Knows nothing of terminals or of who reads the lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

Progress = Callable[[str], None]


def no_progress(_line: str) -> None:
    """A Progress that drops every line."""


def format_bytes(num_bytes: float) -> str:
    """For people: 1.5 GB, 270 MB; powers of 1000, as download sizes are given."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only and no progress bars from transformers inside the block."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
