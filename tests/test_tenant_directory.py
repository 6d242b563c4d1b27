"""Who there is: at the start, after a change, and after a change that cannot be used."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from service.config import ConfigError, GatewayConfig
from service.tenants.directory import TenantDirectory
from service.tenants.tenant import EVERYONE, tenant_of_key
from tests.tenant_kit import hash_of, two_tenants, write


def directory(path: str | None = None, **settings: Any) -> TenantDirectory:
    config = GatewayConfig(tenant_file=path, **settings)
    return TenantDirectory(config, poll_seconds=0.005)


def tenant_id(found: TenantDirectory, key: str) -> str | None:
    known = found.find(key)
    return None if known is None else known.tenant.tenant_id


def test_without_keys_there_is_one_tenant() -> None:
    found = directory()
    assert not found.needs_keys
    assert found.tenants == (EVERYONE,)
    assert found.tenant("whoever").namespace_owner is None


def test_each_key_of_a_key_file_is_a_tenant_behind_a_wall_of_its_own() -> None:
    found = directory(api_keys=("one", "two", "root"), admin_keys=("root",))
    ids = [tenant_id(found, key) for key in ("one", "two", "root")]
    assert ids == [tenant_of_key(key) for key in ("one", "two", "root")]
    assert all(tenant.namespace_owner == tenant.tenant_id for tenant in found.tenants)
    admins = [(key, known.is_admin) for key in ("one", "root") if (known := found.find(key))]
    assert admins == [("one", False), ("root", True)]
    assert found.find("three") is None


def test_the_keys_of_a_tenant_are_the_same_tenant(tmp_path: Path) -> None:
    found = directory(write(tmp_path, two_tenants()), admin_keys=("root",))
    ids = [tenant_id(found, key) for key in ("hs-acme", "hs-acme-two", "hs-globex")]
    assert ids == ["acme", "acme", "globex"]
    assert tenant_id(found, "root") == tenant_of_key("root")


def test_a_key_that_moved_to_the_file_is_its_tenants_and_an_admin_stays_one(tmp_path: Path) -> None:
    path = write(tmp_path, two_tenants())
    found = directory(path, api_keys=("hs-acme",), admin_keys=("hs-globex",))
    assert tenant_id(found, "hs-acme") == "acme"
    admin = found.find("hs-globex")
    assert admin is not None
    assert admin.is_admin


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    found = directory(write(tmp_path, ""))
    assert found.needs_keys
    assert found.find("") is None
    assert found.tenants == ()


def test_a_broken_file_ends_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, "[tenants.acme]\nweight = -1")
    with pytest.raises(ConfigError, match=r"--tenant-file: .*: tenants.acme.weight: "):
        directory(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        directory(str(tmp_path / "none"))


def test_an_expired_key_opens_nothing(tmp_path: Path) -> None:
    now = [1_700_000_000.0]
    text = (
        f"[[tenants.acme.keys]]\nsha256 = '{hash_of('one')}'\nexpires = 2023-11-15T00:00:00+01:00"
    )
    config = GatewayConfig(tenant_file=write(tmp_path, text))
    found = TenantDirectory(config, clock=lambda: now[0])
    assert found.find("one") is not None
    now[0] = 1_700_002_800.0
    assert found.find("one") is None


async def until(condition: Any) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.002)


async def test_changes_are_followed_and_told(tmp_path: Path) -> None:
    found = directory(write(tmp_path, two_tenants()))
    told: list[int] = []
    found.add_listener(lambda: told.append(len(found.tenants)))
    watching = asyncio.create_task(found.watch())
    third = f"\n[[tenants.initech.keys]]\nsha256 = '{hash_of('new')}'\n"
    write(tmp_path, two_tenants(third))
    await until(lambda: found.find("new"))
    assert told == [3]
    assert found.tenant("initech").namespace_owner == "initech"
    write(tmp_path, "")
    await until(lambda: found.find("hs-acme") is None)
    assert found.tenant("acme").namespace_owner == "acme"  # its sessions are still behind its wall
    watching.cancel()


async def test_a_broken_change_changes_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headstart")
    path = write(tmp_path, two_tenants())
    found = directory(path)
    watching = asyncio.create_task(found.watch())
    write(tmp_path, two_tenants("\n[tenants.acme.limits]\nmax_concurrent = 0\n"))
    await until(lambda: found.problem)
    assert found.problem.startswith("tenants.acme.limits.max_concurrent: expected")
    assert found.find("hs-acme") is not None
    os.unlink(path)
    await until(lambda: "cannot be read" in found.problem)
    assert found.find("hs-acme") is not None
    write(tmp_path, two_tenants())
    await until(lambda: not found.problem)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert ["max_concurrent" in error for error in errors] == [True, False]
    assert not any("hs-acme" in r.getMessage() for r in caplog.records)
    watching.cancel()


async def test_a_file_is_read_when_asked_for_even_if_it_looks_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, two_tenants())
    found = directory(path)
    stamp = os.stat(path)
    content = two_tenants().replace(hash_of("hs-globex"), hash_of("hs-other"))
    with open(path, "r+") as file:
        file.write(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    watching = asyncio.create_task(found.watch())
    await asyncio.sleep(0.05)
    assert found.find("hs-other") is None
    found.ask_to_reload()
    await until(lambda: found.find("hs-other"))
    watching.cancel()


async def test_there_is_nothing_to_watch_without_a_file() -> None:
    await asyncio.wait_for(directory().watch(), 1.0)
