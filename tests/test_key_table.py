"""Keys by digest: found, expired, and nowhere to be read."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from service.tenants import key_table
from service.tenants.key_table import KeyTable, KnownKey, digest_of, make_key
from service.tenants.tenant import EVERYONE, Tenant

ACME = Tenant(tenant_id="acme", namespace_owner="acme")


def known(key: str, **fields: Any) -> KnownKey:
    return KnownKey(digest=digest_of(key), tenant=ACME, **fields)


def test_a_key_is_found_by_its_digest_alone() -> None:
    table = KeyTable([known("one"), known("two", is_admin=True)])
    found = table.find("two", now=0.0)
    assert found is not None
    assert (found.tenant, found.is_admin) == (ACME, True)
    for other in ("", "One", "one ", "on", "onee", "\udcff", digest_of("one").hex()):
        assert table.find(other, now=0.0) is None


def test_a_digest_is_a_plain_sha256() -> None:
    assert digest_of("hs-x") == hashlib.sha256(b"hs-x").digest()


def test_the_digest_of_nobody_opens_nothing() -> None:
    assert KeyTable([]).find("", now=0.0) is None
    assert EVERYONE.namespace_owner is None


def test_an_expired_key_is_none() -> None:
    table = KeyTable([known("one", expires_at=100.0)])
    assert table.find("one", now=99.9) is not None
    assert table.find("one", now=100.0) is None


def test_the_same_key_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="twice"):
        KeyTable([known("one"), known("one")])


def test_every_look_up_compares_once_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, unknown, near or empty: the same work, and never a comparison that ends early."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    fake = type("Hmac", (), {"compare_digest": staticmethod(compare)})
    monkeypatch.setattr(key_table, "hmac", fake)
    table = KeyTable([known(f"key-{number}") for number in range(50)])
    for key in ("key-0", "key-49", "key-50", "", "k" * 10_000):
        compared.clear()
        table.find(key, now=0.0)
        assert [right for _, right in compared] == [digest_of(key)]


def test_where_a_key_lies_in_the_table_is_unpredictable() -> None:
    tables = [KeyTable([known("one")]) for _ in range(2)]
    places = {next(iter(table._keys)) for table in tables}
    assert len(places) == 2
    assert digest_of("one") not in places


def test_made_keys_are_long_and_fit_a_header() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("hs-") and len(key) == 46 and key.isascii() for key in keys)


def test_no_key_and_no_digest_is_in_a_repr() -> None:
    assert digest_of("one").hex()[:8] not in repr(known("one"))
    assert repr(digest_of("one")) not in repr(known("one"))
