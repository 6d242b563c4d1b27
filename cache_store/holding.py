"""What one lease holds of the tree and of the device's pool.

Owns the record alone; the prefix cache keeps one per lease. Knows nothing of how blocks are found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_store.adaptive import Visit
from cache_store.cache import Lease
from cache_store.load_planner import LoadPlan
from cache_store.radix_node import RadixNode, path_of
from cache_store.tenant_shares import TenantShare


@dataclass(slots=True)
class Holding:
    """A locked path, and in its block table the blocks after that path.

    ``block_ids[:num_shared]`` of the lease stand for the locked path; a table shorter than that
    lacks what is to be loaded. ``duplicates`` are blocks of the table that are the lease's own,
    because the tree has others in their places. ``source`` is the locked node whose first
    ``num_rows`` rows are to be copied. ``share`` is charged with what the lease takes and stores.
    """

    share: TenantShare
    node: RadixNode
    num_shared: int
    bonus_ns: int
    plan: LoadPlan | None  # of a hit in lower tiers, until it is followed
    visit: Visit | None
    source: RadixNode | None = None
    num_rows: int = 0
    duplicates: list[int] = field(default_factory=list)

    def unloaded(self, lease: Lease) -> list[RadixNode]:
        """The nodes that have no block in the table yet, parents first. Asked for each time, since
        others may split them."""
        num_ready = len(lease.block_ids)
        if num_ready >= self.num_shared:
            return []
        return [node for node in path_of(self.node) if node.start >= num_ready]
