"""Refusals of a chat request in the words of the API that it was written in.

Owns the translation of a field's path. Knows no API: each brings its own names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.errors import InvalidRequest

__all__ = ["Retelling"]

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Retelling:
    """``origins`` are the paths that the chat's messages came from, in their order; ``names`` what
    other paths, as regular expressions from the path's beginning, are called instead."""

    origins: Sequence[str]
    names: Mapping[str, str]

    @contextlib.contextmanager
    def of_refusals(self) -> Iterator[None]:
        """InvalidRequest that is raised within names the field that the client has sent."""
        try:
            yield
        except InvalidRequest as error:
            if error.param is None:
                raise
            path = self.path_of(error.param)
            message = error.message.replace(error.param, path, 1)
            raise type(error)(message, param=path, code=error.code) from None

    def path_of(self, path: str) -> str:
        """What the client calls a path of the chat."""
        found = _MESSAGE.match(path)
        if found is not None and int(found[1]) < len(self.origins):
            return self.origins[int(found[1])]
        for pattern, name in self.names.items():
            told, num_changed = re.subn(f"^{pattern}", name, path)
            if num_changed:
                return told
        return path
