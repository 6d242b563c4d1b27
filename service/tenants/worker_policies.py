"""What workers are told of the tenants, and of the prefixes that all of them share.

Owns the translation of weights, caps and prefixes, and that each change reaches the workers and the
look-up of prompts. Knows nothing of what workers make of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Executor

from cache_store.shared_prefixes import SharedPrefixes
from model_worker.protocol import TenantPolicy
from service.fleet import Fleet
from service.served_model import ServedModel
from service.tenants.directory import TenantDirectory
from service.tenants.shared_text import shared_token_ids
from service.tenants.tenant import Size, Tenant
from service.workers.registry import WorkerRegistry

__all__ = ["WorkerPolicies", "policies_of"]

_log = logging.getLogger("headstart.tenants")


class WorkerPolicies:
    """``threads`` encode the prefixes. Belongs to one event loop."""

    def __init__(
        self, tenants: TenantDirectory, registry: WorkerRegistry, fleet: Fleet, threads: Executor
    ) -> None:
        self._tenants = tenants
        self._registry = registry
        self._fleet = fleet
        self._threads = threads
        self._prefixes: tuple[bytes, ...] = ()
        self._lock = asyncio.Lock()
        self.tell()

    def tell(self) -> None:
        """Of the tenants as they are now; the prefixes stay as they are known."""
        policies = policies_of(self._tenants.tenants)
        self._registry.set_tenant_policies(policies, self._prefixes)

    async def share(self, model: ServedModel) -> None:
        """Encode the registered prefixes anew, for ``model``, and tell of them."""
        async with self._lock:  # what is told last was read last
            await self._share(model)

    async def _share(self, model: ServedModel) -> None:
        registered = self._tenants.shared_prefixes
        loop = asyncio.get_running_loop()
        found, problems = await loop.run_in_executor(
            self._threads, shared_token_ids, model.tokenizer, registered
        )
        for problem in problems:
            _log.error("the tenant file: %s; it is not shared", problem)
        shared = SharedPrefixes(model.card.block_size)
        shared.set(found)
        self._fleet.share_prefixes(shared)
        self._prefixes = tuple(token_ids.astype("<i4", copy=False).tobytes() for token_ids in found)
        self.tell()


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
