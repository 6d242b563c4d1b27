"""One node of the radix tree: an edge of whole blocks and the children after it.

Owns the edge's token ids and block ids, the lock count, what eviction policies look at, and the
ordered list of children. Knows nothing of namespaces, of the pool or of leases. There may be a
million of these, hence slots, flat buffers, and no container that is not needed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from cache_store.block_hash import Namespace
from cache_store.token_bytes import TOKEN_BYTES, TokenBytes


class RadixNode:
    """An edge of ``len(block_ids)`` blocks that hangs below ``parent``.

    ``tokens`` is the byte form of the edge's token ids. Either all blocks are full, or there is
    exactly one and it is partly filled: such a partial leaf never has children. ``lock_ref``
    counts the locks on this node and below it. ``last_access`` and ``created`` are readings of
    the tree's logical clock. A node that has left the tree has no parent.
    """

    __slots__ = (
        "block_ids",
        "children",
        "created",
        "is_queued",
        "last_access",
        "lock_ref",
        "num_hits",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        tokens: bytearray,
        block_ids: array[int],
        created: int,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_ids = block_ids
        self.children: ChildList | None = None
        self.lock_ref = 0
        self.num_hits = 0
        self.created = created
        self.last_access = created
        self.is_queued = False  # has an entry in the eviction queue

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    def is_evictable_leaf(self) -> bool:
        return self.lock_ref == 0 and self.children is None and self.parent is not None

    def add_child(self, child: RadixNode) -> None:
        if self.children is None:
            self.children = ChildList(child)
        else:
            self.children.insert(child)

    def remove_child(self, child: RadixNode) -> None:
        assert self.children is not None
        if self.children.remove(child):
            self.children = None

    def __lt__(self, other: RadixNode) -> bool:
        """Breaks ties between equal policy keys in the eviction heap."""
        return self.created < other.created


class RootNode(RadixNode):
    """The top of one namespace: an edge without blocks."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, created: int) -> None:
        super().__init__(None, bytearray(), array("i"), created)
        self.namespace = namespace


_tokens_of = attrgetter("tokens")


class ChildList:
    """The children of one node in the order of their tokens; never empty while in use.

    Kept in buckets of bounded length, so that a node with a million children pays neither a scan
    nor a memmove of all of them to find, add or remove one. ``_bounds[i]`` separates the buckets
    ``i`` and ``i + 1``: it is above all tokens in the one and not above those in the other.
    ``_heads[i]`` holds the first token of each child, so that a search touches one flat array and
    few of the children, which are cold memory. Both are empty, and shared, in the many lists that
    never have a second bucket.
    """

    __slots__ = ("_bounds", "_buckets", "_heads")

    MAX_BUCKET = 256

    def __init__(self, child: RadixNode) -> None:
        self._buckets: list[list[RadixNode]] = [[child]]
        self._bounds: Sequence[bytes] = ()
        self._heads: Sequence[array[int]] = ()

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def __iter__(self) -> Iterator[RadixNode]:
        for bucket in self._buckets:
            yield from bucket

    def neighbours(self, key: TokenBytes) -> tuple[RadixNode | None, RadixNode | None]:
        """The last child below ``key`` and the first one not below it.

        The child that shares the longest prefix with ``key`` is one of these two.
        """
        buckets = self._buckets
        number, bucket, index = self._locate(key)
        before = at = None
        if index:
            before = bucket[index - 1]
        elif number:
            before = buckets[number - 1][-1]
        if index < len(bucket):
            at = bucket[index]
        elif number + 1 < len(buckets):
            at = buckets[number + 1][0]
        return before, at

    def insert(self, child: RadixNode) -> None:
        number, bucket, index = self._locate(child.tokens)
        bucket.insert(index, child)
        if self._heads:
            self._heads[number].insert(index, _head(child.tokens))
        if len(bucket) > self.MAX_BUCKET:
            self._halve(number)

    def remove(self, child: RadixNode) -> bool:
        """Take ``child`` out; whether it was the last."""
        number, bucket, index = self._locate(child.tokens)
        assert bucket[index] is child, "the child is not where its tokens say"
        del bucket[index]
        if self._heads:
            del self._heads[number][index]
        if not bucket:
            del self._buckets[number]
            merged = max(0, number - 1)
            self._bounds = [*self._bounds[:merged], *self._bounds[merged + 1 :]]
            self._heads = [*self._heads[:number], *self._heads[number + 1 :]]
        return not self._buckets

    def replace(self, child: RadixNode, substitute: RadixNode) -> None:
        """Put ``substitute``, whose tokens begin ``child``'s edge, in ``child``'s place."""
        _, bucket, index = self._locate(child.tokens)
        assert bucket[index] is child, "the child is not where its tokens say"
        bucket[index] = substitute

    def _locate(self, key: TokenBytes) -> tuple[int, list[RadixNode], int]:
        """The bucket that ``key`` belongs to, with its number, and the index inside."""
        if not self._heads:
            bucket = self._buckets[0]
            return 0, bucket, bisect_left(bucket, key, key=_tokens_of)
        number = bisect_right(self._bounds, key)
        bucket = self._buckets[number]
        head = _head(key)
        low = bisect_left(self._heads[number], head)
        high = bisect_right(self._heads[number], head, low)
        return number, bucket, bisect_left(bucket, key, low, high, key=_tokens_of)

    def _halve(self, number: int) -> None:
        bucket = self._buckets[number]
        half = len(bucket) // 2
        first = bucket[half]
        # its first block only: the edge may lose the rest to a split or to eviction
        bound = bytes(first.tokens[: len(first.tokens) // first.num_blocks])
        heads = self._heads[number] if self._heads else array("I", map(_head_of, bucket))
        self._heads = [
            *self._heads[:number],
            heads[:half],
            heads[half:],
            *self._heads[number + 1 :],
        ]
        self._bounds = [*self._bounds[:number], bound, *self._bounds[number:]]
        self._buckets[number : number + 1] = [bucket[:half], bucket[half:]]


def _head(tokens: TokenBytes) -> int:
    """The first token: the one part of an edge that neither a split nor eviction can take off."""
    return int.from_bytes(tokens[:TOKEN_BYTES], "big")


def _head_of(node: RadixNode) -> int:
    return _head(node.tokens)
