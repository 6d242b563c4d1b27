"""What a worker is told of one tenant: its weight beside the others, and its caps.

Owns the terms alone. Exported by :mod:`model_worker.protocol`, as all that crosses a link.
"""

from __future__ import annotations

import msgspec


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """``weight``: of its share of the worker and of its cache against the others' (above 0).

    The caps are bytes of KV that the cache keeps for it in each tier, None for no cap. What its
    running requests hold is not counted against them. A tenant without a policy has weight 1 and
    no caps.
    """

    tenant: str
    weight: float = 1.0
    max_device_bytes: int | None = None
    max_host_bytes: int | None = None
    max_disk_bytes: int | None = None
