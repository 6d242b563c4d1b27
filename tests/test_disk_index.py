"""The choice among what a scan found."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from cache_store.tiers.disk_format import BlockKey, RecordCodec
from cache_store.tiers.disk_index import FoundBlock, choose
from cache_store.tiers.disk_segment import Record, Segment, Space
from cache_store.token_bytes import TOKEN_BYTES
from tests.disk_kit import BLOCK_SIZE, FORMAT, chain

BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
SEGMENT = Segment(Path("/nowhere"), RecordCodec(FORMAT, None), Space())


def found(keys: Sequence[BlockKey], stored_at: float = 1.0) -> list[FoundBlock]:
    return [FoundBlock(key, stored_at, Record(SEGMENT, 0)) for key in keys]


def chosen(blocks: list[FoundBlock], limit: int = 100) -> list[BlockKey]:
    own = {block.ref for block in blocks}
    return [block.key for block in choose(blocks, own, BLOCK_BYTES, limit)]


def test_parents_come_before_children_whatever_the_order() -> None:
    one, two = chain(1, 6, num_last=2), chain(2, 3)
    keys = [*one, *two]
    random.Random(1).shuffle(keys)
    order = chosen(found(keys))
    assert set(order) == set(keys)
    for prompt in (one, two):
        places = [order.index(key) for key in prompt]
        assert places == sorted(places)


def test_without_its_parent_a_block_goes() -> None:
    keys = chain(1, 5)
    assert chosen(found([*keys[:2], *keys[3:]])) == keys[:2]
    assert chosen(found(keys[1:])) == []


def test_a_partly_filled_block_has_no_children() -> None:
    parent, child = chain(1, 2)
    short = dataclasses.replace(parent, tokens=parent.tokens[:-4])
    assert chosen(found([short, child])) == [short]


def test_a_key_is_kept_once_the_newest_of_ours_first() -> None:
    (key,) = chain(1, 1)
    old, new, newer = (found([key], stored_at)[0] for stored_at in (1.0, 2.0, 3.0))
    blocks = [old, newer, new]
    assert choose(blocks, {old.ref, new.ref, newer.ref}, BLOCK_BYTES, 9) == [newer]
    assert choose(blocks, {old.ref, new.ref}, BLOCK_BYTES, 9) == [new]
    assert choose(blocks, set(), BLOCK_BYTES, 9) == [newer]


def test_above_the_limit_the_oldest_go_and_no_block_before_its_children() -> None:
    trunk = chain(1, 3)
    other = chain(2, 3)
    blocks = [*found(trunk[:1], 1.0), *found(other, 2.0), *found(trunk[1:2], 1.5),
              *found(trunk[2:], 3.0)]  # fmt: skip
    assert set(chosen(blocks, 6)) == {*trunk, *other}
    assert set(chosen(blocks, 5)) == {*trunk, *other[:2]}
    assert set(chosen(blocks, 3)) == set(trunk)
    assert chosen(blocks, 2) == trunk[:2]
    assert chosen(blocks, 0) == []


def test_namesakes_have_no_children() -> None:
    """A forged collision: which of the two the child belongs to, its hash does not say."""
    parent, child = chain(1, 2)
    forged = dataclasses.replace(parent, tokens=chain(3, 1)[0].tokens)
    assert set(chosen(found([parent, forged, child]))) == {parent, forged}


def test_a_loop_of_hashes_ends() -> None:
    root, one, two = b"r" * 16, b"1" * 16, b"2" * 16
    tokens = bytes(BLOCK_BYTES)
    keys = [
        BlockKey(root, root, one, tokens),
        BlockKey(root, one, two, tokens),
        BlockKey(root, two, one, tokens),
        BlockKey(root, root, root, tokens),
    ]
    order = chosen(found(keys))
    assert len(order) == len(set(order)) <= 4
