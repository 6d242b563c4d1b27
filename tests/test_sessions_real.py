"""Sessions with a real worker: a turn finds the keys and values of all that was said before it."""

from __future__ import annotations

from typing import Any

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
