"""The index of earlier runs: what it finds, whichever way it was filled."""

from __future__ import annotations

import numpy as np
import pytest

from model_worker.ngram_index import RUN_LENGTHS, NgramIndex, Occurrence

LONG, SHORT = RUN_LENGTHS


def ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def by_search(tokens: list[int]) -> Occurrence | None:
    """The definition, written down as a search."""
    for length in RUN_LENGTHS:
        run = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == run:
                return Occurrence(end, length)
    return None


def test_nothing_to_find() -> None:
    assert NgramIndex().find(ids([1, 2])) is None
    assert NgramIndex().find(ids(list(range(1000)))) is None


def test_the_longer_run_is_asked_first_and_the_latest_wins() -> None:
    run = [11, 12, 13, 14, 15, 16]
    tokens = [*run, 90, *run, 91, 92, *run[-SHORT:], 93, *run]
    assert NgramIndex().find(ids(tokens)) == Occurrence(LONG + 1 + LONG, LONG)
    tokens = [*run, 90, 91, *run[-SHORT:], 92, 5, *run[-SHORT:]]
    assert NgramIndex().find(ids(tokens)) == Occurrence(LONG + 2 + SHORT, SHORT)


def test_what_repeats_itself_is_found_in_itself() -> None:
    tokens = [7, 8] * 5
    assert NgramIndex().find(ids(tokens)) == Occurrence(len(tokens) - 2, LONG)
    assert NgramIndex().find(ids([4] * 4)) == Occurrence(3, SHORT)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_at_once", [1, 3, 40, 700])
def test_however_it_is_filled_it_finds_the_same(seed: int, num_at_once: int) -> None:
    noise = np.random.default_rng(seed)
    tokens = noise.integers(0, 6, 900).astype(np.int32)
    index = NgramIndex()
    num_found = 0
    for stop in range(5, 900, num_at_once):
        found = index.find(tokens[:stop])
        wanted = by_search(tokens[:stop].tolist())
        if found != wanted:
            # Another run may have taken its slot: then it is missed, never mistaken.
            assert found is None or found.run_length < LONG or wanted is None
        assert found is None or wanted is not None
        num_found += found == wanted
    assert num_found > 0.75 * len(range(5, 900, num_at_once))


def test_real_vocabularies_seldom_collide() -> None:
    noise = np.random.default_rng(1)
    text = noise.integers(0, 49152, 4000).astype(np.int32)
    found = 0
    for start in range(0, 3900, 39):
        asked = np.concatenate((text, text[start : start + LONG]))
        found += NgramIndex().find(asked) == Occurrence(start + LONG, LONG)
    assert found >= 85


def test_a_long_prompt_is_taken_in_at_once() -> None:
    prompt = np.random.default_rng(2).integers(0, 49152, 200_000).astype(np.int32)
    index = NgramIndex()
    assert index.find(np.concatenate((prompt, prompt[500:520]))) == Occurrence(520, LONG)
