"""What a child process prints, and which line of it says why it ended."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest

from service.workers.child_process import ChildExit, ChildProcess


def ended(*lines: str, code: int = 3) -> tuple[ChildExit, str]:
    """Of a child that says ``lines`` on standard error and ends; also what was passed on."""
    exits: list[ChildExit] = []
    is_over = threading.Event()
    output = io.StringIO()

    def on_exit(child_exit: ChildExit) -> None:
        exits.append(child_exit)
        is_over.set()

    program = f"import sys; sys.stderr.write({''.join(line + chr(10) for line in lines)!r})"
    command = [sys.executable, "-I", "-S", "-c", f"{program}; sys.exit({code})"]
    child = ChildProcess(command, b"{}\n", on_exit, output)
    assert is_over.wait(30.0)
    child.join()
    return exits[0], output.getvalue()


def json_line(level: str, event: str) -> str:
    return json.dumps({"level": level, "event": event, "logger": "model_worker"})


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("loading", "error: no such file"), "error: no such file"),
        (("it broke", "2026-01-31 12:00:00,123 INFO    model_worker: draining"), "it broke"),
        (("2026-01-31 12:00:00,123 CRITICAL model_worker: 5 steps failed",), "5 steps failed"),
        ((json_line("critical", "no memory"), json_line("info", "link closed")), "no memory"),
        ((), ""),
    ],
)
def test_the_last_line_that_is_no_progress_is_the_reason(
    lines: tuple[str, ...], reason: str
) -> None:
    found, passed_on = ended(*lines)
    assert found == ChildExit(3, reason)
    assert passed_on.splitlines() == list(lines)
