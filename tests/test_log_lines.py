"""One event a line, for people and for machines, and the way back."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from model_worker.log_lines import (
    JsonLines,
    ParsedLogLine,
    PrettyLines,
    log_event,
    parse_log_line,
)


class Kept(logging.Handler):
    """What one logger's records look like in a form."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logged(form: logging.Formatter, level: int, event: str, **fields: Any) -> list[str]:
    logger = logging.Logger("headstart.requests", logging.INFO)
    kept = Kept(form)
    logger.addHandler(kept)
    log_event(logger, level, event, **fields)
    return kept.lines


def test_a_json_line_has_the_event_and_its_fields() -> None:
    (line,) = logged(
        JsonLines(), logging.WARNING, "worker lost", worker_id="w", num=3, detail=None, s=0.5
    )
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning", "logger": "headstart.requests", "event": "worker lost",
        "worker_id": "w", "num": 3, "s": 0.5,
    }  # fmt: skip


def test_a_pretty_line_has_the_event_and_its_fields() -> None:
    (line,) = logged(
        PrettyLines(), logging.INFO, "request ended", id="a-1", ttft_s=0.123456789, why="it is so",
        text='two\nlines and a "quote"',
    )  # fmt: skip
    assert line.split("headstart.requests: ")[1] == (
        'request ended id=a-1 ttft_s=0.123457 why="it is so" text="two\\nlines and a \\"quote\\""'
    )
    assert line.split()[2] == "INFO"


@pytest.mark.parametrize("form", [PrettyLines(), JsonLines()])
def test_nobody_can_write_a_second_line(form: logging.Formatter) -> None:
    for event, field in (("one", "a\nb"), ("one\ntwo", "c")):
        (line,) = logged(form, logging.INFO, event, field=field)
        assert "\n" not in line


def test_what_is_below_the_level_is_no_line() -> None:
    assert logged(JsonLines(), logging.DEBUG, "routed") == []


def test_an_exception_is_a_field_of_a_json_line() -> None:
    logger = logging.Logger("x")
    kept = Kept(JsonLines())
    logger.addHandler(kept)
    try:
        raise ValueError("of this sort")
    except ValueError:
        logger.exception("it failed")
    (line,) = kept.lines
    found = json.loads(line)
    assert found["event"] == "it failed"
    assert found["exception"].splitlines()[-1] == "ValueError: of this sort"


@pytest.mark.parametrize("form", [PrettyLines(), JsonLines()])
@pytest.mark.parametrize("level", [logging.INFO, logging.CRITICAL])
def test_a_line_is_read_back(form: logging.Formatter, level: int) -> None:
    (line,) = logged(form, level, "5 steps failed")
    parsed = parse_log_line(line)
    assert parsed == ParsedLogLine(logging.getLevelName(level).lower(), "5 steps failed")
    assert parsed.is_progress is (level == logging.INFO)


@pytest.mark.parametrize("text", ["error: no such file", "{not json", '{"a": 1}', "", "INFO x"])
def test_any_other_line_says_itself(text: str) -> None:
    assert parse_log_line(text) == ParsedLogLine("", text)
    assert not parse_log_line(text).is_progress
