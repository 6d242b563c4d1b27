"""The ring of what was asked lately: what a record says, its bounds, and that it holds no text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.shared_prefixes import SharedPrefixes
from service.request_history import RequestHistory, RequestRecord, ServedRequest
from tests.gateway_kit import BLOCK_SIZE, byte_ids_of, ids_of, make_card
from tests.http_kit import say, serving

CARD = make_card()


def ids(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def asked(token_ids: np.ndarray | None = None, **fields: Any) -> ServedRequest:
    token_ids = ids(BLOCK_SIZE * 4 + 3) if token_ids is None else token_ids
    known = {
        "request_id": "r",
        "tenant": "acme",
        "session": "",
        "cache_salt": "",
        "num_prompt_tokens": len(token_ids),
        "num_output_tokens": 0,
        "num_device_tokens": 0,
        "num_host_tokens": 0,
        "num_disk_tokens": 0,
    }
    return ServedRequest(token_ids=token_ids, **(known | fields))


def make_history(shared: SharedPrefixes | None = None, **limits: Any) -> RequestHistory:
    return RequestHistory(lambda: CARD, lambda: shared, clock=lambda: 1e9, **limits)


def only(history: RequestHistory) -> RequestRecord:
    (record,) = history.records()
    return record


def test_a_record_has_hashes_and_counts() -> None:
    history = make_history()
    history.add(
        asked(
            num_prompt_tokens=BLOCK_SIZE * 3 + 1,
            num_output_tokens=20,
            num_device_tokens=16,
            num_host_tokens=8,
            num_disk_tokens=4,
        )
    )
    record = only(history)
    names = hash_blocks(Namespace(CARD.fingerprint), ids(BLOCK_SIZE * 4 + 3), BLOCK_SIZE)
    firsts = [int.from_bytes(name[:8], "little") for name in names]
    assert record.block_hashes.tolist() == firsts
    assert record.prompt_hashes.tolist() == firsts[:3]
    assert (record.at, record.tenant, record.session) == (1e9, "acme", "")
    assert (record.num_prompt_tokens, record.num_output_tokens) == (BLOCK_SIZE * 3 + 1, 20)
    assert record.num_cached_tokens == 28
    assert record.namespace == Namespace(CARD.fingerprint).root_hash[:4].hex()


def test_walls_and_sessions_are_told_apart_without_being_named() -> None:
    history = make_history()
    for fields in (
        {"cache_salt": "secret"},
        {"session": "mine"},
        {"session": "mine", "tenant": "other"},
    ):
        history.add(asked(**fields))
    salted, first, second = history.records()
    assert (salted.session, len(first.session)) == ("", 16)
    assert salted.namespace != first.namespace == second.namespace
    assert not set(salted.block_hashes.tolist()) & set(first.block_hashes.tolist())
    assert first.session != second.session
    assert "secret" not in repr(history.records())
    assert "mine" not in repr(history.records())


def test_a_shared_prefix_is_named_as_the_cache_names_it() -> None:
    shared = SharedPrefixes(BLOCK_SIZE)
    shared.set([ids(BLOCK_SIZE * 2)])
    history = make_history(shared)
    for salt in ("one", "two"):
        history.add(asked(cache_salt=salt))
    first, second = (record.block_hashes.tolist() for record in history.records())
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_it_is_bounded_in_requests() -> None:
    history = make_history(max_requests=3)
    for number in range(5):
        history.add(asked(request_id=str(number)))
    assert [record.request_id for record in history.records()] == ["2", "3", "4"]


def test_it_is_bounded_in_bytes() -> None:
    history = make_history(max_bytes=10_000)
    for _ in range(100):
        history.add(asked(ids(BLOCK_SIZE * 100)))
        assert history.num_bytes == sum(record.num_bytes for record in history.records()) <= 10_000
    assert len(history) == 10_000 // only_bytes(history)


def only_bytes(history: RequestHistory) -> int:
    (size,) = {record.num_bytes for record in history.records()}
    return size


def test_a_tenant_is_forgotten_alone() -> None:
    history = make_history()
    for tenant in ("acme", "other", "acme"):
        history.add(asked(tenant=tenant))
    assert history.forget("acme") == 2
    assert only(history).tenant == "other"
    assert history.num_bytes == only(history).num_bytes


def test_a_session_is_forgotten_alone() -> None:
    history = make_history()
    for session, tenant in (("a", "acme"), ("b", "acme"), ("a", "other"), ("", "acme")):
        history.add(asked(session=session, tenant=tenant))
    assert history.forget("acme", "a") == 1
    assert [record.tenant for record in history.records()] == ["acme", "other", "acme"]
    assert history.forget("acme", "a") == 0


def test_listeners_are_told_and_nothing_is_kept_before_a_model_is_known() -> None:
    seen: list[RequestRecord] = []
    history = make_history()
    history.add_listener(seen.append)
    history.add(asked())
    assert seen == [only(history)]
    early = RequestHistory(lambda: None, lambda: None)
    early.add(asked())
    assert len(early) == 0


# ---------------------------------------------------------------- of a gateway


def ask(served: Any, text: str | list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": served.model, "prompt": text, "max_tokens": 64, **fields}
    with served.client() as client:
        answer: dict[str, Any] = client.post("/v1/completions", json=body).json()
    return answer["usage"]


def test_a_gateway_records_each_prompt_once() -> None:
    words = list(ids_of("The Danube, the Loire and the Vistula flow to three seas. " * 4))
    answer = "Indeed they do, all of them."
    with serving(say(answer)) as served:
        usage = ask(served, words, n=2)
        again = ask(served, words, session_id="trip")
        history = served.gateway.history
        assert history is not None
        first, second = history.records()
    stored = len(words) + len(answer)
    assert first.num_prompt_tokens == usage["prompt_tokens"] == len(words)
    assert len(first.block_hashes) == stored // BLOCK_SIZE > first.num_prompt_blocks
    assert (first.session, second.session != "") == ("", True)
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert second.num_cached_tokens == cached > 0
    assert second.prompt_hashes.tolist() == first.prompt_hashes.tolist()


@pytest.mark.parametrize("answer", ["x", "The Oder, too, is a river that one may like."])
def test_an_answers_blocks_are_those_that_a_next_prompt_has(answer: str) -> None:
    words = list(ids_of("The Danube, the Loire and the Vistula flow to three seas. " * 4))
    with serving(say(answer)) as served:
        ask(served, words)
        ask(served, [*words, *byte_ids_of(answer), *words])
        history = served.gateway.history
        assert history is not None
        first, second = history.records()
    size = len(first.block_hashes)
    assert second.block_hashes[:size].tolist() == first.block_hashes.tolist()


def test_what_is_deleted_leaves_the_history_too() -> None:
    words = list(ids_of("The Danube, the Loire and the Vistula flow to three seas. " * 4))
    with serving(say("x")) as served, served.client() as client:
        for session in ("one", "two", "two"):
            ask(served, words, session_id=session)
        history = served.gateway.history
        assert history is not None
        assert client.delete("/v1/sessions/two").status_code == 200
        assert len(history) == 1
        assert client.delete("/v1/tenants/me/data").status_code == 200
        assert len(history) == 0


def test_it_can_be_turned_off() -> None:
    with serving(say("x"), no_request_history=True) as served:
        ask(served, "Some words that nobody will keep.")
        assert served.gateway.history is None


# ---------------------------------------------------------------- as lines


def test_the_lines_are_a_trace_and_hold_no_hashes() -> None:
    words = list(ids_of("The Danube, the Loire and the Vistula flow to three seas. " * 4))
    answer = "Indeed they do, all of them."
    with serving(say(answer)) as served, served.client() as client:
        ask(served, words)
        ask(served, [*words, *byte_ids_of(answer)], session_id="trip")
        response = client.get("/v1/cache/history")
        latest = client.get("/v1/cache/history?limit=1").text
        for limit in ("0", "20001", "-1", "x", "1.0"):
            assert client.get(f"/v1/cache/history?limit={limit}").status_code == 400
        hashes = [name for row in served.gateway.history.records() for name in row.block_hashes]
    assert response.headers["content-type"] == "application/x-ndjson"
    first, second = (json.loads(line) for line in response.text.splitlines())
    num_prompt, num_stored = len(words) // BLOCK_SIZE, (len(words) + len(answer)) // BLOCK_SIZE
    assert first["hash_ids"] == list(range(num_prompt))
    assert first["output_hash_ids"] == list(range(num_prompt, num_stored))
    assert second["hash_ids"] == list(range(num_stored))
    assert (first["timestamp"], first["input_length"]) == (0, len(words))
    assert (first["session"], len(second["session"])) == ("", 16)
    assert second["cached"]["device"] > 0 == second["cached"]["disk"]
    assert not any(str(name) in response.text for name in hashes)
    (only_line,) = latest.splitlines()
    assert json.loads(only_line)["hash_ids"] == list(range(num_stored))


def test_without_a_history_the_route_says_so() -> None:
    with serving(say("x"), no_request_history=True) as served, served.client() as client:
        response = client.get("/v1/cache/history")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "no_history"
