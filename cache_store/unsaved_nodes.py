"""What is to be written to disk when there is time: paths of the tree, in the order they went idle.

Owns the queue and the making of batches. Knows nothing of files or of when to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache_store.events import Tier
from cache_store.radix_node import RadixNode, path_of
from cache_store.radix_tree import RadixTree

# Beyond this many the oldest are forgotten: they are written when they are used again.
MAX_NODES = 100_000


class UnsavedNodes:
    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._ends: deque[RadixNode] = deque()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, end: RadixNode) -> None:
        """The path to ``end`` is to be written, as far as it is not on disk yet."""
        if end.parent is not None and end.disk_ids is None:
            self._ends.append(end)
            if len(self._ends) > MAX_NODES:
                self._ends.popleft()

    def clear(self) -> None:
        self._ends.clear()

    def next_batch(self, max_blocks: int) -> list[RadixNode]:
        """Unsaved nodes of one tier, parents first, of at most ``max_blocks`` blocks together.

        A longer node is split. What cannot be written now (a transfer has it) stays in the queue.
        """
        batch: dict[RadixNode, None] = {}  # an ordered set
        room = max_blocks
        for _ in range(len(self._ends)):
            room, is_whole = self._take_path(self._ends[0], batch, room)
            if is_whole:
                self._ends.popleft()
            elif room == 0:
                break
            else:
                self._ends.rotate(-1)
        return list(batch)

    def _take_path(
        self, end: RadixNode, batch: dict[RadixNode, None], room: int
    ) -> tuple[int, bool]:
        """Add what can be added of the path to ``end``: room left, and whether that was all."""
        for node in path_of(end):
            if node.disk_ids is not None or node in batch:
                continue
            source = next(iter(batch), node).tier
            if room == 0 or not can_be_saved(node, source):
                return room, False
            if node.num_blocks > room:
                self._tree.split_tail(node, node.num_blocks - room)
                assert node.parent is not None
                batch[node.parent] = None
                return 0, False
            batch[node] = None
            room -= node.num_blocks
        return room, True


def can_be_saved(node: RadixNode, source: Tier) -> bool:
    return (
        node.parent is not None
        and node.disk_ids is None
        and node.transfer is None
        and node.tier is source
    )


def that_fit(batch: Sequence[RadixNode], room: int) -> list[RadixNode]:
    """The leading nodes of ``batch`` that can still be saved, of at most ``room`` blocks."""
    nodes: list[RadixNode] = []
    for node in batch:
        # Making room for them may have moved or dropped some.
        if not can_be_saved(node, batch[0].tier):
            continue
        if node.num_blocks > room:
            break  # what comes after may lie below it
        nodes.append(node)
        room -= node.num_blocks
    return nodes
