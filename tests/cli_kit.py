"""The command line in the test's own process.

Owns how it is called and what is read of it. Knows no command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from service import cli

Command = Callable[..., tuple[int, str, str]]
"""Arguments, and variables of the environment by name, to exit code, stdout, stderr."""


def command_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *before: str,
    columns: int,
) -> Command:
    """`headstart`, with ``before`` in front of all arguments, on a terminal so wide; no setting
    comes from the environment of the tests."""
    for name in [name for name in os.environ if name.startswith("HEADSTART_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", str(columns))

    def run(*arguments: object, **variables: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headstart", *before, *map(str, arguments)])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run
