"""Sessions with a real worker: a turn finds the keys and values of all that was said before it."""

from __future__ import annotations

from typing import Any

from tests.http_kit import metric
from tests.session_kit import wait_for
from tests.target import Target


def turn(target: Target, messages: list[dict[str, Any]], **fields: Any) -> Any:
    body = {"model": target.model, "messages": messages, "max_tokens": 24}
    headers = {"X-Session-ID": "real"}
    response = target.http.post("/v1/chat/completions", json={**body, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_turn_hits_through_the_end_of_the_last_answer(tiny_target: Target) -> None:
    tiny_target.http.delete("/v1/sessions/real")
    messages: list[dict[str, Any]] = []
    num_known = 0
    for number in range(4):
        messages.append({"role": "user", "content": f"Question {number}, please."})
        # Random weights say what no encoding would give, and half of it is no text. Their answers
        # must not hold added tokens, which their text would not show.
        never = {str(token_id): -100 for token_id in range(3)}
        answer = turn(tiny_target, messages, seed=number, temperature=1.0, logit_bias=never)
        usage = answer["usage"]
        assert answer["history"] == "exact", number
        # The last token was sampled and never run, so its KV is not there.
        assert usage["prompt_tokens_details"]["cached_tokens"] >= num_known - 1
        assert usage["prompt_tokens"] > num_known
        num_known = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append(answer["choices"][0]["message"])
    shown = tiny_target.http.get("/v1/sessions/real").json()
    assert shown["num_tokens"] == num_known
    assert shown["hit_rate"] > 0.5
    assert tiny_target.http.delete("/v1/sessions/real").status_code == 200


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_deleted_session_leaves_no_blocks(tiny_target: Target) -> None:
    http = tiny_target.http
    told = [{"role": "user", "content": "Where the old jar of plums is kept. " * 8}]
    body = {"model": tiny_target.model, "max_tokens": 8, "temperature": 0, "messages": told}
    first = http.post("/v1/chat/completions", json={**body, "session_id": "gone"}).json()
    assert cached(first) < 10
    assert cached(http.post("/v1/chat/completions", json=body).json()) > 40
    assert http.get("/v1/sessions/gone").json()["blocks"]["device"] > 2
    num_kept = metric(http, "kv_cache_blocks", state="evictable")
    assert http.delete("/v1/sessions/gone").status_code == 200
    # To ask for it stores it again: once, after the deletion was carried out.
    wait_for(lambda: metric(http, "kv_cache_blocks", state="evictable") < num_kept - 2)
    assert cached(http.post("/v1/chat/completions", json=body).json()) < 10


def test_what_is_prewarmed_is_there_for_the_first_turn(tiny_target: Target) -> None:
    messages = [{"role": "user", "content": "A long and winding question of its own. " * 6}]
    created = tiny_target.http.post(
        "/v1/sessions", json={"session_id": "warm", "messages": messages}
    )
    assert created.status_code == 201, created.text
    num_tokens = created.json()["num_tokens"]
    body = {"model": tiny_target.model, "max_tokens": 4, "messages": messages}
    answer = tiny_target.http.post("/v1/chat/completions", json={**body, "session_id": "warm"})
    assert cached(answer.json()) == num_tokens - 1
    assert tiny_target.http.delete("/v1/sessions/warm").status_code == 200
