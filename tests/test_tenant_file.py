"""The tenant file: what it says, and the words for what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.tenants.tenant import Caps, Limits, Tenant
from service.tenants.tenant_file import (
    SharedPrefix,
    TenantFileError,
    TenantSet,
    parse_tenants,
    read_tenant_file,
)
from tests.tenant_kit import hash_of

WHOLE = f"""
[tenants.acme]
weight = 2
own_salt = false

[[tenants.acme.keys]]
name = "ci"
sha256 = "{hash_of("one").upper()}"
expires = 2027-01-31T00:00:00Z

[[tenants.acme.keys]]
sha256 = "{hash_of("two")}"

[tenants.acme.limits]
requests_per_minute = 60
tokens_per_minute = 100_000
max_concurrent = 8
queue_share = 0.5

[tenants.acme.caps]
device_cache = "2GiB"
host_cache = 512
disk_cache = 0
max_sessions = 100
max_retention = 3600
max_priority = 3

[tenants."g.l-o_b"]

[[shared.prefixes]]
text = "You are"

[[shared.prefixes]]
messages = [{{ role = "system", content = "Be brief." }}]
"""


def test_everything_that_a_file_can_say() -> None:
    found = parse_tenants(WHOLE)
    acme = Tenant(
        tenant_id="acme",
        namespace_owner="",
        weight=2.0,
        limits=Limits(
            requests_per_minute=60,
            tokens_per_minute=100_000,
            max_concurrent=8,
            queue_share=0.5,
        ),
        caps=Caps(
            device_cache=2 * 2**30,  # type: ignore[arg-type]
            host_cache=512,  # type: ignore[arg-type]
            disk_cache=0,  # type: ignore[arg-type]
            max_sessions=100,
            max_retention=3600.0,
            max_priority=3,
        ),
    )
    other = Tenant(tenant_id="g.l-o_b", namespace_owner="g.l-o_b")
    assert found.tenants == {"acme": acme, "g.l-o_b": other}
    assert [(key.digest.hex(), key.expires_at, key.is_admin) for key in found.keys] == [
        (hash_of("one"), 1_801_353_600.0, False),
        (hash_of("two"), None, False),
    ]
    assert all(key.tenant == acme for key in found.keys)
    assert found.shared_prefixes == (
        SharedPrefix(text="You are"),
        SharedPrefix(messages=[{"role": "system", "content": "Be brief."}]),
    )


def test_an_empty_file_has_no_tenants() -> None:
    assert parse_tenants("# nobody yet\n") == TenantSet()


HASH = hash_of("one")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[tenants.acme\nx = 1", r"is not TOML: .*line 1"),
        ("\n\nx = = 1", r"is not TOML: .*line 3"),
        ("[tennants]", "tennants: unknown field"),
        ("tenants = 3", "tenants: expected"),
        ("[tenants.acme]\nwieght = 1", "tenants.acme.wieght: unknown field"),
        ("[tenants.acme]\nweight = 0", "tenants.acme.weight: expected"),
        ("[tenants.acme]\nown_salt = 1", "tenants.acme.own_salt: expected 'bool', got 'int'"),
        ("[tenants.'a b']", "tenants.'a b': an id is 1 to 64"),
        ("[tenants.'']", "tenants.'': an id is"),
        ("[tenants.acme.limits]\nrequests_per_minute = 0",
         "tenants.acme.limits.requests_per_minute: expected 'int' >= 1"),
        ("[tenants.acme.limits]\nqueue_share = 1.5", "tenants.acme.limits.queue_share: expected"),
        ("[tenants.acme.caps]\ndevice_cache = '2 lots'",
         "tenants.acme.caps.device_cache: unknown unit"),
        ("[tenants.acme.caps]\ndevice_cache = true",
         "tenants.acme.caps.device_cache: expected a size"),
        ("[tenants.acme.caps]\nmax_priority = 11", "tenants.acme.caps.max_priority: expected"),
        ("[[tenants.acme.keys]]\nsha256 = 'abc'", r"tenants.acme.keys\[0\].sha256: expected"),
        ("[[tenants.acme.keys]]\nname = 'x'", r"tenants.acme.keys\[0\].sha256: required"),
        (f"[[tenants.acme.keys]]\nsha256 = '{HASH}'\nexpires = 2027-01-31T00:00:00",
         r"tenants.acme.keys\[0\].expires: must say its time zone"),
        (f"[[tenants.a.keys]]\nsha256 = '{HASH}'\n[[tenants.b.keys]]\nsha256 = '{HASH}'",
         r"tenants.b.keys\[0\].sha256: the same key stands above"),
        ("[[shared.prefixes]]\ntext = 'a'\nmessages = []", r"shared.prefixes\[0\]: give either"),
        ("[[shared.prefixes]]", r"shared.prefixes\[0\]: give either"),
        ("[shared]\nprefix = 1", "shared.prefix: unknown field"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(TenantFileError, match=problem) as failure:
        parse_tenants(text)
    assert "\n" not in str(failure.value)
    assert HASH not in str(failure.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TenantFileError, match="cannot be read: No such file"):
        read_tenant_file(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(TenantFileError, match="is not UTF-8 text"):
        read_tenant_file(tmp_path / "binary")
