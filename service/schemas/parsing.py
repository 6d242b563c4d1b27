"""From the bytes of a body to a checked struct, or to a 400 that names the field by its path.

Owns JSON decoding and the wording of type errors. Knows nothing of what any field means.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from service.errors import InvalidRequest

__all__ = ["convert", "parse_object"]

_T = TypeVar("_T")
_PATH = re.compile(r" - at `(key in )?\$(?P<path>.*)`$")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. NaN, Infinity and numbers beyond a double are refused."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # a number out of range
        raise _described(error) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _why_malformed(body) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def convert(fields: Any, into: type[_T], path: str = "") -> _T:
    """``fields`` checked and turned into ``into``; ``path`` is where they stand in the body."""
    try:
        return msgspec.convert(fields, into)
    except msgspec.ValidationError as error:
        raise _described(error, path) from None


def _described(error: msgspec.ValidationError, path: str = "") -> InvalidRequest:
    text = str(error)
    found = _PATH.search(text)
    at = path + (found["path"] if found else "")
    reason = _PATH.sub("", text).replace("`", "'")
    missing = re.match(r"Object missing required field '(.+)'$", reason)
    if missing:
        at, reason = f"{at}.{missing[1]}", "required, but missing"
    unknown = re.match(r"Object contains unknown field '(.+)'$", reason)
    if unknown:
        at, reason = f"{at}.{unknown[1]}", "unknown field"
    param = at.removeprefix(".")[:200] or None
    return InvalidRequest(f"{param or 'body'}: {reason[0].lower()}{reason[1:]}.", param=param)


def _why_malformed(body: bytes) -> InvalidRequest:
    """A second, slower look at a body that did not decode: a lone surrogate is told apart."""
    try:
        path = _surrogate_path(json.loads(body), "")
    except (ValueError, RecursionError):
        path = None
    if path is None:
        return InvalidRequest("The body is not valid JSON in UTF-8.", code="invalid_json")
    param = path.removeprefix(".") or None
    return InvalidRequest(
        f"{param or 'body'}: holds half of a surrogate pair, which is not a character.",
        param=param,
        code="invalid_unicode",
    )


def _surrogate_path(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if _has_surrogate(value) else None
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if any(_has_surrogate(key) for key in value):
            return f"{path} (a field's name)" if path else "a field's name"
        children = [(f"{path}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    for child_path, child in children:
        found = _surrogate_path(child, child_path)
        if found is not None:
            return found[:200]
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
