"""Who there is: the tenants of the tenant file and of the key files, as they are known now.

Owns the reading of the tenant file at start and whenever it changes. A file that cannot be used
changes nothing: the tenants stay as they were, and what is wrong is told. Knows no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from service.config import ConfigError, GatewayConfig
from service.tenants.key_table import KeyTable, KnownKey, digest_of
from service.tenants.tenant import EVERYONE, Tenant, tenant_of_key
from service.tenants.tenant_file import (
    SharedPrefix,
    TenantFileError,
    TenantSet,
    read_tenant_file,
)

__all__ = ["TenantDirectory"]

POLL_SECONDS = 1.0

_log = logging.getLogger("headstart.tenants")


class TenantDirectory:
    """Used from one event loop. Raises ConfigError where the tenant file cannot be used at the
    start. ``clock`` gives seconds since 1970; ``poll_seconds``, else POLL_SECONDS, is how often the
    file is looked at.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Callable[[], float] = time.time,
        poll_seconds: float | None = None,
    ) -> None:
        self._file = None if config.tenant_file is None else Path(config.tenant_file)
        self._clock = clock
        self._poll_seconds = POLL_SECONDS if poll_seconds is None else poll_seconds
        self._lone_keys = _lone_keys(config)
        self.needs_keys = config.has_keys
        self.problem = ""  # why the file as it is now is not in use
        self._seen = self._stamp()
        self._is_asked = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        try:
            self._take(TenantSet() if self._file is None else read_tenant_file(self._file))
        except TenantFileError as error:
            raise ConfigError(f"--tenant-file: {self._file}: {error}") from None

    def find(self, key: str) -> KnownKey | None:
        """None for a key that is unknown, revoked or expired."""
        return self._keys.find(key, self._clock())

    def tenant(self, tenant_id: str) -> Tenant:
        """One that is not there any more, as of a session that outlived it, has a wall of its own
        and no limits, which nobody can use."""
        found = self._tenants.get(tenant_id)
        if found is not None:
            return found
        owner = tenant_id if self.needs_keys else None
        return Tenant(tenant_id=tenant_id, namespace_owner=owner)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._tenants.values())

    @property
    def named(self) -> tuple[str, ...]:
        """The ids of those in the tenant file, in its order; none without one."""
        return self._named

    @property
    def shared_prefixes(self) -> tuple[SharedPrefix, ...]:
        return self._shared_prefixes

    def add_listener(self, listener: Callable[[], None]) -> None:
        """``listener`` is called after each change."""
        self._listeners.append(listener)

    # ------------------------------------------------------------ changes

    def ask_to_reload(self) -> None:
        """Read the file soon, whether or not it looks changed."""
        self._is_asked.set()

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        if self._file is None:
            return
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._is_asked.wait()
            stamp = await asyncio.to_thread(self._stamp)
            if self._is_asked.is_set() or stamp != self._seen:
                self._is_asked.clear()
                await self.reload()
                self._seen = stamp

    async def reload(self) -> None:
        """Take up what the file says now, or say why not."""
        assert self._file is not None, "there is no file to read"
        try:
            self._take(await asyncio.to_thread(read_tenant_file, self._file))
        except TenantFileError as error:
            self.problem = str(error)
            _log.error("the tenant file %s %s; the tenants stay as they were", self._file, error)
            return
        self.problem = ""
        _log.info("the tenant file was read: %d tenants, %d keys", *self._sizes())
        for listener in self._listeners:
            listener()

    def _take(self, found: TenantSet) -> None:
        in_file = {key.digest for key in found.keys}
        # A key that moved from a key file to the tenant file is its tenant's from then on.
        lone = [key for key in self._lone_keys if key.digest not in in_file or key.is_admin]
        admins = {key.digest for key in lone if key.is_admin}
        keys = [*lone, *(key for key in found.keys if key.digest not in admins)]
        self._keys = KeyTable(keys)
        self._named = tuple(found.tenants)
        self._tenants = {key.tenant.tenant_id: key.tenant for key in lone} | dict(found.tenants)
        if not self.needs_keys:
            self._tenants[EVERYONE.tenant_id] = EVERYONE
        self._shared_prefixes = found.shared_prefixes

    def _sizes(self) -> tuple[int, int]:
        return len(self._tenants), len(self._keys)

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does; None while there is none."""
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _lone_keys(config: GatewayConfig) -> list[KnownKey]:
    """Those of the key files: each is a tenant of its own."""
    admins = set(config.admin_keys)
    return [
        *(_lone_key(key, is_admin=True) for key in dict.fromkeys(config.admin_keys)),
        *(_lone_key(key) for key in dict.fromkeys(config.api_keys) if key not in admins),
    ]


def _lone_key(key: str, *, is_admin: bool = False) -> KnownKey:
    tenant_id = tenant_of_key(key)
    tenant = Tenant(tenant_id=tenant_id, namespace_owner=tenant_id)
    return KnownKey(digest=digest_of(key), tenant=tenant, is_admin=is_admin)
