"""Keys made, listed and revoked: in the file, and as a person types it."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from service.tenants.file_editor import TenantFileEditor
from service.tenants.key_table import digest_of
from service.tenants.tenant_file import TenantFileError, read_tenant_file
from tests.cli_kit import Command, command_line
from tests.tenant_kit import hash_of, two_tenants, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def keys_of(path: Path) -> list[tuple[str, str]]:
    return [(key.tenant.tenant_id, key.digest.hex()) for key in read_tenant_file(path).keys]


def test_a_new_file_is_its_owners_alone(path: Path) -> None:
    old = os.umask(0)
    try:
        assert TenantFileEditor(path).add_key("acme", digest_of("one"), "", None)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys_of(path) == [("acme", hash_of("one"))]
    assert [item.name for item in path.parent.iterdir()] == ["tenants.toml"]


def test_what_stands_in_the_file_stays_as_it_is(path: Path) -> None:
    text = two_tenants("\n[tenants.acme.limits] # theirs\nmax_concurrent = 3\n")
    write(path.parent, "# ours\n" + text)
    path.chmod(0o644)
    editor = TenantFileEditor(path)
    assert not editor.add_key("acme", digest_of("new"), "third", None)
    assert editor.add_key("initech", digest_of("newer"), "", None)
    after = path.read_text()
    assert after.startswith("# ours\n")
    assert "# theirs\nmax_concurrent = 3" in after
    assert stat.S_IMODE(path.stat().st_mode) == 0o640  # a group may read it, the world not
    assert keys_of(path) == [
        ("acme", hash_of("hs-acme")),
        ("acme", hash_of("hs-acme-two")),
        ("acme", hash_of("new")),
        ("globex", hash_of("hs-globex")),
        ("initech", hash_of("newer")),
    ]
    assert read_tenant_file(path).tenants["acme"].limits.max_concurrent == 3


def test_a_key_goes_by_name_or_by_its_digest(path: Path) -> None:
    write(path.parent, two_tenants())
    editor = TenantFileEditor(path)
    assert editor.remove_key("acme", "two").name == "two"
    assert editor.remove_key("globex", hash_of("hs-globex")[:10].upper()).tenant_id == "globex"
    assert keys_of(path) == [("acme", hash_of("hs-acme"))]
    assert editor.tenant_ids() == ["acme", "globex"]  # a tenant without keys is one still
    for tenant_id, key in (("acme", "two"), ("acme", hash_of("hs-acme")[:7]), ("none", "one")):
        with pytest.raises(TenantFileError):
            editor.remove_key(tenant_id, key)


def test_a_change_that_the_server_would_refuse_is_not_made(path: Path) -> None:
    write(path.parent, two_tenants())
    before = path.read_text()
    editor = TenantFileEditor(path)
    for tenant_id, key, name in (
        ("a b", "new", ""),
        ("acme", "hs-globex", ""),
        ("acme", "new", "one"),
    ):
        with pytest.raises(TenantFileError):
            editor.add_key(tenant_id, digest_of(key), name, None)
    assert path.read_text() == before
    path.write_text("[tenants.acme]\nweight = 0\n")
    with pytest.raises(TenantFileError, match=r"tenants\.acme\.weight"):
        editor.add_key("acme", digest_of("new"), "", None)


def test_the_last_key_leaves_a_tenant_that_can_have_others(path: Path) -> None:
    path.write_text(f"[[tenants.acme.keys]]\nname = 'only'\nsha256 = '{hash_of('one')}'\n")
    editor = TenantFileEditor(path)
    editor.remove_key("acme", "only")
    assert editor.tenant_ids() == ["acme"]
    assert not editor.add_key("acme", digest_of("two"), "only", None)
    assert keys_of(path) == [("acme", hash_of("two"))]


def test_changes_at_once_are_all_there(path: Path) -> None:
    def add(number: int) -> None:
        TenantFileEditor(path).add_key(f"t{number % 2}", digest_of(str(number)), "", None)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {digest for _, digest in keys_of(path)} == {hash_of(str(number)) for number in range(8)}


def test_a_link_keeps_leading_where_it_did(path: Path) -> None:
    real = path.parent / "real.toml"
    real.write_text("")
    path.symlink_to(real)
    TenantFileEditor(path).add_key("acme", digest_of("one"), "", None)
    assert path.is_symlink()
    assert keys_of(real) == [("acme", hash_of("one"))]


@pytest.fixture
def tenants(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    run = command_line(monkeypatch, capsys, "tenants", columns=80)
    monkeypatch.setenv("HEADSTART_TENANT_FILE", str(path))
    return run


def test_a_key_is_shown_once_and_kept_as_a_digest(tenants: Command, path: Path) -> None:
    code, out, err = tenants("create-key", "acme", "--name", "ci", "--expires", "2999-12-31")
    key = out.strip()
    assert code == 0
    assert key.startswith("hs-")
    assert "a key of the new tenant acme" in err
    assert key not in err
    assert key not in path.read_text()
    assert keys_of(path) == [("acme", hash_of(key))]
    _, listed, _ = tenants("list")
    assert listed.splitlines()[1].split() == [
        "acme",
        hash_of(key)[:8],
        "ci",
        "2999-12-31T00:00:00+00:00",
    ]
    assert key not in listed
    assert tenants("revoke-key", "acme", "ci")[0] == 0
    assert keys_of(path) == []
    assert tenants("list")[1].splitlines()[1].split() == ["acme", "-"]


def test_mistakes_get_one_line(tenants: Command, path: Path) -> None:
    for arguments, line in (
        (("create-key", "a b"), "the tenant file: tenants.'a b': an id is 1 to 64"),
        (("create-key", "acme", "--expires", "soon"), "--expires: expected a date such as"),
        (("create-key", "acme", "--expires", "2020-01-01"), "--expires: 2020-01-01 has passed"),
        (("revoke-key", "acme", "ci"), "the tenant file: there is no tenant 'acme'"),
    ):
        code, out, err = tenants(*arguments)
        assert code != 0
        assert out == ""
        assert err.startswith(f"headstart: {line}")
        assert err.count("\n") == 1
    assert not path.exists()
