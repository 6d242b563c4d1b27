"""Log lines: one event each, and what belongs to it as fields; for people, or as JSON.

Owns the two forms, of the gateway's process and of workers', and the way back from a line to its
level and message. What a prompt or an answer says belongs in no field.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

__all__ = [
    "LOG_FORMATS",
    "JsonLines",
    "ParsedLogLine",
    "PrettyLines",
    "configure_logging",
    "log_event",
    "parse_log_line",
]

LOG_FORMATS = ("pretty", "json")
_FIELDS = "headstart_fields"
_BARE = re.compile(r"[\w./:@+-]+")
_PRETTY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) +[\w.]+: (.*)")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """One line; fields that are None are left out."""
    if logger.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, event, extra={_FIELDS: known}, stacklevel=2)


def configure_logging(level: str, form: str) -> None:
    """All that this process logs goes to standard error, in one of LOG_FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else PrettyLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class PrettyLines(logging.Formatter):
    """``2026-01-31 12:00:00,123 INFO    headstart.requests: request ended outcome=stop``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        return super().formatMessage(record).replace("\n", "\\n") + fields


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, event, and the event's fields. A traceback is
    ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return fields


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else _encode(text).decode()


class _JsonLine(msgspec.Struct, frozen=True):
    level: str
    event: str


@dataclass(frozen=True, slots=True)
class ParsedLogLine:
    """``level`` is lower case, and empty where the line is no log line."""

    level: str
    message: str

    @property
    def is_progress(self) -> bool:
        """Whether it tells how things go, and explains nothing that went wrong."""
        return self.level in ("debug", "info")


def parse_log_line(text: str) -> ParsedLogLine:
    """A line of either form as what it says; any other line says itself."""
    if text.startswith("{"):
        try:
            line = msgspec.json.decode(text.encode("utf-8", "replace"), type=_JsonLine)
        except msgspec.DecodeError:
            return ParsedLogLine("", text)
        return ParsedLogLine(line.level, line.event)
    match = _PRETTY.fullmatch(text)
    return ParsedLogLine("", text) if match is None else ParsedLogLine(match[1].lower(), match[2])
