"""From the bytes of a body to a checked struct, or to a 400 that names the field by its path.

Owns JSON decoding and the wording of type errors. Knows nothing of what any field means.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from service.errors import InvalidRequest

__all__ = ["convert", "described", "parse_object"]

_T = TypeVar("_T")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LEAVES = 20_000
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
        raise described(error, path) from None


def described(error: msgspec.ValidationError, path: str = "") -> InvalidRequest:
    """What is wrong and where, ``path`` being where the value itself stands."""
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
    """A second, slower look at a body that did not decode, to name the field where possible.

    It looks at so many values and no more: whoever else is being answered waits meanwhile.
    """
    try:
        value = json.loads(body)  # takes NaN, huge numbers and lone surrogates
        for path, leaf in itertools.islice(_leaves(value, ""), _MAX_LEAVES):
            if isinstance(leaf, str) and _SURROGATE.search(leaf):
                reason = "half of a surrogate pair is not a character"
                return _at(path, reason, "invalid_unicode")
            if isinstance(leaf, float) and not math.isfinite(leaf):
                return _at(path, "must be a finite number", "invalid_json")
    except (ValueError, RecursionError):
        pass
    return InvalidRequest("The body is not valid JSON in UTF-8.", code="invalid_json")


def _at(path: str, reason: str, code: str) -> InvalidRequest:
    param = path.removeprefix(".")[:200] or None
    return InvalidRequest(f"{param or 'body'}: {reason}.", param=param, code=code)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every field name, text and number, with where it stands."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield (f"{path} (a field's name)" if path else "a field's name"), key
            yield from _leaves(child, f"{path}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{path}[{index}]")
    else:
        yield path, value
