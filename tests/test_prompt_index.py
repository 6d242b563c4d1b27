"""Which earlier prompts are found again, and what becomes of those that are gone."""

from __future__ import annotations

import numpy as np

from service.diagnostics.prompt_index import GroupKey, PromptIndex

KEY = GroupKey("acme", "f", "")
OTHER = GroupKey("globex", "f", "")


def ids_of(seed: int, count: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def test_the_longest_prefix_in_whole_blocks_and_the_latest_of_equals() -> None:
    index = PromptIndex(16)
    index.keep({1, 2, 3})
    shared = ids_of(0)
    index.add(KEY, 1, joined(shared, ids_of(1)))
    index.add(KEY, 2, joined(shared, ids_of(2)))
    index.add(KEY, 3, joined(shared[:32], ids_of(3)))
    assert index.longest(KEY, index.hashed(joined(shared, ids_of(1, 20)))) == 1
    assert index.longest(KEY, index.hashed(joined(shared, ids_of(9)))) == 2
    assert index.longest(KEY, index.hashed(shared[:32])) == 3
    assert index.longest(KEY, index.hashed(ids_of(9))) is None
    assert index.longest(OTHER, index.hashed(shared)) is None
    assert index.longest_of_others("globex", index.hashed(shared)) == 3
    assert index.longest_of_others("acme", index.hashed(shared)) is None


def test_text_is_found_wherever_it_stands() -> None:
    index = PromptIndex(16)
    index.keep({1, 2})
    text = ids_of(0, 600)
    index.add(KEY, 1, joined(ids_of(1, 7), text))
    index.add(KEY, 2, ids_of(2, 600))
    assert list(index.related(KEY, index.hashed(joined(ids_of(3, 50), text)))) == [1, 2]
    assert list(index.related(KEY, index.hashed(ids_of(4)))) == [2]
    assert list(index.related(OTHER, index.hashed(text))) == []


def test_an_answer_is_added_to_its_prompt() -> None:
    index = PromptIndex(16)
    index.keep({1})
    prompt, answer = ids_of(0, 40), ids_of(1, 400)
    index.add(KEY, 1, prompt)
    index.add(KEY, 1, joined(prompt, answer), len(prompt))
    index.add(KEY, 2, ids_of(2))
    index.keep({1, 2})
    assert index.longest(KEY, index.hashed(joined(prompt, answer))) == 1
    assert next(index.related(KEY, index.hashed(joined(ids_of(3, 5), answer)))) == 1


def test_what_is_gone_is_not_found_and_its_hashes_go() -> None:
    index = PromptIndex(16)
    index.keep(range(1, 5))
    for number in range(1, 5):
        index.add(KEY, number, ids_of(number, 8000))
    group = index._groups[KEY]
    before = len(group.blocks)
    assert before == 4 * 500
    index.keep({4})
    assert len(group.blocks) == 500
    assert index.longest(KEY, index.hashed(ids_of(1, 8000))) is None
    assert index.longest(KEY, index.hashed(ids_of(4, 8000))) == 4
    index.add(OTHER, 5, ids_of(5, 40_000))
    index.keep({6})
    assert index.keys_of("acme") == index.keys_of("globex") == []
