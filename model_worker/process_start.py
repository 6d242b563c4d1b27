"""How a worker process is told what to do, and how it learns that its parent is gone.

Owns the two uses of standard input: its first line is a WorkerConfig as JSON, and its end means
that the parent has died. Knows nothing of engines, sockets or signals.

A process that cannot serve as configured prints one line to standard error and exits with
EXIT_CONFIG: its parent then reports that line and does not start it again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from model_worker.protocol import EXIT_CONFIG, WorkerConfig

__all__ = ["EXIT_CONFIG", "ConfigError", "read_config", "watch_parent"]

_MAX_CONFIG_BYTES = 1 << 16


class ConfigError(Exception):
    """The process was not told what it needs; one line for a person."""


def read_config(stdin_fd: int = 0) -> WorkerConfig:
    """Read the first line of standard input. Raises ConfigError.

    Reads the descriptor, not sys.stdin: nothing beyond the line is buffered, and no lock is held
    by a reader when the interpreter ends.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(stdin_fd, 1)
        if not byte:
            break
        line += byte
        if len(line) > _MAX_CONFIG_BYTES:
            raise ConfigError("the worker configuration on standard input is too long")
    try:
        return msgspec.json.decode(bytes(line), type=WorkerConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the worker configuration on standard input: {error}") from error


def watch_parent(on_gone: Callable[[], None], stdin_fd: int = 0) -> threading.Thread:
    """Call ``on_gone`` on a daemon thread once standard input ends, that is, the parent has died.

    Call it after :func:`read_config`. ``on_gone`` should end the process within a bounded time.
    """

    def wait_for_end() -> None:
        while os.read(stdin_fd, 4096):
            continue
        on_gone()

    thread = threading.Thread(target=wait_for_end, name="headstart-parent-watch", daemon=True)
    thread.start()
    return thread
