"""Prompts of many tenants behind prefixes that all share: one copy of these, and nothing else of
anybody's for anybody.

The runner of scheduler_kit answers from the rows that the block tables lead to, so a request that
was given a block of another's, or rows at the wrong place, answers wrongly.
"""

from __future__ import annotations

import numpy as np
import pytest

from cache_store.block_hash import Namespace
from cache_store.divided_cache import DividedCache
from model_worker.protocol import PrefixAction
from tests.scheduler_kit import BLOCK, LINK, World, answer_of, prompt

PUBLIC = prompt(17, seed=1)  # four whole blocks and a token
SHARED = 16
SECRET = prompt(12, seed=2)


def found(world: World, name: str) -> int:
    return world.runner.found[name][0]


def ask(world: World, name: str, ids: list[int], salt: str, max_tokens: int = 3) -> int:
    """How many of its tokens were there already; the answer has to be right."""
    world.add(name, ids, max_tokens, salt=salt)
    world.run()
    assert world.tokens(name) == answer_of(ids, max_tokens)
    world.engine.check_integrity()
    return found(world, name)


def test_one_copy_serves_all_and_nothing_else_crosses() -> None:
    world = World(shared=[PUBLIC])
    ids = [*PUBLIC, *SECRET]
    assert ask(world, "first", ids, "acme") == 0
    num_cached = world.cache.stats().num_cached
    assert ask(world, "again", ids, "acme") == len(ids) - 1
    assert world.cache.stats().num_cached == num_cached
    assert ask(world, "other", ids, "globex") == SHARED
    assert world.cache.stats().num_cached == 2 * num_cached - SHARED // BLOCK
    assert ask(world, "third", [*PUBLIC, *SECRET[:5]], "initech") == SHARED
    assert ask(world, "none", ids, "") == SHARED


