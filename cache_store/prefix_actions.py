"""What can be done to a stored prefix outside of a request: look, bring back, send down, forget.

Owns which nodes belong to a prefix alone. Knows nothing of sessions: it is given tokens. Not
thread-safe: owned by the engine thread.
"""

from __future__ import annotations

from dataclasses import replace

from cache_store.block_hash import Namespace
from cache_store.cache import PrefixReport
from cache_store.events import Tier
from cache_store.ghosts import Cause
from cache_store.prefix_match import PrefixMatch
from cache_store.radix_node import RadixNode, path_of
from cache_store.radix_tree import RadixTree
from cache_store.tier_manager import TierManager
from cache_store.token_bytes import TOKEN_BYTES, TokenIds, encode_tokens


class PrefixActions:
    def __init__(self, tree: RadixTree, tiers: TierManager) -> None:
        self._tree = tree
        self._ghosts = tree.residency.ghosts
        self._tiers = tiers

    def reset(self) -> int:
        """Drop all that is not locked, in all tiers; the number of blocks."""
        num_blocks = 0
        held: list[RadixNode] = list(self._tree.roots.values())
        with self._ghosts.because(Cause.RESET):
            for node in held:  # grows while it is walked
                for child in list(node.children or ()):
                    if child.lock_ref:
                        held.append(child)
                    else:
                        num_blocks += self._tree.drop(child)
        self._tiers.collect()
        return num_blocks

    def inspect(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        return _report(self._tree.match_prefix(namespace, token_ids))

    def prefetch(self, namespace: Namespace, token_ids: TokenIds) -> PrefixReport:
        match = self._tree.match_prefix(namespace, token_ids)
        report = _report(match)
        num_host = match.num_host_tokens // self._tree.block_size
        num_disk = match.num_disk_tokens // self._tree.block_size
        if num_host + num_disk == 0:
            return report
        plan = self._tiers.plan(num_host, num_disk)
        prefix = self._tree.acquire(match, plan.lowest)
        nodes = [n for n in (*prefix.path, prefix.source) if n is not None and n.block_ids is None]
        count = sum(node.num_blocks for node in nodes)
        is_free = all(node.transfer is None for node in nodes)
        may_fit = count <= self._tiers.num_available  # or all would be evicted in vain
        if nodes and is_free and may_fit and self._tiers.make_room(Tier.DEVICE, count):
            self._tiers.count_plan(plan)
            self._tiers.promote(nodes)
            report = replace(report, num_blocks_changed=count)
        if prefix.source is not None:
            self._tree.unlock(prefix.source)
        self._tree.unlock(prefix.node)
        return report

    def demote(
        self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int
    ) -> PrefixReport:
        match = self._tree.match_prefix(namespace, token_ids)
        own, num_left = self._own_nodes(match, keep_num_tokens)
        nodes = [node for node in own if node.block_ids is not None]
        return replace(
            _report(match),
            num_blocks_changed=self._tiers.demote(nodes),
            num_blocks_left=num_left,
        )

    def drop(self, namespace: Namespace, token_ids: TokenIds, keep_num_tokens: int) -> PrefixReport:
        match = self._tree.match_prefix(namespace, token_ids)
        # What goes on from all of these tokens is this conversation's too: an answer that was cut
        # short, or asked for again.
        is_whole = match.num_tokens == len(token_ids)
        own, num_left = self._own_nodes(match, keep_num_tokens, with_sequels=is_whole)
        with self._ghosts.because(Cause.DROPPED):
            count = sum(self._tree.drop(node) for node in own)
        self._tiers.collect()
        return replace(_report(match), num_blocks_changed=count, num_blocks_left=num_left)

    def _own_nodes(
        self, match: PrefixMatch, keep_num_tokens: int, *, with_sequels: bool = False
    ) -> tuple[list[RadixNode], int]:
        """The unlocked nodes of the match that nothing else continues from, deepest first, and
        how many of its own blocks are held by somebody.

        ``with_sequels``: whatever continues from all of the matched tokens is its own as well.
        """
        if match.position is None:
            return [], 0
        keep = -(-keep_num_tokens // self._tree.block_size)  # whole blocks
        end = self._split_end(match, with_partial=not with_sequels)
        sequels = self._sequels(end, match) if with_sequels else []
        own = [node for node in sequels if node.lock_ref == 0 and self._is_beyond(node, keep)]
        held = [node for node in sequels if node.lock_ref and self._is_beyond(node, keep)]
        num_gone = len(own)  # of the children of the node that comes next
        for node in reversed(path_of(end)):
            num_children = 0 if node.children is None else len(node.children)
            if not self._is_beyond(node, keep) or num_children > num_gone + len(held):
                break
            if node.lock_ref:
                held += [each for each in path_of(node) if each.start >= keep]
                break
            own.append(node)
            num_gone = 1
        return own, sum(node.num_blocks for node in held)

    def _sequels(self, end: RadixNode, match: PrefixMatch) -> list[RadixNode]:
        """The children of ``end`` that begin with what is matched beyond it."""
        rest = encode_tokens(match.token_ids[match.num_block_tokens : match.num_tokens])
        return [child for child in end.children or () if child.tokens.startswith(rest)]

    def _is_beyond(self, node: RadixNode, keep: int) -> bool:
        """Whether it lies beyond the first ``keep`` blocks of its path; if in part, it is split."""
        num_kept = keep - node.start
        if num_kept >= node.num_blocks:
            return False
        if num_kept > 0:
            self._tree.split_tail(node, node.num_blocks - num_kept)
        return True

    def _split_end(self, match: PrefixMatch, *, with_partial: bool) -> RadixNode:
        """The node that ends with the match's last whole block; ``with_partial``: the partly filled
        one after it, if that matches whole."""
        position = match.position
        assert position is not None
        node, source = position.node, position.source
        if position.num_edge_blocks < node.num_blocks:
            self._tree.split_tail(node, node.num_blocks - position.num_edge_blocks)
            assert node.parent is not None
            return node.parent
        num_rows = 0 if match.partial is None else match.partial.num_rows
        is_whole = source is not None and len(source.tokens) == num_rows * TOKEN_BYTES
        return source if source is not None and with_partial and is_whole else node


def _report(match: PrefixMatch) -> PrefixReport:
    rows = match.partial
    in_tier = {tier: rows.num_rows if rows and rows.tier is tier else 0 for tier in Tier}
    return PrefixReport(
        num_device_tokens=match.num_device_tokens + in_tier[Tier.DEVICE],
        num_host_tokens=match.num_host_tokens + in_tier[Tier.HOST],
        num_disk_tokens=match.num_disk_tokens + in_tier[Tier.DISK],
    )
