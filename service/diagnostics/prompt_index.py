"""Which earlier prompts have something in common with a new one, found by hashes.

Owns, for each namespace of each tenant, the chained hashes of blocks and the anchors of runs, and
whose they are: numbers of traces, no tokens and no text. What is gone is found no more, and
its hashes go when half of the traces have gone. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from cache_store.block_hash import Namespace, hash_blocks
from service.diagnostics.comparison import RUN, TokenIds, anchors

__all__ = ["GroupKey", "HashedPrompt", "PromptIndex"]

_NAMESPACE = Namespace("")  # the same tokens are to have the same names in all groups


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Within one of them prompts can share what is cached."""

    tenant: str
    fingerprint: str
    cache_salt: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """Names of its blocks, each of all up to there, and of runs of its tokens."""

    blocks: list[int]
    runs: list[int]


class _Group:
    """Names of blocks and of runs, each with the number of the trace that had it last."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.runs: dict[int, int] = {}
        self.latest: int | None = None

    def prune(self, live: Collection[int]) -> None:
        self.blocks = {name: number for name, number in self.blocks.items() if number in live}
        self.runs = {name: number for name, number in self.runs.items() if number in live}


class PromptIndex:
    def __init__(self, block_size: int) -> None:
        """``block_size`` is in tokens."""
        self._block_size = block_size
        self._groups: dict[GroupKey, _Group] = {}
        self._known: set[int] = set()
        self._live: Collection[int] = frozenset()

    def keep(self, live: Collection[int]) -> None:
        """Only these traces are there any more."""
        self._live = live
        num_dead = len(self._known.difference(live))
        if 2 * num_dead < len(self._known):
            return
        for key, group in list(self._groups.items()):
            group.prune(live)
            if not (group.blocks or group.runs or group.latest in live):
                del self._groups[key]
        self._known.intersection_update(live)

    def add(self, key: GroupKey, number: int, ids: TokenIds, start: int = 0) -> None:
        """``ids`` were served to the trace of that number; the first ``start`` are known."""
        group = self._groups.setdefault(key, _Group())
        group.latest = number
        first = start // self._block_size
        group.blocks.update(dict.fromkeys(self._names(ids)[first:], number))
        group.runs.update(dict.fromkeys(anchors(ids[max(0, start - RUN) :]), number))
        self._known.add(number)

    def hashed(self, ids: TokenIds) -> HashedPrompt:
        """What the others are asked with."""
        return HashedPrompt(self._names(ids), anchors(ids))

    def longest(self, key: GroupKey, prompt: HashedPrompt) -> int | None:
        """The latest trace of those that have most whole blocks in common with it; None where none
        has any."""
        group = self._groups.get(key)
        return None if group is None else self._deepest(group, prompt.blocks)

    def related(self, key: GroupKey, prompt: HashedPrompt) -> Iterator[int]:
        """Traces that may have text of it behind a difference: the one that has most runs in
        common, and the latest of all."""
        group = self._groups.get(key)
        if group is None:
            return
        votes = Counter(group.runs[name] for name in prompt.runs if name in group.runs)
        most = max(votes.items(), key=lambda vote: (vote[1], vote[0]), default=(None, 0))[0]
        yield from dict.fromkeys(n for n in (most, group.latest) if n is not None and self._is(n))

    def keys_of(self, tenant: str) -> list[GroupKey]:
        return [key for key in self._groups if key.tenant == tenant]

    def longest_of_others(self, tenant: str, prompt: HashedPrompt) -> int | None:
        """One of another tenant's that has a block in common with it."""
        names = prompt.blocks[:1]
        groups = (group for key, group in self._groups.items() if key.tenant != tenant)
        return next((n for g in groups if (n := self._deepest(g, names)) is not None), None)

    def _is(self, number: int | None) -> bool:
        return number in self._live

    def _deepest(self, group: _Group, names: list[int]) -> int | None:
        found = None
        for name in names:
            number = group.blocks.get(name)
            if number is None:
                break
            found = number if self._is(number) else found
        return found

    def _names(self, ids: TokenIds) -> list[int]:
        joined = hash_blocks(_NAMESPACE, ids, self._block_size).joined
        names: list[int] = np.frombuffer(joined, "<u8")[::2].tolist()
        return names
