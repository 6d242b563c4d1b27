"""Blocks that could not be loaded: a miss, to be dropped as soon as nobody holds them.

Owns the failed jobs until then. Knows nothing of why a load failed.
"""

from __future__ import annotations

from cache_store.ghosts import Cause
from cache_store.radix_tree import RadixTree
from cache_store.transfer import TransferJob


class LostBlocks:
    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._jobs: list[TransferJob] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: TransferJob) -> None:
        """The nodes that still have ``job`` as their transfer did not arrive."""
        self._jobs.append(job)

    def sweep(self) -> None:
        """Drop them, and all below them, as far as they are not locked."""
        with self._tree.residency.ghosts.because(Cause.LOST):
            self._jobs = [job for job in self._jobs if self._is_held(job)]

    def _is_held(self, job: TransferJob) -> bool:
        """Drop what ``job`` has lost; whether some of it has to wait."""
        # What has gone is not in the tree, and what was computed again no longer the job's.
        lost = [n for n in job.targets if n.parent is not None and n.transfer is job]
        for node in lost:
            if node.parent is not None and node.lock_ref == 0:
                self._tree.drop(node)
        return any(node.parent is not None for node in lost)
