"""Where two token sequences part, and what of the one comes again in the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.diagnostics.comparison import RUN, anchors, compare, num_common


def ids_of(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int32)


def covered(rest: list[int], other: list[int]) -> list[bool]:
    """By definition: a token in a window of RUN that stands in the other as well."""
    windows = {tuple(other[i : i + RUN]) for i in range(len(other) - RUN + 1)}
    marks = [False] * len(rest)
    for i in range(len(rest) - RUN + 1):
        if tuple(rest[i : i + RUN]) in windows:
            marks[i : i + RUN] = [True] * RUN
    return marks


PIECE = st.lists(st.integers(0, 3), max_size=24)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECE, max_size=5), st.lists(st.integers(0, 9), max_size=6), PIECE)
def test_what_comes_again_is_what_stands_in_runs(
    pieces: list[list[int]], order: list[int], added: list[int]
) -> None:
    other = [token for piece in pieces for token in piece]
    ids = [t for n in order for t in (pieces[n] if n < len(pieces) else added)]
    found = compare(ids_of(*ids), ids_of(*other))
    same = [a == b for a, b in zip(ids, other, strict=False)]
    index = same.index(False) if False in same else len(same)
    assert num_common(ids_of(*ids), ids_of(*other)) == found.index == index
    marks = covered(ids[index:], other[index:])
    assert found.is_equal.tolist() == marks
    assert found.num_equal == sum(marks)
    if True in marks:
        start = index + marks.index(True)
        assert (found.resumes_at, found.num_equal_from(start)) == (start, sum(marks))
        there = found.other_resumes_at
        assert there is not None
        assert ids[start : start + RUN] == other[there : there + RUN]
    else:
        assert (found.resumes_at, found.other_resumes_at) == (None, None)


def test_empty_sequences() -> None:
    assert num_common(ids_of(), ids_of(1)) == 0
    assert compare(ids_of(), ids_of()).num_equal == 0


def test_anchors_are_where_the_text_is() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 50_000, 4000, dtype=np.int32)
    found = anchors(text)
    assert 150 < len(found) < 350  # one in sixteen
    moved = np.concatenate((rng.integers(0, 50_000, 333, dtype=np.int32), text))
    assert found == anchors(moved)[-len(found) :]
    assert anchors(text[: RUN - 1]) == []
