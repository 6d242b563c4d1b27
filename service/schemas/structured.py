"""The fields that bound what an answer may be, and the grammar they come to.

Owns the forms of ``response_format`` (OpenAI's), ``structured_outputs`` and the older ``guided_``
fields (vLLM's), and that a request has one of them at most. Whether a grammar is any good is
service.structured's question.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from model_worker.protocol import MAX_GRAMMAR_CHARS, Grammar
from service.errors import InvalidRequest
from service.schemas.parsing import convert
from service.schemas.tools import excess

__all__ = [
    "ANY_OBJECT",
    "MAX_GRAMMAR_CHARS",
    "AnswerFormat",
    "ResponseFormat",
    "StructuredOutputs",
    "checked_schema",
    "format_of",
]

ANY_OBJECT = {"type": "object"}
MAX_CHOICES = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # the answer keeps to the schema either way


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer must match, and the field that says it; the ``schema``, where it is one."""

    grammar: Grammar
    param: str
    schema: dict[str, Any] | None = None

    @classmethod
    def of_schema(cls, schema: dict[str, Any], param: str) -> AnswerFormat:
        """Raises InvalidRequest for one that is too large or too deep."""
        return cls(checked_schema(schema, param), param, schema)


def format_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided: StructuredOutputs,
) -> AnswerFormat | None:
    """None where any text will do. Raises InvalidRequest naming the field at fault."""
    found: list[AnswerFormat] = []
    if response_format is not None:
        found += _of_response(response_format)
    if structured_outputs is not None:
        asked = _of_outputs(structured_outputs, "structured_outputs.")
        if not asked:
            raise _wrong("structured_outputs", "must hold json, regex, choice or grammar")
        found += asked
    found += _of_outputs(guided, "guided_")
    if len(found) > 1:
        raise _wrong(found[1].param, f"not together with {found[0].param}")
    return found[0] if found else None


def checked_schema(schema: dict[str, Any], param: str) -> Grammar:
    """Of a JSON schema. Raises InvalidRequest for one that is too large or too deep."""
    too_much = excess(schema)
    if too_much is not None:
        raise _wrong(param, too_much)
    return _bounded("json_schema", json.dumps(schema, ensure_ascii=False), param)


def _of_response(given: ResponseFormat) -> list[AnswerFormat]:
    at = "response_format"
    if given.type not in ("text", "json_object", "json_schema"):
        raise _wrong(f"{at}.type", "must be 'text', 'json_object' or 'json_schema'")
    if given.type != "json_schema" and given.json_schema is not None:
        raise _wrong(f"{at}.json_schema", "only with type 'json_schema'")
    if given.type == "text":
        return []
    if given.type == "json_object":
        return [AnswerFormat.of_schema(ANY_OBJECT, at)]
    described = given.json_schema
    if described is None:
        raise _wrong(f"{at}.json_schema", "required, but missing")
    if not _NAME.fullmatch(described.name):
        raise _wrong(f"{at}.json_schema.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
    param = f"{at}.json_schema.schema"
    schema = ANY_OBJECT if described.schema is None else described.schema
    return [AnswerFormat.of_schema(schema, param)]


def _of_outputs(given: StructuredOutputs, prefix: str) -> list[AnswerFormat]:
    found: list[AnswerFormat] = []
    if given.json is not None:
        param = f"{prefix}json"
        found.append(AnswerFormat.of_schema(_schema(given.json, param), param))
    if given.json_object:
        param = f"{prefix}json_object"
        found.append(AnswerFormat.of_schema(ANY_OBJECT, param))
    if given.regex is not None:
        param = f"{prefix}regex"
        found.append(AnswerFormat(_bounded("regex", given.regex, param), param))
    if given.choice is not None:
        param = f"{prefix}choice"
        found.append(AnswerFormat(_bounded("lark", _choices(given.choice, param), param), param))
    if given.grammar is not None:
        param = f"{prefix}grammar"
        found.append(AnswerFormat(_bounded("lark", given.grammar, param), param))
    return found


def _schema(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        decoded = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise _wrong(param, "must be a JSON schema") from None
    return convert(decoded, dict[str, Any], param)


def _choices(choices: list[str], param: str) -> str:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise _wrong(param, f"must hold 1 to {MAX_CHOICES} texts")
    if not all(choices):
        raise _wrong(param, "must not hold an empty text")
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _bounded(kind: Any, text: str, param: str) -> Grammar:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _wrong(param, f"may have at most {MAX_GRAMMAR_CHARS} characters")
    if not text.strip():
        raise _wrong(param, "must not be empty")
    return Grammar(kind, text)


def _wrong(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {reason}.", param=param)
