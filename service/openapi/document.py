"""The OpenAPI 3.1 document: the table of operations and the structs behind it, written out.

Owns the form of the document (https://spec.openapis.org/oas/v3.1.1). Knows no route: what there is
stands in the table, what a body holds in the structs that it is parsed into or encoded from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from service import __version__
from service.openapi.operation import JSON, Access, Answer, Body, Operation, Parameter
from service.openapi.operations import OPERATIONS
from service.request_fields import FieldKind, RequestField

__all__ = ["document", "encoded_document"]

_Schema = dict[str, Any]
_REF = "#/components/schemas/"
# {}: none is needed until one is set.
_KEYED: tuple[dict[str, list[str]], ...] = ({"bearer": []}, {"header": []}, {})
_PHRASES: Mapping[int, str] = {status.value: status.phrase for status in HTTPStatus} | {
    529: "Overloaded"
}
_SECURITY: Mapping[Access, tuple[dict[str, list[str]], ...]] = {
    Access.OPEN: (),
    Access.KEY: _KEYED,
    Access.ADMIN: _KEYED,
}


@functools.cache  # the same for as long as the process runs
def encoded_document() -> bytes:
    return msgspec.json.encode(document())


def document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """Plain values for JSON."""
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    written = {
        "openapi": "3.1.1",
        "info": {
            "title": "Headstart",
            "version": __version__,
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.used_by(paths),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(written))
    return decoded


class _Schemas:
    """Of all types that the operations name: how each is referred to, and what it is."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        asked = [struct for item in operations if item.body for struct in item.body.structs]
        given = [kind for item in operations for kind in _types_of_answers(item)]
        types = list(dict.fromkeys((*asked, *given)))
        refs, self._components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
        self._refs = dict(zip(types, refs, strict=True))
        of_requests = self._behind(self._refs[kind] for kind in asked)
        of_answers = self._behind(self._refs[kind] for kind in given)
        for name in of_answers - of_requests:
            self._require_all(self._components[name])

    def any_of(self, kinds: Sequence[Any]) -> _Schema:
        refs = [self._refs[kind] for kind in kinds]
        return refs[0] if len(refs) == 1 else {"anyOf": refs}

    def properties(self, struct: type[msgspec.Struct]) -> tuple[Mapping[str, _Schema], set[str]]:
        """And the names of those that it cannot be without."""
        schema = self._components[self._refs[struct]["$ref"].removeprefix(_REF)]
        return schema["properties"], set(schema.get("required", ()))

    def used_by(self, paths: Any) -> dict[str, _Schema]:
        used = self._behind([paths])
        return {name: schema for name, schema in self._components.items() if name in used}

    def _behind(self, roots: Iterable[Any]) -> set[str]:
        """The names of all components that ``roots`` refer to, directly or not."""
        found: set[str] = set()
        waiting = list(roots)
        while waiting:
            for name in _names_in(waiting.pop()):
                if name not in found:
                    found.add(name)
                    waiting.append(self._components[name])
        return found

    def _require_all(self, schema: _Schema) -> None:
        """What has a default is written none the less; what may be left out has none."""
        if "properties" in schema:
            always = set(schema.get("required", ()))
            schema["required"] = [
                name
                for name, value in schema["properties"].items()
                if name in always or "default" in value
            ]


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith(_REF):
        yield value.removeprefix(_REF)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _names_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names_in(item)


def _types_of_answers(operation: Operation) -> Iterator[Any]:
    yield from operation.error_bodies
    for answer in operation.answers.values():
        yield from answer.events
        yield from answer.bodies
    yield from (parameter.type for parameter in operation.all_parameters)


def _operation(operation: Operation, schemas: _Schemas) -> _Schema:
    answers = {
        str(status): _answer(status, answer, schemas)
        for status, answer in operation.answers.items()
    }
    error = Answer(operation.error_bodies)
    for status in operation.statuses_of_errors:
        answers.setdefault(str(status), _answer(status, error, schemas))
    written: _Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": _SECURITY[operation.access],
        "responses": dict(sorted(answers.items())),
    }
    if operation.access is Access.ADMIN:
        written["description"] = "Once any key is set, an admin key is needed."
    if operation.all_parameters:
        written["parameters"] = [_parameter(item, schemas) for item in operation.all_parameters]
    if operation.body is not None:
        written["requestBody"] = {
            "required": not operation.body.may_be_empty,
            "content": {JSON: {"schema": _body(operation.body, schemas)}},
        }
    return written


def _answer(status: int, answer: Answer, schemas: _Schemas) -> _Schema:
    content: _Schema = {answer.media_type: {}}
    if answer.bodies:
        content[answer.media_type]["schema"] = schemas.any_of(answer.bodies)
    if answer.events:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event-data": schemas.any_of(answer.events),
        }
    written: _Schema = {"description": _PHRASES[status], "content": content}
    if answer.headers:
        written["headers"] = {name: {"schema": {"type": "string"}} for name in answer.headers}
    return written


def _parameter(parameter: Parameter, schemas: _Schemas) -> _Schema:
    written: _Schema = {
        "name": parameter.name,
        "in": parameter.where,
        "required": parameter.where == "path",
        "schema": schemas.any_of((parameter.type,)),
    }
    if parameter.note:
        written["description"] = parameter.note
    return written


def _body(body: Body, schemas: _Schemas) -> _Schema:
    """Null is the same as absent, for every field that is not required."""
    known: dict[str, _Schema] = {}
    needed: set[str] = set()
    for struct in body.structs:
        properties, required = schemas.properties(struct)
        known.update(properties)
        needed |= required
    if body.required is not None:
        needed = set(body.required)
    names = [row.name for row in body.rows]
    return {
        "type": "object",
        "properties": {
            row.name: _field(row, known, is_required=row.name in needed) for row in body.rows
        },
        "required": [name for name in names if name in needed],
        "additionalProperties": False,
    }


def _field(row: RequestField, known: Mapping[str, _Schema], *, is_required: bool) -> _Schema:
    match row.kind:
        case FieldKind.ACTS:
            schema = dict(known[row.name])
            if not is_required and {"type": "null"} not in schema.get("anyOf", ()):
                schema = {"anyOf": [schema, {"type": "null"}]}
            note = row.note
        case FieldKind.HARMLESS:
            schema, note = {}, f"without effect: {row.note}"
        case FieldKind.REFUSED:
            schema = {"enum": [*row.inert, None]}
            note = f"refused otherwise{': ' if row.note else ''}{row.note}"
    return {**schema, "description": note} if note else schema
