"""Where a prompt is kept that begins with a prefix which all share."""

from __future__ import annotations

import numpy as np

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.shared_prefixes import (
    MAX_SHARED_PREFIXES,
    DividedNamespace,
    Place,
    SharedPrefixes,
    hash_prompt,
)

BLOCK = 4
ACME = Namespace("model", cache_salt="4:acme")


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def counting(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def sharing(*prefixes: np.ndarray) -> SharedPrefixes:
    made = SharedPrefixes(BLOCK)
    made.set(prefixes)
    return made


def head_of(place: Place) -> int:
    return place.num_head_tokens if isinstance(place, DividedNamespace) else 0


def test_a_prompt_is_divided_behind_the_whole_blocks_of_a_prefix() -> None:
    prefixes = sharing(counting(10))
    for size, expected in ((7, 0), (8, 8), (9, 8), (30, 8)):
        assert head_of(prefixes.divide(ACME, counting(size))) == expected
    assert head_of(prefixes.divide(ACME, counting(30, start=1))) == 0
    changed = counting(30)
    changed[7] = 99
    assert prefixes.divide(ACME, changed) is ACME


def test_the_longest_prefix_counts() -> None:
    other = np.concatenate((counting(4), counting(8, start=50)))
    prefixes = sharing(counting(4), counting(16), counting(8), other)
    assert head_of(prefixes.divide(ACME, counting(40))) == 16
    assert head_of(prefixes.divide(ACME, counting(15))) == 8
    assert head_of(prefixes.divide(ACME, other)) == 12
    assert head_of(prefixes.divide(ACME, counting(5))) == 4


def test_what_fills_no_block_is_not_shared() -> None:
    assert sharing(counting(3), ids()).divide(ACME, counting(20)) is ACME


def test_heads_are_common_and_tails_are_nobody_elses() -> None:
    prefixes = sharing(counting(4), counting(8))
    other = Namespace("model", cache_salt="6:globex")
    places = [
        prefixes.divide(namespace, prompt)
        for namespace in (ACME, other, Namespace("model"))
        for prompt in (counting(7), counting(9))
    ]
    assert all(isinstance(place, DividedNamespace) for place in places)
    divided = [place for place in places if isinstance(place, DividedNamespace)]
    assert len({place.head.root_hash for place in divided}) == 1
    roots = {place.tail.root_hash for place in divided}  # by tenant, and by what is before
    roots |= {place.root_hash for place in (ACME, other, Namespace("model"))}
    roots.add(divided[0].head.root_hash)
    assert len(roots) == 6 + 3 + 1
    assert divided[0].head != sharing(counting(4)).divide(Namespace("m2"), counting(7))


def test_no_salt_leads_into_what_is_shared_or_behind_it() -> None:
    place = sharing(counting(4)).divide(Namespace("model"), counting(8))
    assert isinstance(place, DividedNamespace)
    for behind in (place.head.behind, place.tail.behind):
        forged = Namespace("model", cache_salt=behind.decode("latin-1"))
        assert forged.root_hash not in (place.head.root_hash, place.tail.root_hash)
    assert Namespace("model", behind=b"").root_hash == Namespace("model").root_hash


def test_what_is_not_shared_any_more_can_still_be_named() -> None:
    prefixes = sharing(counting(8))
    before = prefixes.divide(ACME, counting(20))
    prefixes.set([counting(4)])
    assert head_of(prefixes.divide(ACME, counting(20))) == 4
    assert [head_of(place) for place in prefixes.all_places(ACME, counting(20))] == [8, 4, 0]
    assert before in list(prefixes.all_places(ACME, counting(20)))
    prefixes.set([])
    assert prefixes.divide(ACME, counting(20)) is ACME
    assert [head_of(place) for place in prefixes.all_places(ACME, counting(6))] == [4, 0]


def test_there_is_a_limit_to_what_is_shared_and_remembered() -> None:
    prefixes = SharedPrefixes(BLOCK)
    for start in range(3):
        prefixes.set(counting(4, start + 10 * n) for n in range(MAX_SHARED_PREFIXES + 5))
    assert head_of(prefixes.divide(ACME, counting(4, 2))) == 4
    assert head_of(prefixes.divide(ACME, counting(4, 2 + 10 * MAX_SHARED_PREFIXES))) == 0
    assert len(prefixes._past) == len(prefixes._present) == MAX_SHARED_PREFIXES


def test_the_hashes_of_a_divided_prompt_are_those_of_its_parts() -> None:
    prompt = counting(23)
    place = sharing(counting(8)).divide(ACME, prompt)
    assert isinstance(place, DividedNamespace)
    head = hash_blocks(place.head, prompt[:8], BLOCK)
    tail = hash_blocks(place.tail, prompt[8:], BLOCK)
    assert hash_prompt(place, prompt, BLOCK).joined == head.joined + tail.joined
    assert (len(head), len(tail)) == (2, 3)
    assert hash_prompt(ACME, prompt, BLOCK) == hash_blocks(ACME, prompt, BLOCK)
