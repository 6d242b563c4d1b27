"""A tenant: whose requests, cache and sessions these are, and what it may ask for.

Owns the composition of cache salts, which is the wall between tenants, and the bounds on what a
request may ask of eviction. Knows nothing of keys, files or time.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from service.errors import InvalidRequest

__all__ = [
    "DEFAULT_TENANT",
    "EVERYONE",
    "Caller",
    "Caps",
    "Limits",
    "Size",
    "Tenant",
    "is_admin_in",
    "put_caller",
    "tenant_in",
    "tenant_of_key",
]

DEFAULT_TENANT = "default"  # of everyone, while no key is set
_OWNER = re.compile(r"(\d{1,3}):")
_SCOPE_KEY = "headstart_caller"

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Size(int):
    """Bytes; in a file a number, or text such as 4GiB."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a tenant may ask for; None is without limit."""

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None  # prompt tokens that are computed, and output tokens
    max_concurrent: _Count | None = None  # requests
    queue_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # of --max-queue


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may keep; None is without a bound of its own. Those of the cache are bytes of
    each worker's."""

    device_cache: Size | None = None
    host_cache: Size | None = None
    disk_cache: Size | None = None
    max_sessions: _Count | None = None
    max_retention: Annotated[float, msgspec.Meta(ge=0)] | None = None  # seconds
    max_priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] | None = None

    def check(self, priority: int | None, retention: float | None) -> None:
        """What a request itself asks for. Raises InvalidRequest naming field and limit."""
        for name, given, limit in (
            ("priority", priority, self.max_priority),
            ("retention", retention, self.max_retention),
        ):
            if given is not None and limit is not None and given > limit:
                raise InvalidRequest(
                    f"{name}: at most {limit:g} for this key's tenant, got {given:g}.",
                    param=name,
                    code="tenant_limit",
                )

    def priority(self, wanted: int) -> int:
        """As much of ``wanted`` as is allowed."""
        return wanted if self.max_priority is None else min(wanted, self.max_priority)

    def retention(self, wanted: float) -> float:
        return wanted if self.max_retention is None else min(wanted, self.max_retention)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace_owner`` is whose wall its cached prefixes stand behind: its own id, "" for the
    place that tenants without a salt of their own have in common, None where there are no tenants
    and a client's salt stands as it is."""

    tenant_id: str
    namespace_owner: str | None
    weight: float = 1.0  # its share of a busy worker, against the weights of the others
    limits: Limits = Limits()
    caps: Caps = Caps()

    @property
    def charged_as(self) -> str:
        """Whom a worker charges its requests to; empty where there is nobody to tell apart."""
        return "" if self.namespace_owner is None else self.tenant_id

    def namespace_salt(self, client_salt: str | None) -> str:
        """The salt of the namespace that the worker keeps its prefixes in.

        The owner goes in behind its length, so that no client can write a salt that leads to
        another tenant's namespace: ``("ab", "c")`` and ``("a", "bc")`` differ. Client salts are
        taken to the letter: those that differ in case, Unicode form or spacing are different.
        """
        salt = client_salt or ""
        if self.namespace_owner is None:
            return salt
        return f"{len(self.namespace_owner)}:{self.namespace_owner}{salt}"

    def client_salt(self, namespace_salt: str) -> str:
        """What the client gave of it; the inverse of :meth:`namespace_salt`, whoever's it was."""
        found = None if self.namespace_owner is None else _OWNER.match(namespace_salt)
        if found is None:
            return namespace_salt
        return namespace_salt[found.end() + int(found[1]) :]


EVERYONE = Tenant(tenant_id=DEFAULT_TENANT, namespace_owner=None)


def tenant_of_key(key: str) -> str:
    """The id of the tenant that a key alone makes: stable, and no way back to the key; 32
    hexadecimal digits."""
    content = key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=16, person=b"tenant").hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, and whether the operator's routes are open to it."""

    tenant: Tenant
    is_admin: bool = False


def tenant_in(request: Request) -> Tenant:
    """Whose key the request came with."""
    return _caller_in(request).tenant


def is_admin_in(request: Request) -> bool:
    """Whether that is an admin key, or there are no keys at all."""
    return _caller_in(request).is_admin


def put_caller(scope: Any, caller: Caller) -> None:
    """Note in an ASGI scope who asks, for :func:`tenant_in` and :func:`is_admin_in`."""
    scope[_SCOPE_KEY] = caller


def _caller_in(request: Request) -> Caller:
    caller: Caller = request.scope.get(_SCOPE_KEY, Caller(EVERYONE))
    return caller
