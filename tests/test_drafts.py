"""Where drafts come from, and in which order."""

from __future__ import annotations

import numpy as np

from cache_store.cache import Lease
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from model_worker.drafts import Draft, DraftFinder, DraftSource
from model_worker.request import Request
from tests.request_kit import NAMESPACE, make_request

QUOTE = [31, 32, 33, 34, 35, 36, 37, 38]


def serve(cache: PrefixCache, tokens: list[int]) -> None:
    ids = np.asarray(tokens, dtype=np.int32)
    lease = cache.acquire(cache.match(NAMESPACE, ids))
    assert cache.allocate(lease, len(ids))
    cache.release(lease, ids, len(ids))


def running(cache: PrefixCache, request: Request) -> Request:
    lease: Lease = cache.acquire(cache.match(NAMESPACE, request.token_ids[:-1]))
    assert cache.allocate(lease, request.num_tokens)
    request.lease = lease
    return request


def found(request: Request, cache: PrefixCache, count: int = 5) -> list[Draft]:
    return list(DraftFinder(cache).find(running(cache, request), count))


def make_cache() -> PrefixCache:
    return PrefixCache(64, 4, make_eviction_policy("lru"))


def test_nothing_known() -> None:
    assert found(make_request([1, 2, 3, 4, 5], [6, 7]), make_cache()) == []


def test_the_own_prompt_is_quoted() -> None:
    prompt = [1, *QUOTE, 2, 3]
    short = found(make_request(prompt, [9, 31, 32, 33]), make_cache(), 3)
    assert short == [Draft(DraftSource.SHORT_RUN, (34, 35, 36))]
    long = found(make_request(prompt, [9, *QUOTE[:6]]), make_cache(), 3)
    assert long == [Draft(DraftSource.LONG_RUN, (37, 38, 2))]


def test_a_repetition_is_guessed_to_go_on() -> None:
    (draft,) = found(make_request([1, 2, 3], [7, 8, 9] * 4), make_cache(), 8)
    assert draft == Draft(DraftSource.LONG_RUN, (7, 8, 9, 7, 8, 9, 7, 8))


def test_the_tree_comes_first() -> None:
    cache = make_cache()
    serve(cache, [1, 2, *QUOTE, 50, 51, 52])
    request = make_request([1, 2, *QUOTE], [50])
    assert found(request, cache, 4) == [Draft(DraftSource.TREE, (51, 52))]
    serve(cache, [7, 7, 7, 7, 5, 5])
    tree, text = found(make_request([7, 7, 7], [7]), cache, 2)
    assert tree == Draft(DraftSource.TREE, (5, 5))
    assert text == Draft(DraftSource.SHORT_RUN, (7, 7))


def test_one_finder_follows_its_request() -> None:
    cache = make_cache()
    request = running(cache, make_request([1, *QUOTE, 2, 3]))
    finder = DraftFinder(cache)
    drafts = []
    for token in (31, 32, 33, 34, 99):
        request.append(token)
        drafts.append([draft.token_ids for draft in finder.find(request, 2)])
    assert drafts == [[], [], [(34, 35)], [(35, 36)], []]
