import numpy as np
import pytest

from cache_store.events import Tier
from cache_store.prefix_search import FoundPrefix, closest_child, find_prefix
from cache_store.token_bytes import encode_tokens
from tests.tier_kit import BLOCK_SIZE, NAMESPACE, TierWorld, prompt, tokens

BASE = prompt(1, 2)


def world_with(*prompts: np.ndarray) -> TierWorld:
    world = TierWorld(64, num_host=64)
    for ids in prompts:
        world.store(ids)
    return world


def find(world: TierWorld, ids: np.ndarray) -> FoundPrefix:
    return find_prefix(world.tree.roots[NAMESPACE.root_hash], encode_tokens(ids), BLOCK_SIZE)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_edge_blocks", "num_rows"),
    [(1, 0, 0, 1), (3, 0, 0, 3), (4, 1, 1, 0), (5, 1, 1, 1), (8, 2, 2, 0), (9, 2, 2, 0)],
)
def test_the_walk_ends_to_the_token(
    num_tokens: int, num_blocks: int, num_edge_blocks: int, num_rows: int
) -> None:
    world = world_with(BASE)
    found = find(world, tokens(BASE, 5)[:num_tokens])
    assert (found.num_blocks, found.num_edge_blocks) == (num_blocks, num_edge_blocks)
    assert found.num_rows == num_rows
    assert (found.source is None) == (num_rows == 0)
    assert (found.num_host_blocks, found.num_disk_blocks) == (0, 0)


def test_the_source_is_the_edge_itself_in_its_midst_and_a_child_at_its_end() -> None:
    world = world_with(BASE, tokens(BASE, prompt(2, 1)))
    middle = find(world, tokens(BASE[:6], 99))
    assert middle.source is middle.node
    end = find(world, tokens(BASE, prompt(2, 1)[:2], 99))
    assert end.source is not None
    assert end.source.parent is end.node
    assert (end.num_blocks, end.num_rows) == (2, 2)


@pytest.mark.parametrize("rest", [(50, 51, 59), (50, 59), (50, 51, 52, 53)])
def test_of_many_children_the_closest_is_found(rest: tuple[int, ...]) -> None:
    tails = [(50, 51, 52, 53), (50, 51, 60, 61), (50, 80, 0, 0), (70, 51, 52, 53)]
    world = world_with(*(tokens(BASE, tail) for tail in tails))
    node = find(world, BASE).node
    child, num_rows = closest_child(node, encode_tokens(tokens(rest)))
    assert child is not None

    def num_common(tail: tuple[int, ...]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(tail, rest, strict=False)) if a != b), len(rest)
        )

    assert num_rows == max(map(num_common, tails))
    assert closest_child(node, encode_tokens(tokens(1, 2))) == (None, 0)
    assert closest_child(node, b"") == (None, 0)


def test_blocks_are_counted_by_the_quickest_tier_they_are_in() -> None:
    ids = tokens(BASE, prompt(2, 3))
    world = world_with(BASE, ids)
    world.cache.demote(NAMESPACE, ids, 8)
    world.settle()
    assert find(world, ids).num_host_blocks == 3
    assert find(world, ids[:13]).num_host_blocks == 1
    partial = find(world, ids[:10])
    assert (partial.num_host_blocks, partial.num_rows) == (0, 2)
    assert partial.source is not None
    assert partial.source.tier is Tier.HOST


def test_what_is_lost_is_passed_over() -> None:
    ids = tokens(BASE, prompt(2, 2))
    world = world_with(BASE, ids)
    world.cache.demote(NAMESPACE, ids, 8)
    world.settle()
    lease = world.start(tokens(ids, 7))
    assert find(world, ids).num_blocks == 4
    world.finish(0)
    found = find(world, ids)
    assert (found.num_blocks, found.num_host_blocks, found.source) == (2, 0, None)
    assert find(world, ids[:10]).num_rows == 0
    world.end(lease, tokens(ids, 7), 0)
