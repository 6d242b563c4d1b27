"""Where guesses come from: what the tree has stored, and what the sequence itself has said before.

Owns the search for one request. Knows nothing of steps, of what drafts cost, or of whether they
were right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cache_store.cache import Cache
from model_worker.ngram_index import RUN_LENGTHS, NgramIndex, TokenIds
from model_worker.request import Request


class DraftSource(Enum):
    TREE = auto()  # the tokens so far are a stored path: an answer that is given again
    LONG_RUN = auto()  # the last tokens stood before in the request's own prompt or answer
    SHORT_RUN = auto()


@dataclass(frozen=True, slots=True)
class Draft:
    source: DraftSource
    token_ids: tuple[int, ...]


class DraftFinder:
    """The sources of one request's drafts, the best first.

    The tree's continuation of the request's whole path; then prompt lookup (Saxena, "Prompt Lookup
    Decoding", 2023), by a longer run of tokens and by a shorter one.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._index = NgramIndex()

    def find(self, request: Request, max_num_tokens: int) -> Iterator[Draft]:
        """At most one draft of each source, none of them empty. The request holds a lease."""
        assert request.lease is not None
        token_ids = request.token_ids
        stored = self._cache.continuation(request.lease, token_ids, max_num_tokens)
        if len(stored):
            yield Draft(DraftSource.TREE, tuple(stored.tolist()))
        occurrence = self._index.find(token_ids)
        if occurrence is not None:
            is_long = occurrence.run_length == RUN_LENGTHS[0]
            source = DraftSource.LONG_RUN if is_long else DraftSource.SHORT_RUN
            yield Draft(source, _repeated(token_ids, occurrence.end, max_num_tokens))


def _repeated(token_ids: TokenIds, start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on, and once more from there as soon as they run out: what
    repeats itself goes on repeating (as copies in Lempel-Ziv coding may reach into themselves)."""
    tokens: list[int] = token_ids[start : start + count].tolist()
    while len(tokens) < count:
        tokens += tokens[: count - len(tokens)]
    return tuple(tokens)
