"""The kinds of values a setting can have, and how each is read from text.

Owns the parsing of one value: sizes, numbers with bounds, choices, addresses, paths. Knows neither
which settings exist nor whether the text came from a command line or from the environment. Each
parser raises ValueError with a phrase that continues "--name ...: ".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from cache_store.metadata.redis_url import parse_redis_url

__all__ = [
    "boolean",
    "choice",
    "endpoint",
    "http_url",
    "integer",
    "integer_choice",
    "number",
    "origin",
    "path",
    "redis_url",
    "size",
    "size_or_zero",
    "text",
]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MAX_PORT = 65535
_MAX_BYTES = 2**63


def text(value: str) -> str:
    """Any text that is not blank."""
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def boolean(value: str) -> bool:
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def size_or_zero(value: str) -> int:
    """As :func:`size`, and 0."""
    return 0 if value.strip() == "0" else size(value)


def size(value: str) -> int:
    """A positive number of bytes: 536870912, 512MB (10**6), 4GiB (2**30)."""
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"expected a size such as 512MB or 4GiB, got {value!r}")
    unit = match["unit"].upper()
    if unit not in _UNITS:
        raise ValueError(
            f"unknown unit {match['unit']!r} in {value!r}; use B, KB, MB, GB, TB, "
            "KiB, MiB, GiB or TiB"
        )
    num_bytes = float(match["number"]) * _UNITS[unit]
    if num_bytes < 1:
        raise ValueError(f"must be at least one byte, got {value!r}")
    if num_bytes >= _MAX_BYTES:
        raise ValueError(f"must be less than 8 EiB, got {value!r}")
    return int(num_bytes)


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            result = int(value.strip())
        except ValueError:
            raise ValueError(f"expected a whole number, got {value!r}") from None
        if result < minimum:
            raise ValueError(f"must be at least {minimum}, got {result}")
        if maximum is not None and result > maximum:
            raise ValueError(f"must be at most {maximum}, got {result}")
        return result

    return parse


def number(
    minimum: float, maximum: float = math.inf, *, above_minimum: bool = False
) -> Callable[[str], float]:
    """A finite number; ``above_minimum`` leaves the lower bound itself out."""

    def parse(value: str) -> float:
        try:
            result = float(value.strip())
        except ValueError:
            raise ValueError(f"expected a number, got {value!r}") from None
        if not math.isfinite(result):
            raise ValueError(f"expected a finite number, got {value!r}")
        if result < minimum or (above_minimum and result == minimum):
            bound = "more than" if above_minimum else "at least"
            raise ValueError(f"must be {bound} {minimum:g}, got {result:g}")
        if result > maximum:
            raise ValueError(f"must be at most {maximum:g}, got {result:g}")
        return result

    return parse


def choice(*options: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in options:
            raise ValueError(f"expected one of {', '.join(options)}, got {value!r}")
        return word

    return parse


def integer_choice(*options: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        word = value.strip()
        if word not in {str(option) for option in options}:
            raise ValueError(f"expected one of {', '.join(map(str, options))}, got {value!r}")
        return int(word)

    return parse


def path(value: str) -> Path:
    """A path with ~ expanded; whether anything is there is for the reader of the file to say."""
    return Path(text(value)).expanduser()


def endpoint(value: str) -> str:
    """Where a worker's link listens: tcp://address:port or ipc:///path."""
    word = value.strip()
    if word.startswith("ipc://") and len(word) > len("ipc://"):
        return word
    if word.startswith("tcp://"):
        address, separator, port = word.removeprefix("tcp://").rpartition(":")
        if separator and address and port.isdigit() and 1 <= int(port) <= _MAX_PORT:
            return word
    raise ValueError(f"expected tcp://address:port or ipc:///path, got {value!r}")


def http_url(value: str) -> str:
    word = value.strip().rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", word):
        raise ValueError(f"expected an address such as http://127.0.0.1:8000, got {value!r}")
    return word


def origin(value: str) -> str:
    """An origin as browsers send it, scheme://host or scheme://host:port; ``localhost``; or *."""
    word = value.strip().lower()
    if word in ("*", "localhost"):
        return word
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/@\s?#]+", word):
        raise ValueError(f"expected an origin such as https://app.example, got {value!r}")
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", word)


def redis_url(value: str) -> str:
    """redis://, rediss:// or unix:// URL, or @FILE that holds one. Errors do not repeat it: it may
    hold a password."""
    word = text(value)
    if word.startswith("@"):
        return f"@{path(word[1:])}"
    parse_redis_url(word)
    return word
