"""The prefixes that requests have in common, as a tree: the radix tree of the traffic.

Owns how it is made of the hashes of recent prompts: a block that several prompts have begins a
node, which ends where they part. Whether a prefix is stored at the moment is not asked. Knows
hashes alone, no token and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.request_history import RequestRecord

__all__ = ["PrefixNode", "PrefixTree", "prefix_tree"]

MAX_RECORDS = 5_000
MAX_BLOCKS = 200_000
MAX_NODES = 48
_NUM_FIRST = 8
_LEAST_SHARE = 0.002  # of the traffic, for a node to be drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """``num_tokens`` of its own, after ``num_tokens_before``; ``num_requests`` had all of them, and
    ``num_hits`` of these found all of them in the cache. ``share`` is what these tokens come to of
    all the prompt tokens that were looked at, ``hit_share`` how much of them was found."""

    block_hash: int  # of its last block, which names it
    first_hashes: tuple[int, ...]  # of its first blocks, eight at most
    parent: int | None  # index of its parent, which stands before it
    num_tokens_before: int
    num_tokens: int
    num_requests: int
    num_hits: int
    share: float
    hit_share: float


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """``nodes`` stand parents first, siblings by what they come to; ``num_requests`` and
    ``num_prompt_tokens`` are those that were looked at, since ``since`` (seconds since 1970)."""

    nodes: tuple[PrefixNode, ...]
    num_requests: int
    num_prompt_tokens: int
    since: float | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Per block that any prompt had, by its index: how many did, how many found it cached."""

    hashes: NDArray[np.uint64]
    num_requests: NDArray[np.int64]
    num_hits: NDArray[np.int64]


@dataclass(slots=True)
class _Run:
    """Blocks ``first`` to before ``end`` of prompts that have all of them."""

    ids: NDArray[np.int64]
    parent: int | None  # the id of the parent's last block
    start: int
    end: int


def prefix_tree(records: Sequence[RequestRecord], max_nodes: int = MAX_NODES) -> PrefixTree:
    """Of the latest of ``records``, which stand the oldest first: no more than 5,000 of them and
    200,000 blocks, which take some 0.1 s."""
    records = _latest(records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in records)
    since = records[0].at if records else None
    chains = [record.prompt_hashes for record in records]
    if not any(map(len, chains)):
        return PrefixTree((), len(records), num_prompt_tokens, since)
    counts, ids = _counted(records, chains)
    runs = _runs(counts, ids, [len(chain) for chain in chains])
    block_size = records[-1].block_size
    weight = {
        end: int(counts.num_requests[end]) * (run.end - run.start) * block_size / num_prompt_tokens
        for end, run in runs.items()
    }
    chosen = _chosen(runs, weight, max_nodes)
    nodes: list[PrefixNode] = []
    index: dict[int, int] = {}
    for end in _in_order(chosen, runs, weight):
        index[end] = len(nodes)
        run = runs[end]
        parent = None if run.parent is None else index[run.parent]
        nodes.append(_node(counts, run, parent, block_size, weight[end]))
    return PrefixTree(tuple(nodes), len(records), num_prompt_tokens, since)


def _latest(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    lengths = [record.num_prompt_blocks for record in records[: -MAX_RECORDS - 1 : -1]]
    num_kept = int(np.searchsorted(np.cumsum(lengths), MAX_BLOCKS, side="right"))
    return records[len(records) - num_kept :]


def _counted(
    records: Sequence[RequestRecord], chains: Sequence[NDArray[np.uint64]]
) -> tuple[_Counts, NDArray[np.int64]]:
    """And for each block of each prompt, one after the other, its index in the counts."""
    hashes, ids = np.unique(np.concatenate(chains), return_inverse=True)
    depth = np.concatenate([np.arange(1, len(chain) + 1) for chain in chains])
    cached = np.repeat(
        [record.num_cached_tokens // record.block_size for record in records],
        [len(chain) for chain in chains],
    )
    num_requests = np.bincount(ids, minlength=len(hashes))
    num_hits = np.bincount(ids[depth <= cached], minlength=len(hashes))
    return _Counts(hashes, num_requests, num_hits), ids.astype(np.int64)


def _runs(counts: _Counts, ids: NDArray[np.int64], lengths: Sequence[int]) -> dict[int, _Run]:
    """By the id of their last block. Along a prompt the count never rises, and it falls where
    prompts part: there a run ends. Prompts whose last shared block is the same have the same runs.
    """
    runs: dict[int, _Run] = {}
    seen: set[int] = set()
    start = 0
    for length in lengths:
        chain = ids[start : start + length]
        start += length
        shared = counts.num_requests[chain]
        num_shared = int(np.count_nonzero(shared > 1))
        if not num_shared or int(chain[num_shared - 1]) in seen:
            continue
        seen.add(int(chain[num_shared - 1]))
        ends = [*(np.flatnonzero(np.diff(shared[:num_shared])) + 1).tolist(), num_shared]
        parent, begin = None, 0
        for end in ends:
            last = int(chain[end - 1])
            runs.setdefault(last, _Run(chain, parent, begin, end))
            parent, begin = last, end
    return runs


def _chosen(runs: dict[int, _Run], weight: dict[int, float], max_nodes: int) -> set[int]:
    """Those that come to most, with all that they stand on."""
    chosen: set[int] = set()
    for end in sorted(runs, key=lambda end: weight[end], reverse=True):
        if weight[end] < _LEAST_SHARE:
            break
        path = []
        node: int | None = end
        while node is not None and node not in chosen:
            path.append(node)
            node = runs[node].parent
        if len(chosen) + len(path) <= max_nodes:
            chosen.update(path)
    return chosen


def _in_order(chosen: set[int], runs: dict[int, _Run], weight: dict[int, float]) -> list[int]:
    children: dict[int | None, list[int]] = {}
    for end in chosen:
        children.setdefault(runs[end].parent, []).append(end)
    ordered: list[int] = []
    waiting = sorted(children.get(None, ()), key=lambda end: weight[end])
    while waiting:
        end = waiting.pop()
        ordered.append(end)
        waiting += sorted(children.get(end, ()), key=lambda end: weight[end])
    return ordered


def _node(
    counts: _Counts, run: _Run, parent: int | None, block_size: int, share: float
) -> PrefixNode:
    own = run.ids[run.start : run.end]
    last = own[-1]
    num_requests = int(counts.num_requests[last])
    return PrefixNode(
        block_hash=int(counts.hashes[last]),
        first_hashes=tuple(counts.hashes[own[:_NUM_FIRST]].tolist()),
        parent=parent,
        num_tokens_before=run.start * block_size,
        num_tokens=len(own) * block_size,
        num_requests=num_requests,
        num_hits=int(counts.num_hits[last]),
        share=share,
        hit_share=float(counts.num_hits[own].sum() / (num_requests * len(own))),
    )
