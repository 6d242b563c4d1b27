"""Stop strings that arrive in pieces: found at once, and no part of them given out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stop)
    given_out = [finder.push(piece) for piece in pieces]
    if finder.matched is None:
        given_out.append(finder.finish())
    return given_out, finder.matched


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.parametrize(
    ("stop", "pieces", "given_out", "matched"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], "END"),
        (["END"], ["one E", "N", "X"], ["one ", "", "ENX", ""], None),
        (["END"], ["one EN"], ["one ", "EN"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["xyz", "y"], ["wx", "y"], ["w", "x"], "y"),
        (["b", "abc"], ["abc"], [""], "abc"),
        (["END"], ["ENDEND"], [""], "END"),
    ],
)
def test_pieces(
    stop: list[str], pieces: list[str], given_out: list[str], matched: str | None
) -> None:
    assert run(stop, pieces) == (given_out, matched)


def test_nothing_comes_after_a_match() -> None:
    finder = StopStrings(["x"])
    assert finder.push("ax") == "a"
    assert finder.push("more") == ""


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_like_a_search_after_each_piece(stop: list[str], pieces: list[str]) -> None:
    given_out, matched = run(stop, pieces)
    text = ""
    expected: tuple[str, str | None] = ("".join(pieces), None)
    for piece in pieces:
        text += piece
        found = [(text.index(one), one) for one in stop if one in text]
        if found:
            expected = (text[: min(found)[0]], min(found)[1])
            break
    assert ("".join(given_out), matched) == expected
