"""Changes to the tenant file: a key more, a key less.

Owns the writing of the file: whole or not at all, readable by its owner, comments and order left as
they are. What is written is read back by the rules of the server first, so that no change made here
can be one that it refuses. Knows no key, only digests.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AoT

from service.tenants.tenant_file import TenantFileError, check_tenant_id, parse_tenants

__all__ = ["KeyNote", "TenantFileEditor"]

_ID_DIGITS = 8  # of a digest, as the name of a key that has none
_READABLE = 0o640


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNote:
    """What the file says of one key; ``key_id`` is how its digest begins."""

    tenant_id: str
    key_id: str
    name: str
    expires: datetime.datetime | None


class TenantFileEditor:
    """A file that is not there counts as an empty one. All methods raise TenantFileError."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # of a link, what it leads to is changed

    def keys(self) -> list[KeyNote]:
        """In the file's order; tenants without a key have none."""
        document = self._read()
        return [
            _note(tenant_id, key)
            for tenant_id, tenant in _tenants(document).items()
            for key in tenant.get("keys", ())
        ]

    def tenant_ids(self) -> list[str]:
        return list(_tenants(self._read()))

    def add_key(
        self, tenant_id: str, digest: bytes, name: str, expires: datetime.datetime | None
    ) -> bool:
        """Whether the tenant is a new one."""
        check_tenant_id(tenant_id)
        with self._changing() as document:
            tenants = _tenants(document)
            is_new = tenant_id not in tenants
            if is_new:
                tenants[tenant_id] = tomlkit.table(is_super_table=False)
            tenant = tenants[tenant_id]
            if name and any(name == key.get("name") for key in tenant.get("keys", ())):
                raise TenantFileError(f"{tenant_id} has a key named {name!r} already")
            if "keys" not in tenant:
                tenant["keys"] = tomlkit.aot()
            keys: MutableSequence[Any] = tenant["keys"]
            # A file written by hand may have its keys in brackets on one line.
            key = tomlkit.table() if isinstance(keys, AoT) else tomlkit.inline_table()
            key.update({"sha256": digest.hex()})
            if name:
                key["name"] = name
            if expires is not None:
                key["expires"] = expires
            keys.append(key)
        return is_new

    def remove_key(self, tenant_id: str, key: str) -> KeyNote:
        """``key`` is its name, or at least the first eight digits of its digest."""
        with self._changing() as document:
            tenant = _tenants(document).get(tenant_id)
            if tenant is None:
                raise TenantFileError(f"there is no tenant {tenant_id!r}")
            keys: MutableSequence[Any] = tenant.get("keys", [])
            found = [index for index, item in enumerate(keys) if _is_meant(item, key)]
            if len(found) != 1:
                number = "more than one key" if found else "no key"
                raise TenantFileError(f"{tenant_id} has {number} {key!r}")
            note = _note(tenant_id, keys[found[0]])
            del keys[found[0]]
        return note

    def _read(self) -> tomlkit.TOMLDocument:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except OSError as error:
            raise TenantFileError(f"cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TenantFileError("is not UTF-8 text") from None
        parse_tenants(text)
        return tomlkit.parse(text)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tomlkit.TOMLDocument]:
        """What is done to the document is written, unless something was wrong with it."""
        try:
            folder = os.open(self._path.parent, os.O_RDONLY)
        except OSError as error:
            raise TenantFileError(f"{self._path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two at a time would lose a key of the first
            document = self._read()
            yield document
            text = tomlkit.dumps(document)
            parse_tenants(text)
            self._write(text)
            os.fsync(folder)
        except OSError as error:
            raise TenantFileError(f"cannot be written: {error.strerror}") from None
        finally:
            os.close(folder)

    def _write(self, text: str) -> None:
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".tenants-")  # 0600
        try:
            with open(handle, "w", encoding="utf-8") as file:
                with contextlib.suppress(FileNotFoundError):
                    present = os.stat(self._path)
                    os.fchmod(handle, stat.S_IMODE(present.st_mode) & _READABLE)
                    with contextlib.suppress(PermissionError):
                        os.fchown(handle, present.st_uid, present.st_gid)
                file.write(text)
                file.flush()
                os.fsync(handle)
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _tenants(document: tomlkit.TOMLDocument) -> MutableMapping[str, Any]:
    if "tenants" not in document:
        document["tenants"] = tomlkit.table(is_super_table=True)
    tenants: MutableMapping[str, Any] = document["tenants"]
    return tenants


def _note(tenant_id: str, key: MutableMapping[str, Any]) -> KeyNote:
    return KeyNote(
        tenant_id=tenant_id,
        key_id=str(key["sha256"])[:_ID_DIGITS].lower(),
        name=str(key.get("name", "")),
        expires=key.get("expires"),
    )


def _is_meant(item: MutableMapping[str, Any], key: str) -> bool:
    is_digest = len(key) >= _ID_DIGITS and str(item["sha256"]).lower().startswith(key.lower())
    return is_digest or item.get("name") == key
