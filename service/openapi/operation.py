"""What one route takes and gives, as it is written down in the table of operations.

Owns the words of that table. Knows no route, and nothing of how a document is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import msgspec

from service.errors import ErrorBody
from service.request_fields import FieldKind, RequestField
from service.sessions.identity import HEADER as SESSION_HEADER

__all__ = [
    "GENERATING",
    "NOT_READY",
    "OF_ANSWERS",
    "OF_A_MODEL",
    "OF_A_SESSION",
    "SESSION",
    "Access",
    "Answer",
    "Body",
    "Operation",
    "Parameter",
    "fields_of",
]

JSON = "application/json"
_IN_PATH = re.compile(r"\{(\w+)\}")


class Access(StrEnum):
    """Keys matter once any is set."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object. ``rows`` are its fields, ``structs`` those that the ones that act are parsed
    into; ``required`` are all that a struct needs, unless it is said here."""

    structs: tuple[type[msgspec.Struct], ...]
    rows: tuple[RequestField, ...]
    required: frozenset[str] | None = None
    may_be_empty: bool = False

    @classmethod
    def of(cls, struct: type[msgspec.Struct], *, may_be_empty: bool = False) -> Body:
        return cls((struct,), fields_of(struct), may_be_empty=may_be_empty)


@dataclass(frozen=True, slots=True)
class Answer:
    """``bodies`` are any types that msgspec encodes, none where only the media type is known.
    ``events`` are the data of the server-sent events of a streamed one."""

    bodies: tuple[Any, ...] = ()
    media_type: str = JSON
    events: tuple[type[msgspec.Struct], ...] = ()
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """``type`` is one that msgspec knows."""

    name: str
    where: Literal["path", "query", "header"]
    type: Any
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route. ``errors`` are the statuses whose body is one of ``error_bodies``, in addition to
    those that any request can meet."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    access: Access = Access.KEY
    body: Body | None = None
    answers: Mapping[int, Answer]
    errors: frozenset[int] = frozenset()
    parameters: tuple[Parameter, ...] = field(default=())
    error_bodies: tuple[type[msgspec.Struct], ...] = (ErrorBody,)

    @property
    def name(self) -> str:
        """Unique, of letters, digits and underscores."""
        return re.sub(r"\W+", "_", f"{self.method}{self.path}").strip("_")

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        in_path = _IN_PATH.findall(self.path)
        return (*(Parameter(name, "path", str) for name in in_path), *self.parameters)

    @property
    def statuses_of_errors(self) -> tuple[int, ...]:
        """Every one; a body can be too large, too slow, or no JSON."""
        found = {403, 431, 500, *self.errors}
        if self.access is not Access.OPEN:
            found |= {401, 429}
        if self.body is not None:
            found |= {400, 408, 413, 415}
        return tuple(sorted(found))


def fields_of(struct: type[msgspec.Struct]) -> tuple[RequestField, ...]:
    """All of a struct's, as fields that act."""
    names = struct.__struct_encode_fields__
    return tuple(RequestField(name, FieldKind.ACTS) for name in names)


# What several operations have in common.
NOT_READY = frozenset({503})
OF_A_MODEL = frozenset({404, 503})
GENERATING = frozenset({404, 429, 503})
OF_A_SESSION = frozenset({400, 404, 503})
SESSION = Parameter(
    SESSION_HEADER, "header", str, "whose history the request goes on with, as session_id"
)
OF_ANSWERS = (
    *("X-Session-History", "X-Headstart-Worker", "X-Headstart-Cached-Tokens"),
    "X-Headstart-Cache-Reason",
)
