"""The one error of model loading: something that the person who started the worker must change.

Owns its type only. Its message is one line without a traceback, fit to be the last thing printed.
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be served; the message says why and, where it can, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def first_line(error: BaseException) -> str:
    """The first non-empty line of a library's error, for use inside a message of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
