"""A worker's operating-system process: started, listened to, stopped.

Owns the process, its pipes and the one thread that reads them. What the child prints goes line by
line to this process's standard error; the last lines are kept as the reason of an exit. Knows
nothing of links, restarts or asyncio.

The child is given its configuration as one line on standard input, which then stays open: the
child takes its end for the death of its parent and ends too. It is its own session, so that a
Ctrl-C in the terminal reaches the parent alone, which drains before it stops the child.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from model_worker.protocol import ParsedLogLine, parse_log_line

NUM_KEPT_LINES = 50
_POLL_INTERVAL_S = 0.5  # an exit shows by its pipes; this is for pipes that a grandchild holds
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildExit:
    """``returncode`` as subprocess gives it: negative for a signal. ``last_stderr_line`` is the
    last one that is no progress report, of a log line only its message; empty where there was
    none."""

    returncode: int
    last_stderr_line: str

    def describe(self) -> str:
        if self.returncode < 0:
            how = f"was ended by {_signal_name(-self.returncode)}"
        else:
            how = f"ended with status {self.returncode}"
        return f"the worker process {how}" + (
            f": {self.last_stderr_line}" if self.last_stderr_line else ""
        )


class ChildProcess:
    """One run of ``command``. Raises OSError when it cannot be started.

    ``on_exit`` is called once, on the reading thread, when the process has ended and what it
    printed has been passed on. ``output`` None stands for sys.stderr as it is at each line.
    """

    def __init__(
        self,
        command: Sequence[str],
        config_line: bytes,
        on_exit: Callable[[ChildExit], None],
        output: TextIO | None = None,
    ) -> None:
        self._on_exit = on_exit
        self._output = output
        self._lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._last_stderr_line = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._thread = threading.Thread(
            target=self._run, args=(config_line,), name="headstart-worker-output", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        """After on_exit was called: wait for the reading thread's last instructions."""
        self._thread.join()

    # ------------------------------------------------------------ the reading thread

    def _run(self, config_line: bytes) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdin, process.stdout, process.stderr:
            # A child that ends without having read it is told by its exit.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(config_line)
            self._pass_on(process.stdout, process.stderr)
            returncode = process.wait()
        self._on_exit(ChildExit(returncode, self._last_stderr_line))

    def _pass_on(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        rests = {stdout: b"", stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in rests:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(_POLL_INTERVAL_S)
                if not ready and self._process.poll() is not None:
                    break
                for key, _ in ready:
                    pipe = stdout if key.fileobj is stdout else stderr
                    data = pipe.read(_READ_BYTES)
                    if not data:
                        selector.unregister(pipe)
                    rests[pipe] = self._take_lines(rests[pipe] + data, is_stderr=pipe is stderr)
        for pipe, rest in rests.items():
            if rest:
                self._take_lines(rest + b"\n", is_stderr=pipe is stderr)

    def _take_lines(self, data: bytes, *, is_stderr: bool) -> bytes:
        """Pass on the whole lines of ``data``; what is left of it."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            self._lines.append(text)
            if is_stderr and text.strip():
                self._note(parse_log_line(text.strip()))
            self._write(text)
        return rest

    def _note(self, line: ParsedLogLine) -> None:
        if not line.is_progress:  # what tells how things go explains no exit that came after it
            self._last_stderr_line = line.message

    def _write(self, line: str) -> None:
        output = self._output or sys.stderr
        # The child's pipes must be read on even when nobody can be shown what it prints.
        with contextlib.suppress(OSError, ValueError):
            output.write(line + "\n")
            output.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
