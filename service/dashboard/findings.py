"""What the server's recent past says: common prefixes, their breakers, what more memory would find.

Owns the form of GET /dashboard/data/findings. What is found is found elsewhere.
"""

from __future__ import annotations

import asyncio

import msgspec

from service.dashboard.prefixes import PrefixNode, PrefixTree, prefix_tree
from service.diagnostics.breakers import PrefixBreaker
from service.gateway import Gateway
from service.miss_ratio_curve import MissRatioReport, sizes_of

__all__ = ["Findings", "find"]

_MAX_BREAKERS = 20


class PrefixRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the tree; see service.dashboard.prefixes.PrefixNode. ``preview`` is how its own
    text begins, null unless previews were asked for at the start."""

    name: str
    parent: int | None
    num_tokens_before: int
    num_tokens: int
    num_requests: int
    num_hits: int
    share: float
    hit_share: float
    preview: str | None


class Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    """``is_kept`` is false where no request is remembered (--no-request-history)."""

    is_kept: bool
    shows_text: bool
    since: float | None
    num_requests: int
    num_prompt_tokens: int
    nodes: tuple[PrefixRow, ...]


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """``curve`` is null before a model is served."""

    prefixes: Prefixes
    breakers: tuple[PrefixBreaker, ...]
    curve: MissRatioReport | None


async def find(gateway: Gateway) -> Findings:
    history = gateway.history
    records = () if history is None else history.records()
    tree = await asyncio.to_thread(prefix_tree, records)
    await gateway.diagnostics.refresh()
    return Findings(
        prefixes=_prefixes(gateway, tree),
        breakers=tuple(gateway.diagnostics.breakers()[:_MAX_BREAKERS]),
        curve=_curve(gateway),
    )


def _curve(gateway: Gateway) -> MissRatioReport | None:
    card = gateway.registry.card
    if card is None:
        return None
    sizes = sizes_of([worker.stats for worker in gateway.registry.workers])
    return gateway.miss_ratio.report(card, sizes)


def _prefixes(gateway: Gateway, tree: PrefixTree) -> Prefixes:
    return Prefixes(
        is_kept=gateway.history is not None,
        shows_text=gateway.previews is not None,
        since=tree.since,
        num_requests=tree.num_requests,
        num_prompt_tokens=tree.num_prompt_tokens,
        nodes=tuple(_row(gateway, node) for node in tree.nodes),
    )


def _row(gateway: Gateway, node: PrefixNode) -> PrefixRow:
    previews, served = gateway.previews, gateway.served
    preview = None
    if previews is not None and served is not None:
        preview = previews.text(node.first_hashes, served.tokenizer.decode)
    return PrefixRow(
        name=f"{node.block_hash:016x}",
        parent=node.parent,
        num_tokens_before=node.num_tokens_before,
        num_tokens=node.num_tokens,
        num_requests=node.num_requests,
        num_hits=node.num_hits,
        share=node.share,
        hit_share=node.hit_share,
        preview=preview,
    )
