"""The scanner of JSON is as strict as a parser, and does not mind how the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.tools.json_scanner import MAX_DEPTH, JsonScanner

ALPHABET = '{}[]":,\\ \n-+.eE01tfnrusal/bx\u00e9\x01'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


def follow(text: str) -> tuple[int, bool, bool]:
    """Character by character: where it ended, and how."""
    scanner = JsonScanner()
    at = 0
    while at < len(text) and not (scanner.is_complete or scanner.is_broken):
        moved = scanner.feed(text[: at + 1], at)
        if moved == at:
            break
        at = moved
    return at, scanner.is_complete, scanner.is_broken


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=40, deadline=None)
def test_json_is_followed_to_its_end(value: object, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps({"x": value}, ensure_ascii=is_ascii, indent=indent)
    scanner = JsonScanner()
    assert scanner.feed(text + " tail") == len(text)
    assert scanner.is_complete
    assert follow(text) == (len(text), True, False)


@given(st.text(ALPHABET, max_size=12))
@settings(max_examples=150, deadline=None)
def test_what_ends_is_json_and_what_breaks_is_none(text: str) -> None:
    text = "{" + text
    scanner = JsonScanner()
    end = scanner.feed(text)
    assert (end, scanner.is_complete, scanner.is_broken) == follow(text)
    if scanner.is_complete:
        assert is_json(text[:end])
    elif scanner.is_broken:
        assert not is_json(text)
    else:
        assert end == len(text)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("[01]", 2), ("[1.]", 3), ("[-]", 2), ("[1e]", 3), ("[1.5e+3]", 8), ("[+1]", 1),
        ('["\\u12G4"]', 6), ('["\\x"]', 3), ('["a\nb"]', 3), ("[tru e]", 4), ("[1,]", 3),
        ("{,}", 1), ('{"a" 1}', 5), ('{"a":}', 5), ("[1 2]", 3), ("{]", 1), ("[NaN]", 1),
        ('{"a": 1,}', 8),
    ],
)  # fmt: skip
def test_the_first_character_that_cannot_be_is_found(text: str, end: int) -> None:
    scanner = JsonScanner()
    assert scanner.feed(text) == end
    assert scanner.is_broken is not is_json(text)


def test_depth_and_the_length_of_numbers_are_bounded() -> None:
    scanner = JsonScanner()
    assert scanner.feed("[" * (MAX_DEPTH + 1)) == MAX_DEPTH
    assert scanner.is_broken
    long = JsonScanner()
    long.feed("[" + "1" * 65)
    assert long.is_broken
