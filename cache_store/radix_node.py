"""One node of the radix tree: an edge of whole blocks and the children after it.

Owns the edge's token ids, its copies (the block ids in each tier), the lock count, what eviction
policies look at, and the ordered list of children. Knows nothing of namespaces, of pools or of
leases. There may be a million of these, hence slots, flat buffers, and no container that is not
needed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from cache_store.events import Tier
from cache_store.token_bytes import TOKEN_BYTES, TokenBytes

if TYPE_CHECKING:
    from cache_store.adaptive import Cohort
    from cache_store.tenant_shares import TenantShare
    from cache_store.transfer import TransferJob


# Looked up once: a member of an Enum is found by a function of Python's, at each access.
_DEVICE, _HOST, _DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


class RadixNode:
    """An edge of ``num_blocks`` blocks that hangs below ``parent``, ``start`` blocks from the root.

    ``tokens`` is the byte form of the edge's token ids. Either all blocks are full, or there is
    exactly one and it is partly filled: such a partial leaf never has children. ``block_ids``,
    ``host_ids`` and ``disk_ids`` are its copies on device, host and disk, None where there is
    none; a node in the tree has at least one. ``tier`` is the quickest of them, and no quicker
    than the parent's. ``transfer`` is the job that is copying this node, if any. ``lock_ref``
    counts the locks on this node and below it. ``last_access`` and ``created`` are readings of the
    tree's clock, ``cohort`` is the adaptive policy's. ``owner`` is charged with its blocks. A node
    that has left the tree has no parent.
    """

    __slots__ = (
        "block_ids",
        "children",
        "cohort",
        "created",
        "disk_ids",
        "host_ids",
        "last_access",
        "lock_ref",
        "num_device_children",
        "num_hits",
        "num_host_children",
        "owner",
        "parent",
        "queue_marks",
        "start",
        "tokens",
        "transfer",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        tokens: bytearray,
        start: int,
        created: int,
        owner: TenantShare,
    ) -> None:
        self.parent = parent
        self.owner = owner
        self.tokens = tokens
        self.start = start
        self.block_ids: array[int] | None = None
        self.host_ids: array[int] | None = None
        self.disk_ids: array[int] | None = None
        self.children: ChildList | None = None
        self.num_device_children = 0  # children whose tier it is
        self.num_host_children = 0
        self.transfer: TransferJob | None = None
        self.lock_ref = 0
        self.num_hits = 0
        self.created = created
        self.last_access = created
        self.cohort: Cohort | None = None
        self.queue_marks = 0  # one bit for each tier's eviction queue that has an entry of it

    @property
    def num_blocks(self) -> int:
        ids = self.block_ids
        if ids is None:
            ids = self.host_ids if self.host_ids is not None else self.disk_ids
        return 0 if ids is None else len(ids)

    @property
    def tier(self) -> Tier:
        if self.block_ids is not None:
            return _DEVICE
        return _DISK if self.host_ids is None else _HOST

    def ids_in(self, tier: Tier) -> array[int] | None:
        ids: array[int] | None = getattr(self, _FIELDS[tier])
        return ids

    def set_ids(self, tier: Tier, ids: array[int] | None) -> None:
        setattr(self, _FIELDS[tier], ids)

    def has_copies(self) -> bool:
        return not (self.block_ids is None and self.host_ids is None and self.disk_ids is None)

    def is_evictable_from(self, tier: Tier) -> bool:
        """Whether it is there, nowhere quicker, unlocked, and nothing below it is there too."""
        if self.lock_ref or self.parent is None or self.num_device_children:
            return False
        if tier is _DEVICE:
            return self.block_ids is not None
        if self.tier is not tier or self.num_host_children:
            return False
        return tier is _HOST or self.children is None

    def count_child(self, tier: Tier, change: int) -> None:
        if tier is _DEVICE:
            self.num_device_children += change
        elif tier is _HOST:
            self.num_host_children += change

    def child_with(self, tokens: bytes) -> RadixNode | None:
        """The child that begins with ``tokens``, up to a block of them."""
        if self.children is None:
            return None
        child = self.children.neighbours(tokens)[1]
        return child if child is not None and child.tokens.startswith(tokens) else None

    def add_child(self, child: RadixNode) -> None:
        if self.children is None:
            self.children = ChildList(child)
        else:
            self.children.insert(child)

    def __lt__(self, other: RadixNode) -> bool:
        """Breaks ties between equal policy keys in the eviction heap."""
        return self.created < other.created


class RootNode(RadixNode):
    """The top of one namespace, known by its hash: an edge without blocks."""

    __slots__ = ("root_hash",)

    def __init__(self, root_hash: bytes, created: int, nobody: TenantShare) -> None:
        super().__init__(None, bytearray(), 0, created, nobody)
        self.block_ids = array("i")
        self.root_hash = root_hash


def is_arriving(node: RadixNode) -> bool:
    """Whether a promotion is bringing it to the device, and has not failed."""
    job = node.transfer
    return job is not None and job.order.target is Tier.DEVICE and not job.has_failed


def arriving_ids(node: RadixNode) -> Sequence[int]:
    """The blocks of the device that ``node`` has, or will have once its transfer is done."""
    if node.block_ids is not None:
        return node.block_ids
    assert node.transfer is not None
    return node.transfer.targets[node]


def is_lost(node: RadixNode) -> bool:
    """Whether its bytes could not be brought to the device: a miss that somebody still holds."""
    job = node.transfer
    return node.block_ids is None and job is not None and job.has_failed


def path_of(node: RadixNode) -> list[RadixNode]:
    """The nodes from below the root to ``node``."""
    path = []
    step = node
    while step.parent is not None:
        path.append(step)
        step = step.parent
    path.reverse()
    return path


def subtree_of(node: RadixNode) -> list[RadixNode]:
    """``node`` and all that lies below it, parents first."""
    nodes = [node]
    for step in nodes:  # grows while it is walked
        nodes.extend(step.children or ())
    return nodes


QUEUE_MARKS = {tier: 1 << number for number, tier in enumerate(Tier)}
_FIELDS = {_DEVICE: "block_ids", _HOST: "host_ids", _DISK: "disk_ids"}
_tokens_of = attrgetter("tokens")


class ChildList:
    """The children of one node in the order of their tokens; never empty while in use.

    Kept in buckets of bounded length, so that a node with a million children pays neither a scan
    nor a memmove of all of them to find, add or remove one. ``_bounds[i]`` separates the buckets
    ``i`` and ``i + 1``: it is above all tokens in the one and not above those in the other.
    ``_heads[i]`` holds the first token of each child, and ``_bound_heads`` that of each bound, so
    that a search touches two flat arrays and few of the children, which are cold memory. All three
    are empty, and shared, in the many lists that never have a second bucket.
    """

    __slots__ = ("_bound_heads", "_bounds", "_buckets", "_heads")

    MAX_BUCKET = 256

    def __init__(self, child: RadixNode) -> None:
        self._buckets: list[list[RadixNode]] = [[child]]
        self._bounds: Sequence[bytes] = ()
        self._bound_heads: Sequence[int] = ()
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

    def starting_with(self, key: TokenBytes) -> Iterator[RadixNode]:
        """The children whose tokens begin with ``key``, in order; all of them for an empty one."""
        number, _, index = self._locate(key)
        for bucket in islice(self._buckets, number, None):
            for child in islice(bucket, index, None):
                if not child.tokens.startswith(key):
                    return
                yield child
            index = 0

    def insert(self, child: RadixNode) -> None:
        number, bucket, index = self._locate(child.tokens)
        bucket.insert(index, child)
        if self._heads:
            self._heads[number].insert(index, _head(child.tokens))
        if len(bucket) > self.MAX_BUCKET:
            self._halve(number)

    def remove(self, child: RadixNode) -> bool:
        """Take ``child`` out; whether it was the last."""
        tokens = child.tokens
        if self._heads:
            head = int.from_bytes(tokens[:TOKEN_BYTES], "big")
            number = self._number_of(tokens, head)
            bucket, heads = self._buckets[number], self._heads[number]
            index = bisect_left(heads, head)
            if bucket[index] is not child:  # not the first that begins with this token
                index = bisect_left(bucket, tokens, index, key=_tokens_of)
            del heads[index]
        else:
            number, bucket, index = self._locate(tokens)
        assert bucket[index] is child, "the child is not where its tokens say"
        del bucket[index]
        if not bucket:
            del self._buckets[number]
            merged = max(0, number - 1)
            self._set_bounds([*self._bounds[:merged], *self._bounds[merged + 1 :]])
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
        head = int.from_bytes(key[:TOKEN_BYTES], "big")
        number = self._number_of(key, head)
        bucket, heads = self._buckets[number], self._heads[number]
        low = bisect_left(heads, head)
        if low == len(heads) or heads[low] != head:
            return number, bucket, low
        high = bisect_right(heads, head, low)
        return number, bucket, bisect_left(bucket, key, low, high, key=_tokens_of)

    def _number_of(self, key: TokenBytes, head: int) -> int:
        number = bisect_right(self._bound_heads, head)
        if number and self._bound_heads[number - 1] == head:
            number = bisect_right(self._bounds, key, bisect_left(self._bound_heads, head), number)
        return number

    def _set_bounds(self, bounds: list[bytes]) -> None:
        self._bounds = bounds
        self._bound_heads = array("I", map(_head, bounds))

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
        self._set_bounds([*self._bounds[:number], bound, *self._bounds[number:]])
        self._buckets[number : number + 1] = [bucket[:half], bucket[half:]]


def _head(tokens: TokenBytes) -> int:
    """The first token: the one part of an edge that neither a split nor eviction can take off."""
    return int.from_bytes(tokens[:TOKEN_BYTES], "big")


def _head_of(node: RadixNode) -> int:
    return _head(node.tokens)
