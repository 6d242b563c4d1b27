"""The wall between tenants, and what a tenant's requests may ask of eviction."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.block_hash import Namespace
from service.errors import InvalidRequest
from service.tenants.tenant import EVERYONE, Caps, Tenant, tenant_of_key


def tenant(owner: str | None) -> Tenant:
    return Tenant(tenant_id="t", namespace_owner=owner)


OWNERS = st.text("abc0123456789:.-", max_size=12)


@given(OWNERS, st.text(max_size=12), OWNERS, st.text(max_size=12))
def test_no_two_pairs_of_owner_and_salt_meet(
    owner: str, salt: str, other_owner: str, other_salt: str
) -> None:
    one = tenant(owner).namespace_salt(salt)
    other = tenant(other_owner).namespace_salt(other_salt)
    assert (one == other) == ((owner, salt) == (other_owner, other_salt))


@given(OWNERS, st.text(max_size=12), st.sampled_from(["", "other", "9"]))
def test_whoever_reads_a_salt_finds_what_the_client_gave(
    owner: str, salt: str, reader: str
) -> None:
    assert tenant(reader).client_salt(tenant(owner).namespace_salt(salt)) == salt


@pytest.mark.parametrize(
    ("owner", "salt", "forged"),
    [("acme", "", "4:acme"), ("acme", "x", "4:acmex"), ("", "x", "0:x"), ("a", "b", "1:ab")],
)
def test_a_client_cannot_write_its_way_into_another_namespace(
    owner: str, salt: str, forged: str
) -> None:
    aimed_at = tenant(owner).namespace_salt(salt)
    assert aimed_at == forged
    for attacker in ("", "mallory"):
        assert tenant(attacker).namespace_salt(forged) != aimed_at


def test_whom_a_worker_charges() -> None:
    assert EVERYONE.charged_as == ""
    assert [tenant(owner).charged_as for owner in ("", "acme")] == ["t", "t"]


def test_without_keys_a_salt_stands_as_it_is() -> None:
    assert EVERYONE.namespace_salt(None) == ""
    assert EVERYONE.namespace_salt("4:acmex") == "4:acmex" == EVERYONE.client_salt("4:acmex")


def test_a_salt_from_before_there_were_tenants_is_the_clients() -> None:
    assert tenant("acme").client_salt("blue") == "blue"
    assert tenant("acme").client_salt("") == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("salt", "Salt"),
        ("salt", "salt "),
        ("salt", " salt"),
        ("a b", "a\u00a0b"),
        ("a b", "a  b"),
        (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
        ("\ufb01", "fi"),
        ("ß", "ss"),
        ("x", "x\x00"),
    ],
)
def test_salts_that_differ_in_case_form_or_spacing_are_different(one: str, other: str) -> None:
    roots = {
        Namespace("model", cache_salt=who.namespace_salt(salt)).root_hash
        for who in (EVERYONE, tenant("acme"), tenant(""))
        for salt in (one, other)
    }
    assert len(roots) == 6


def test_what_a_request_asks_for_is_refused_by_name() -> None:
    caps = Caps(max_priority=3, max_retention=60.0)
    caps.check(3, 60.0)
    caps.check(None, None)
    Caps().check(10, 1e6)
    with pytest.raises(InvalidRequest, match=r"priority: at most 3 .* got 4") as failure:
        caps.check(4, None)
    assert (failure.value.param, failure.value.status) == ("priority", 400)
    with pytest.raises(InvalidRequest, match=r"retention: at most 60 .* got 60.5") as failure:
        caps.check(None, 60.5)
    assert failure.value.param == "retention"


def test_what_was_agreed_before_is_cut_to_what_is_allowed() -> None:
    caps = Caps(max_priority=-2, max_retention=5.0)
    assert (caps.priority(0), caps.priority(-3)) == (-2, -3)
    assert (caps.retention(60.0), caps.retention(1.0)) == (5.0, 1.0)
    assert (Caps().priority(7), Caps().retention(9.0)) == (7, 9.0)


def test_the_tenant_of_a_lone_key() -> None:
    ids = {tenant_of_key(key) for key in ("one", "two", "One")}
    assert len(ids) == 3
    assert all(len(found) == 32 and "one" not in found for found in ids)
