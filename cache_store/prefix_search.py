"""The walk down the tree along a prompt: how far it is stored, and which child is closest then.

Owns the search alone. It reads nodes and changes nothing; it knows nothing of locks or versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.radix_node import RadixNode, is_lost
from cache_store.token_bytes import TOKEN_BYTES, num_common_tokens


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The longest stored prefix of a prompt.

    It covers everything above ``node`` and ``num_edge_blocks`` blocks of its edge: ``num_blocks``
    blocks, of which the last ``num_disk_blocks`` are on disk only and the ``num_host_blocks``
    before them no quicker than in host memory. The first ``num_rows`` rows of the next block of
    ``source`` (``node`` itself, or a child of it) go on with the prompt.
    """

    node: RadixNode
    num_edge_blocks: int
    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    source: RadixNode | None
    num_rows: int


def find_prefix(root: RadixNode, encoded: bytes, block_size: int) -> FoundPrefix:
    """``encoded`` is the byte form of the prompt, ``block_size`` in tokens."""
    block_bytes = block_size * TOKEN_BYTES
    node = root
    start = num_edge_blocks = num_host = num_disk = 0
    while True:
        child, num_rows = closest_child(node, encoded[start : start + block_bytes])
        if child is not None and is_lost(child):
            child, num_rows = None, 0
        if child is None or num_rows < block_size:
            break  # the path ends with a whole edge; child is at most good for some rows
        end = start + len(child.tokens)
        is_whole = child.tokens == encoded[start:end]
        if is_whole:
            num_new = child.num_blocks
        else:
            num_common = num_common_tokens(child.tokens, encoded[start:end])
            num_new, num_rows = divmod(num_common, block_size)
        if child.block_ids is None:
            if child.host_ids is not None:
                num_host += num_new
            else:
                num_disk += num_new
        node, num_edge_blocks = child, num_new
        start += num_new * block_bytes
        if not is_whole:
            break
    source = child if num_rows else None
    num_blocks = start // block_bytes
    return FoundPrefix(node, num_edge_blocks, num_blocks, num_host, num_disk, source, num_rows)


def closest_child(node: RadixNode, block: bytes) -> tuple[RadixNode | None, int]:
    """The child with the longest common prefix with ``block``, and its length in tokens."""
    if node.children is None or not block:
        return None, 0
    before, at = node.children.neighbours(block)
    if at is not None and at.tokens.startswith(block):
        return at, len(block) // TOKEN_BYTES
    rows_before = num_common_tokens(before.tokens, block) if before is not None else 0
    rows_at = num_common_tokens(at.tokens, block) if at is not None else 0
    closest, num_rows = (at, rows_at) if rows_at >= rows_before else (before, rows_before)
    return (closest, num_rows) if num_rows else (None, 0)


def is_redundant(node: RadixNode, block_bytes: int) -> bool:
    """Whether ``node`` is an unlocked, partly filled leaf whose tokens a sibling begins with."""
    parent = node.parent
    if parent is None or node.lock_ref or len(node.tokens) >= block_bytes:
        return False
    assert parent.children is not None
    # The first sibling behind it: one that goes on from its tokens sorts right there.
    behind = parent.children.neighbours(node.tokens + b"\0")[1]
    return behind is not None and behind.tokens.startswith(node.tokens)
