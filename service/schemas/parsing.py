"""From the bytes of a body to a checked struct, or to a 400 that names the field by its path.

Owns JSON decoding and the wording of type errors. Knows nothing of what any field means.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
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
    """A second, slower look at a body that did not decode, to name the field where possible."""
    try:
        value = json.loads(body)  # takes NaN, huge numbers and lone surrogates
        surrogate = _path_to(value, "", _has_surrogate)
        number = _path_to(value, "", _is_not_finite)
    except (ValueError, RecursionError):
        surrogate = number = None
    if surrogate is not None:
        return _at(surrogate, "half of a surrogate pair is not a character", "invalid_unicode")
    if number is not None:
        return _at(number, "must be a finite number", "invalid_json")
    return InvalidRequest("The body is not valid JSON in UTF-8.", code="invalid_json")


def _at(path: str, reason: str, code: str) -> InvalidRequest:
    param = path.removeprefix(".")[:200] or None
    return InvalidRequest(f"{param or 'body'}: {reason}.", param=param, code=code)


def _path_to(value: Any, path: str, is_bad: Callable[[Any], bool]) -> str | None:
    """Where the first bad value or field name stands."""
    if isinstance(value, dict):
        for key, child in value.items():
            if is_bad(key):
                return f"{path} (a field's name)" if path else "a field's name"
            found = _path_to(child, f"{path}.{key}", is_bad)
            if found is not None:
                return found
    elif isinstance(value, list):
        for index, child in enumerate(value):
            found = _path_to(child, f"{path}[{index}]", is_bad)
            if found is not None:
                return found
    elif is_bad(value):
        return path
    return None


def _has_surrogate(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
