"""What workers are told of the tenants.

Owns the translation of weights and caps. Knows nothing of when they are told or of what workers
make of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from model_worker.protocol import TenantPolicy
from service.tenants.tenant import Size, Tenant

__all__ = ["policies_of"]


def policies_of(tenants: Iterable[Tenant]) -> list[TenantPolicy]:
    """Of those who differ from a tenant that nothing is said of: weight 1, no caps."""
    found = (_policy(tenant) for tenant in tenants)
    return [policy for policy in found if policy != TenantPolicy(tenant=policy.tenant)]


def _policy(tenant: Tenant) -> TenantPolicy:
    caps = tenant.caps
    return TenantPolicy(
        tenant=tenant.tenant_id,
        weight=tenant.weight,
        max_device_bytes=_bytes(caps.device_cache),
        max_host_bytes=_bytes(caps.host_cache),
        max_disk_bytes=_bytes(caps.disk_cache),
    )


def _bytes(size: Size | None) -> int | None:
    """A plain number, as the link has it."""
    return None if size is None else int(size)
