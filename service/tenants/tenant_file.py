"""The file that says which tenants there are, read and checked.

Owns its format (TOML) and the words for what is wrong with it: a line for what is no TOML, else the
field by its path. Knows nothing of when it is read, and never changes it.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from service import setting_types
from service.schemas.parsing import described
from service.tenants.key_table import KnownKey
from service.tenants.tenant import Caps, Limits, Size, Tenant

__all__ = ["SharedPrefix", "TenantFileError", "TenantSet", "check_tenant_id", "read_tenant_file"]

_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BUILTIN = (datetime.datetime, datetime.date, datetime.time)
_T = TypeVar("_T")


class TenantFileError(Exception):
    """The message is one line, and quotes no key."""


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What many prompts begin with, whoever sends them: a text, or the first messages of a chat."""

    text: str | None = None
    messages: list[Any] | None = None


class TenantSet(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    tenants: Mapping[str, Tenant] = {}
    keys: tuple[KnownKey, ...] = ()
    shared_prefixes: tuple[SharedPrefix, ...] = ()


class _Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    name: str = ""
    expires: datetime.datetime | None = None


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[_Key] = []
    own_salt: bool = True
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 1.0
    limits: Limits = Limits()
    caps: Caps = Caps()


class _Shared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefixes: list[SharedPrefix] = []


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: dict[str, dict[str, Any]] = {}
    shared: dict[str, Any] = {}


def read_tenant_file(path: Path) -> TenantSet:
    """Raises TenantFileError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TenantFileError(f"cannot be read: {error.strerror}") from None
    try:
        return parse_tenants(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise TenantFileError("is not UTF-8 text") from None


def parse_tenants(text: str) -> TenantSet:
    """Raises TenantFileError."""
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TenantFileError(f"is not TOML: {error}") from None
    file = _convert(parsed, _File, "")
    tenants: dict[str, Tenant] = {}
    keys: list[KnownKey] = []
    seen: set[bytes] = set()
    for tenant_id, fields in file.tenants.items():
        path = f"tenants.{check_tenant_id(tenant_id)}"
        entry = _convert(fields, _Entry, path)
        tenants[tenant_id] = tenant = _tenant(tenant_id, entry)
        for index, key in enumerate(entry.keys):
            known = _known_key(key, tenant, f"{path}.keys[{index}]")
            if known.digest in seen:
                raise TenantFileError(f"{path}.keys[{index}].sha256: the same key stands above")
            seen.add(known.digest)
            keys.append(known)
    shared = _convert(file.shared, _Shared, "shared").prefixes
    for index, prefix in enumerate(shared):
        if (prefix.text is None) == (prefix.messages is None):
            raise TenantFileError(f"shared.prefixes[{index}]: give either text or messages")
    return TenantSet(tenants=tenants, keys=tuple(keys), shared_prefixes=tuple(shared))


def check_tenant_id(tenant_id: str) -> str:
    """Raises TenantFileError."""
    if not _TENANT_ID.fullmatch(tenant_id):
        raise TenantFileError(
            f"tenants.{tenant_id[:64]!r}: an id is 1 to 64 of the characters A-Z a-z 0-9 . _ - and "
            "begins with a letter or a digit"
        )
    return tenant_id


def _tenant(tenant_id: str, entry: _Entry) -> Tenant:
    return Tenant(
        tenant_id=tenant_id,
        namespace_owner=tenant_id if entry.own_salt else "",
        weight=entry.weight,
        limits=entry.limits,
        caps=entry.caps,
    )


def _known_key(key: _Key, tenant: Tenant, path: str) -> KnownKey:
    expires_at = None
    if key.expires is not None:
        if key.expires.tzinfo is None:
            raise TenantFileError(f"{path}.expires: must say its time zone, such as a Z at its end")
        expires_at = key.expires.timestamp()
    return KnownKey(digest=bytes.fromhex(key.sha256), tenant=tenant, expires_at=expires_at)


def _convert(value: Any, into: type[_T], path: str) -> _T:
    try:
        return msgspec.convert(value, into, builtin_types=_BUILTIN, dec_hook=_size)
    except msgspec.ValidationError as error:
        raise TenantFileError(described(error, path).message.rstrip(".")) from None


def _size(kind: type[Any], value: Any) -> Any:
    """Raises ValueError, which msgspec tells with the field's path."""
    assert kind is Size
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError("expected a size such as 512MB or 4GiB")
    return Size(setting_types.size_or_zero(str(value)))
