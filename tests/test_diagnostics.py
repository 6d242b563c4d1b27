"""What the gateway knows of its latest requests, asked of a real gateway with a fake worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tenant_kit
from tests.session_kit import Talk, talking, user
from tests.tenant_kit import bearer, two_tenants


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    file = tenant_kit.write(folder, two_tenants())
    with talking(tenant_file=file, admin_keys=("hs-admin",)) as found:
        yield found


ACME, GLOBEX = bearer("hs-acme"), bearer("hs-globex")


def test_recent_requests_are_the_tenants_own(talk: Talk) -> None:
    first = talk.chat([user("one two three")], session="s1", headers=ACME)
    talk.chat([user("four five")], session=None, headers=GLOBEX)
    again = talk.chat([user("one two three")], session=None, headers=ACME)
    recent = talk.served.call(talk.served.gateway.diagnostics.recent, 10)
    assert [record.tenant for record in recent[:3]] == ["acme", "globex", "acme"]
    mine = talk.served.call(talk.served.gateway.diagnostics.recent, 2, "acme")
    assert [f"chatcmpl-{record.request_id}" for record in mine] == [
        again.json()["id"],
        first.json()["id"],
    ]
    latest, earlier = mine
    usage = again.json()["usage"]
    assert latest.num_prompt_tokens == usage["prompt_tokens"]
    assert latest.num_cached_tokens == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert (latest.outcome, latest.session, earlier.session) == ("stop", "", "s1")
    assert latest.num_output_tokens == len("fine")
    assert (latest.model, latest.worker_id) == ("tiny", "fake")
    times = (latest.queue_s, latest.prefill_s, latest.decode_s, latest.ttft_s)
    assert all(time is not None and 0 <= time < 10 for time in times)


def test_one_entry_for_each_prompt_and_not_for_each_choice(talk: Talk) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 2}
    answer = talk.client.post("/v1/completions", json=body, headers=ACME).json()
    hex_id = answer["id"].removeprefix("cmpl-")
    recent = talk.served.call(talk.served.gateway.diagnostics.recent, 3, "acme")
    assert [record.request_id for record in recent[:2]] == [f"{hex_id}-2", hex_id]


def test_what_is_deleted_is_forgotten(talk: Talk) -> None:
    talk.chat([user("to be forgotten")], session="gone", headers=ACME)
    recent = talk.served.gateway.diagnostics.recent
    assert talk.served.call(recent, 1, "acme")[0].session == "gone"
    assert talk.client.delete("/v1/sessions/gone", headers=ACME).status_code == 200
    assert "gone" not in [record.session for record in talk.served.call(recent, 100, "acme")]
    talk.chat([user("stays")], session=None, headers=GLOBEX)
    talk.client.delete("/v1/tenants/me/data", headers=ACME)
    assert talk.served.call(recent, 100, "acme") == []
    assert talk.served.call(recent, 100, "globex")