def test_running_requests_of_all_read_the_same_blocks() -> None:
    world = World(shared=[PUBLIC], max_num_seqs=8)
    ask(world, "first", [*PUBLIC, 1], "first")
    for salt in ("a", "b", "c"):
        world.add(salt, [*PUBLIC, *SECRET], 6, salt=salt)
    for _ in range(3):
        world.step()
    tables = [lease.block_ids for lease in world.scheduler.leases()]
    assert len(tables) == 3
    heads = {tuple(table[: SHARED // BLOCK]) for table in tables}
    assert len(heads) == 1
    tails = [block_id for table in tables for block_id in table[SHARED // BLOCK :]]
    assert len(set(tails)) == len(tails)
    world.run()


def test_a_prefix_that_is_being_computed_is_waited_for_by_all() -> None:
    world = World(shared=[PUBLIC], max_num_seqs=8, max_batched=8)
    for salt in ("a", "b", "c"):
        world.add(salt, [*PUBLIC, *SECRET], 2, salt=salt)
    world.run()
    assert world.scheduler.counters.prompt_tokens_computed == 29 + 2 * (29 - SHARED)
    assert [found(world, salt) for salt in "abc"] == [0, SHARED, SHARED]


def test_only_what_is_registered_is_in_common() -> None:
    """Prompts that begin like the prefix but leave it early share nothing, and the common namespace
    never holds a token more than was registered."""
    world = World(shared=[PUBLIC])
    ask(world, "first", [*PUBLIC, *SECRET], "acme")
    early = [*PUBLIC[:11], 7, 7, 7, 7, 7, 7]
    assert ask(world, "early", early, "globex") == 0
    cache = world.cache
    assert isinstance(cache, DividedCache)
    whole = np.asarray([*PUBLIC, *SECRET], dtype=np.int32)
    place = cache.prefixes.divide(Namespace("model", cache_salt="any"), whole)
    assert not isinstance(place, Namespace)
    assert cache.inner.match(place.head, whole).num_tokens == SHARED
    assert cache.inner.match(Namespace("model", cache_salt="acme"), whole).num_tokens == 0


def test_the_prefix_alone_as_a_prompt() -> None:
    world = World(shared=[PUBLIC])
    assert ask(world, "exactly", PUBLIC[:SHARED], "acme") == 0
    assert ask(world, "again", PUBLIC[:SHARED], "globex") == SHARED - 1
    assert ask(world, "one more", PUBLIC, "initech") == SHARED
    assert ask(world, "prewarm", PUBLIC[:SHARED], "x", max_tokens=0) == SHARED - 1


def test_the_next_turn_of_a_chat_is_found_behind_the_prefix() -> None:
    world = World(shared=[PUBLIC])
    first = [*PUBLIC, *SECRET]
    ask(world, "first", first, "acme", max_tokens=5)
    turn = [*first, *answer_of(first, 5), 9, 9]
    assert ask(world, "turn", turn, "acme") == len(first) + 4
    assert ask(world, "theirs", turn, "globex") == SHARED


def test_sharing_begins_and_ends_without_a_wrong_answer() -> None:
    world = World(shared=[])
    ids = [*PUBLIC, *SECRET]
    assert ask(world, "before", ids, "acme") == 0
    world.share(PUBLIC)
    assert ask(world, "anew", ids, "acme") == 0  # it is kept elsewhere from now on
    assert ask(world, "shared", ids, "globex") == SHARED
    world.share(PUBLIC[:9], PUBLIC)
    assert ask(world, "longest", ids, "globex") == len(ids) - 1
    world.share(PUBLIC[:9])
    assert ask(world, "shorter", ids, "globex") == 8
    world.share()
    assert ask(world, "after", ids, "acme") == len(ids) - 1  # what it had before


def test_deleting_reaches_what_is_behind_any_prefix_and_leaves_the_prefix() -> None:
    world = World(shared=[PUBLIC])
    ids = [*PUBLIC, *SECRET]
    ask(world, "first", ids, "acme")
    ask(world, "other", ids, "globex")
    world.share(PUBLIC[:8])
    ask(world, "second", ids, "acme")
    world.share()
    ask(world, "third", ids, "acme")
    reply = world.act(PrefixAction.DROP, ids, salt="acme")
    assert reply.num_blocks_left == 0
    for shared in ([], [PUBLIC[:8]], [PUBLIC]):
        world.share(*shared)
        report = world.act(PrefixAction.INSPECT, ids, salt="acme")
        assert report.num_device_tokens == len(shared and shared[0]) // BLOCK * BLOCK
    assert world.act(PrefixAction.INSPECT, ids, salt="globex").num_device_tokens >= len(ids)
    world.engine.check_integrity()


def test_a_part_of_what_is_behind_can_be_kept() -> None:
    world = World(shared=[PUBLIC])
    ids = [*PUBLIC, *SECRET]
    ask(world, "first", ids, "acme")
    world.act(PrefixAction.DROP, ids, keep=SHARED + BLOCK, salt="acme")
    assert world.act(PrefixAction.INSPECT, ids, salt="acme").num_device_tokens == SHARED + BLOCK


def test_what_is_behind_survives_the_prefix() -> None:
    """It is of no use alone, and found again when the prefix was computed anew."""
    world = World(shared=[PUBLIC])
    cache = world.cache
    assert isinstance(cache, DividedCache)
    ids = [*PUBLIC, *SECRET]
    ask(world, "first", ids, "acme")
    place = cache.prefixes.divide(Namespace("model", cache_salt="acme"), np.asarray(ids, np.int32))
    assert not isinstance(place, Namespace)
    cache.inner.drop(place.head, np.asarray(PUBLIC, np.int32), 0)
    assert ask(world, "second", ids, "acme") == 0
    assert ask(world, "third", ids, "acme") == len(ids) - 1


def test_tiers_below_keep_both_parts() -> None:
    world = World(16, shared=[PUBLIC], num_host=40, num_disk=40)
    ids = [*PUBLIC, *SECRET]
    ask(world, "first", ids, "acme")
    for number in range(6):
        ask(world, f"filler {number}", prompt(30, seed=50 + number), "filler")
        world.settle()
    report = world.act(PrefixAction.INSPECT, ids, salt="acme")
    assert report.num_device_tokens < len(ids)
    assert ask(world, "again", ids, "acme") == len(ids) - 1
    assert ask(world, "other", ids, "globex") == SHARED


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int) -> None:
    """Arrivals, steps, aborts, failures and transfers in any order, on pools too small for all,
    while what is shared changes: every answer is right, and no block is lost."""
    random = np.random.default_rng(seed)
    tiers = [(0, 0), (0, 0), (12, 0), (4, 12), (0, 30)][seed % 5]
    world = World(
        int(random.integers(10, 24)),
        max_num_seqs=int(random.integers(1, 6)),
        max_batched=int(random.integers(6, 40)),
        num_host=tiers[0],
        num_disk=tiers[1],
        write_blocks=[1, 3, 64][seed % 3],
        prefill_token_s=[None, 0.01][seed % 2],
        runs_ahead=seed % 4 > 1,
        shared=[PUBLIC],
    )
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(60):
        match int(random.integers(0, 9)):
            case 0 | 1 | 2:
                ids = [
                    *PUBLIC[: int(random.integers(1, 18))],
                    *SECRET[: int(random.integers(0, 9))],
                ]
                name = f"r{number}"
                max_tokens = int(random.integers(0, 8))
                wanted[name] = answer_of(ids, max_tokens)
                world.add(name, ids, max_tokens, salt=str(random.integers(0, 3)))
            case 3 | 4 | 5:
                world.step()
            case 6 if wanted:
                name = list(wanted)[int(random.integers(0, len(wanted)))]
                aborted.add(name)
                world.engine.abort(LINK, name)
            case 7 if world.copier.orders:
                done = None if random.integers(0, 3) else int(random.integers(0, 3))
                world.copier.finish(int(random.integers(0, 9)), done)
                world.engine.advance_transfers()
            case 8 if number % 3 == 0:
                sizes = random.integers(3, 18, int(random.integers(0, 3)))
                world.share(*(PUBLIC[:size] for size in sizes))
            case _:
                world.act(PrefixAction.DROP, [*PUBLIC, *SECRET], salt=str(random.integers(0, 3)))
    world.run()
    for name in wanted.keys() - aborted:
        assert world.tokens(name) == wanted[name], name
    world.settle()
    world.engine.check_integrity()
    assert world.cache.stats().num_locked == 0
