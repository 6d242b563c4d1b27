"""What the tree says comes next: the tokens stored behind a place in it.

Owns the search alone. It reads nodes and changes nothing, recency included; it knows nothing of
leases. What it finds was served once and is no more than a guess of what will be.
"""

from __future__ import annotations

from itertools import islice

from cache_store.radix_node import RadixNode
from cache_store.token_bytes import (
    TOKEN_BYTES,
    TokenBytes,
    TokenIds,
    decode_tokens,
    encode_tokens,
)

# Of the children that go on as asked so many are looked at: where more do, the guess is poor, and
# a system prompt may have 100,000.
MAX_CANDIDATES = 16


def find_continuation(
    node: RadixNode, token_ids: TokenIds, max_num_tokens: int, block_size: int
) -> TokenIds:
    """Up to ``max_num_tokens`` tokens stored behind ``node`` and then ``token_ids``.

    Empty where ``token_ids`` lead off every path. Of several paths the most recently used is
    taken. Costs time in the number of tokens, given and found, and in the number of nodes between.
    """
    if node.children is None:
        return token_ids[:0]
    found = bytearray()
    tail = encode_tokens(token_ids)
    block_bytes = block_size * TOKEN_BYTES
    missing = max_num_tokens * TOKEN_BYTES
    while missing > 0:
        child = _latest_child(node, tail[:block_bytes])
        if child is None:
            break
        edge = child.tokens
        if len(tail) > len(edge):
            if not tail.startswith(edge):
                break
            tail = tail[len(edge) :]
        else:
            if not edge.startswith(tail):
                break
            piece = edge[len(tail) : len(tail) + missing]
            found += piece
            missing -= len(piece)
            tail = b""
        node = child
    return decode_tokens(found)


def _latest_child(node: RadixNode, start: TokenBytes) -> RadixNode | None:
    """Of the children whose edges begin with ``start``, the most recently used."""
    if node.children is None:
        return None
    candidates = list(islice(node.children.starting_with(start), MAX_CANDIDATES))
    return max(candidates, key=lambda child: child.last_access, default=None)
