"""Stored responses are user data: sealed where there is a key, over restarts, gone once deleted."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from service.sessions.history import History
from tests.gateway_kit import MODEL_NAME
from tests.http_kit import say, serving

SAID = "quixotic zephyr"
ASKED = "jovial wombat"
RULES = "brusque lynx"


def respond(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "input": ASKED, "instructions": RULES, **fields}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_the_file_holds(tmp_path: Path, is_sealed: bool) -> None:
    settings: dict[str, Any] = {"sessions_dir": str(tmp_path / "sessions")}
    if is_sealed:
        key = tmp_path / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        settings["encryption_key_file"] = str(key)
    file = tmp_path / "sessions" / "sessions"

    def found() -> list[bool]:
        """Of the words, which stand in the file."""
        content = file.read_bytes()
        return [text.encode() in content for text in (SAID, ASKED, RULES)]

    with serving(say(SAID), **settings) as served, served.client() as client:
        kept = respond(client)
        deleted = respond(client, previous_response_id=kept["id"])
        respond(client, store=False)
    assert found() == [not is_sealed] * 3
    assert file.stat().st_mode & 0o777 == 0o600
    with serving(say(SAID), **settings) as served, served.client() as client:
        assert client.get(f"/v1/responses/{kept['id']}").json() == kept
        following = respond(client, previous_response_id=deleted["id"])
        assert following["history"] == "exact"
        for response in (kept, deleted, following):
            assert client.delete(f"/v1/responses/{response['id']}").status_code == 200
    assert found() == [False] * 3


def test_a_fork_has_the_ids_and_not_the_response() -> None:
    whole = msgspec.structs.replace(
        History.empty("model", b"key"), ids=b"1234", attachment=b"text", relatives=("first",)
    )
    forked = whole.forked("second")
    assert (forked.ids, forked.attachment) == (b"1234", b"")
    assert forked.relatives == ("first", "second")
    assert History.decode(whole.encode(), "model") == whole


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sessions_dir": str(tmp_path / "sessions")}
    with serving(say(SAID), **settings) as served, served.client() as client:
        kept = respond(client)
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    settings["encryption_key_file"] = str(key)
    with serving(say(SAID), **settings) as served, served.client() as client:
        assert client.get(f"/v1/responses/{kept['id']}").status_code == 404
