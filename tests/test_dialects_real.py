"""The three APIs over one engine: the same greedy answer, and one cache behind them all."""

from __future__ import annotations

from typing import Any

from tests.target import Target

SYSTEM = "You are the assistant of a small shop and give good answers."


def post(target: Target, path: str, **fields: Any) -> dict[str, Any]:
    response = target.http.post(path, json={"model": target.model, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_one_answer_and_one_cache(tiny_target: Target) -> None:
    asked = [{"role": "user", "content": "Who goes there?"}]
    chat = post(
        tiny_target,
        "/v1/chat/completions",
        messages=[{"role": "system", "content": SYSTEM}, *asked],
        max_tokens=12,
    )
    message = post(tiny_target, "/v1/messages", system=SYSTEM, messages=asked, max_tokens=12)
    response = post(
        tiny_target,
        "/v1/responses",
        instructions=SYSTEM,
        input="Who goes there?",
        max_output_tokens=12,
    )
    text = chat["choices"][0]["message"]["content"]
    assert "".join(block["text"] for block in message["content"]) == text
    assert response["output"][0]["content"][0]["text"] == text
    num_prompt_tokens = chat["usage"]["prompt_tokens"]
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == num_prompt_tokens - 1
    assert usage["input_tokens"] == 1
    details = response["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == num_prompt_tokens - 1
    assert details["cache_write_tokens"] == 1


def test_what_goes_on_from_a_response_finds_all_of_it(tiny_target: Target) -> None:
    fields = {"max_output_tokens": 6, "ignore_eos": True, "temperature": 1}
    for seed in range(20):  # whose answer is text: half a character stands for no ids
        first = post(tiny_target, "/v1/responses", input="Tell me of the sea.", seed=seed, **fields)
        if "\ufffd" not in first["output"][0]["content"][0]["text"]:
            break
    served = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    for asked in ("And then?", "Or else?"):  # each branches off the first
        second = post(
            tiny_target, "/v1/responses", input=asked, previous_response_id=first["id"], **fields
        )
        assert second["history"] == "exact"
        # The last token of an answer is computed with what follows it.
        assert second["usage"]["input_tokens_details"]["cached_tokens"] >= served - 1


def test_a_worker_tells_what_has_left_its_cache(tiny_target: Target) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Of resets, and what is left behind by them."}],
        "max_tokens": 4,
        "explain_cache": True,
    }
    fields["messages"].append({"role": "user", "content": "What is there?"})
    first = post(tiny_target, "/v1/chat/completions", **fields)["cache_explanation"]
    assert first["reason"] in ("cold", "hit")  # some of it may be there of other tests
    assert (
        post(tiny_target, "/v1/chat/completions", **fields)["cache_explanation"]["reason"] == "hit"
    )
    tiny_target.http.post("/reset_prefix_cache", json={}).raise_for_status()
    told = post(tiny_target, "/v1/chat/completions", **fields)
    found = told["cache_explanation"]
    assert (found["reason"], found["matched_tokens"], found["first_divergent_token"]) == (
        "evicted",
        0,
        0,
    )
    assert (found["evicted"]["cause"], found["evicted"]["tier"]) == ("reset", "device")
    num_whole = (told["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert found["tokens_lost"] == num_whole
    listed = tiny_target.http.get("/v1/cache/explain", params={"limit": 1}).json()["data"][0]
    assert abs(listed["explanation"]["evicted"]["at"] - listed["started_at"]) < 60
    assert listed["timeline"]["prefill"] > 0
