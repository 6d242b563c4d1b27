"""`headstart tenants`: make a key, list them, revoke one.

Owns what these commands print. A new key is printed once, on standard output and nowhere else; the
file has its digest. A running server takes the change up by itself.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service import config
from service.config import ConfigError

if TYPE_CHECKING:
    from service.tenants.file_editor import TenantFileEditor

__all__ = ["tenants_app"]

_File = Annotated[
    str | None,
    typer.Option("--tenant-file", metavar="FILE", help="The tenant file.", show_default=False),
]
_Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id.")]


def tenants_app() -> typer.Typer:
    app = typer.Typer(help="Make, list and revoke the keys of tenants.", no_args_is_help=True)
    app.command("create-key")(_create_key)
    app.command("list")(_list)
    app.command("revoke-key")(_revoke_key)
    return app


def _create_key(
    tenant: _Tenant,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="To tell the tenant's keys apart.")
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="DATE", help="Until when it opens anything: 2027-01-31, UTC."
        ),
    ] = None,
    tenant_file: _File = None,
) -> None:
    """Make a key of a tenant, which is begun if need be, and print it, once."""
    from service.tenants.key_table import digest_of, make_key
    from service.tenants.tenant_file import TenantFileError

    editor = _editor(tenant_file)
    ends_at = None if expires is None else _date(expires)
    key = make_key()
    try:
        is_new = editor.add_key(tenant, digest_of(key), name, ends_at)
    except TenantFileError as error:
        raise ConfigError(f"the tenant file: {error}") from None
    _say(f"a key of the {'new ' if is_new else ''}tenant {tenant}; it is shown this once")
    typer.echo(key)


def _list(tenant_file: _File = None) -> None:
    """Print tenants and keys: how each key's digest begins, its name, and until when it holds."""
    from service.tenants.tenant_file import TenantFileError

    editor = _editor(tenant_file)
    try:
        notes, tenant_ids = editor.keys(), editor.tenant_ids()
    except TenantFileError as error:
        raise ConfigError(f"the tenant file: {error}") from None
    rows = [(note.tenant_id, note.key_id, note.name, _until(note.expires)) for note in notes]
    keyless = [item for item in tenant_ids if item not in {note.tenant_id for note in notes}]
    rows += [(tenant_id, "-", "", "") for tenant_id in keyless]
    table = [("TENANT", "KEY", "NAME", "EXPIRES"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def _revoke_key(
    tenant: _Tenant,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Its name, or how its digest begins, as listed.")
    ],
    tenant_file: _File = None,
) -> None:
    """Remove a key; what was cached and told with it stays the tenant's."""
    from service.tenants.tenant_file import TenantFileError

    try:
        note = _editor(tenant_file).remove_key(tenant, key)
    except TenantFileError as error:
        raise ConfigError(f"the tenant file: {error}") from None
    _say(f"the key {note.name or note.key_id} of {tenant} opens nothing any more")


def _editor(given: str | None) -> TenantFileEditor:
    from service.tenants.file_editor import TenantFileEditor

    path: Path | None = config.resolve("tenants", {"tenant_file": given})["tenant_file"]
    if path is None:
        raise ConfigError("headstart tenants needs a --tenant-file")
    return TenantFileEditor(path)


def _date(given: str) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(f"--expires: expected a date such as 2027-01-31, got {given!r}") from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    if found <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"--expires: {given} has passed")
    return found


def _until(expires: datetime.datetime | None) -> str:
    if expires is None:
        return "never"
    has_passed = expires <= datetime.datetime.now(datetime.UTC)
    return f"{expires.isoformat()}{' (expired)' if has_passed else ''}"


def _say(text: str) -> None:
    print(f"headstart: {text}", file=sys.stderr, flush=True)
