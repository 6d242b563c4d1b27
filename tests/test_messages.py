"""/v1/messages over real HTTP: the prompts that bodies come to, and Anthropic's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_worker.protocol import ErrorCode
from service.workers.fake import FakeWorker
from tests.gateway_kit import MODEL_NAME, make_card, make_tokenizer
from tests.http_kit import repeat, serving
from tests.message_kit import named_events
from tests.session_kit import Talk, talking, user
from tests.tenant_kit import two_tenants, write

SAME = {"model": MODEL_NAME, "max_tokens": 20}


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking() as started:
        yield started


def post(talk: Talk, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    return talk.client.post(path, json={**SAME, **fields})


def asked(talk: Talk, **fields: Any) -> str:
    """The text of the prompt that the fields come to."""
    response = post(talk, **fields)
    assert response.status_code == 200, response.text
    return talk.text_of(-1)


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    body = response.json()
    assert response.status_code == status, body
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


# ---------------------------------------------------------------- the prompt


def test_system_and_turns_are_those_of_a_chat(talk: Talk) -> None:
    written = asked(talk, system="Be brief.", messages=[user("Hi")])
    talk.chat([{"role": "system", "content": "Be brief."}, user("Hi")], session=None, max_tokens=20)
    assert written == talk.text_of(-1)
    assert written.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_blocks_are_joined_and_turns_of_one_role_are_one(talk: Talk) -> None:
    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    blocks = [
        {"role": "user", "content": [text("one"), text("two")]},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": [text("fo"), text("ur")]},
        {"role": "user", "content": "five"},
    ]
    plain = [
        {"role": "user", "content": "one\ntwo\nthree"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    assert asked(talk, system=[text("a"), text("b")], messages=blocks) == asked(
        talk, system="a\nb", messages=plain
    )


def test_tool_use_and_results_are_calls_and_tool_messages(talk: Talk) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it", "n": None}}
    written = asked(
        talk,
        messages=[
            user("Look."),
            {"role": "assistant", "content": [{"type": "text", "text": "I do."}, call]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "lost"}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    assert written.split("<|im_start|>")[1:] == [
        "user\nLook.<|im_end|>\n",
        'assistant\nI do.<tool_call>{"name": "look", "arguments": {"at": "it", "n": null}}'
        "</tool_call><|im_end|>\n",
        "tool\n[t1]seen<|im_end|>\n",
        "tool\n[t2]Error: lost<|im_end|>\n",
        "user\nAnd?<|im_end|>\n",
        "assistant\n",
    ]


def test_the_system_may_speak_among_the_others(talk: Talk) -> None:
    said = [user("Hi"), {"role": "system", "content": "Be kind."}, user("you")]
    assert "Hi<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n" in asked(talk, messages=said)


def test_an_answer_at_the_end_is_gone_on_with(talk: Talk) -> None:
    prefill = [user("Hi"), {"role": "assistant", "content": "Well,"}]
    assert asked(talk, messages=prefill).endswith("<|im_start|>assistant\nWell,")


def test_counted_tokens_are_those_of_the_message(talk: Talk) -> None:
    fields = {"system": "Be brief.", "messages": [user("Hi there, how are you?")]}
    counted = talk.client.post(
        "/v1/messages/count_tokens", json={"model": MODEL_NAME, **fields}
    ).json()
    post(talk, **fields)
    assert counted == {"input_tokens": len(talk.prompts[-1])}


# ---------------------------------------------------------------- the answer


def test_a_whole_message(talk: Talk) -> None:
    talk.answers = ["Hello you"]
    response = post(talk, messages=[user("greet me")])
    body = response.json()
    num_tokens = len(talk.prompts[-1])
    cached = body["usage"]["cache_read_input_tokens"]
    assert body == {
        "id": f"msg_{response.headers['request-id']}",
        "type": "message",
        "role": "assistant",
        "model": MODEL_NAME,
        "content": [{"type": "text", "text": "Hello you"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "cache_read_by_tier": {"device": cached, "host": 0, "disk": 0},
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 10,
            "service_tier": "standard",
        },
    }
    assert response.headers["x-headstart-cached-tokens"] == str(cached)


def test_the_reasons_to_stop(talk: Talk) -> None:
    talk.answers = ["one STOP two", "one two three"]
    body = post(talk, messages=[user("count")], stop_sequences=["END", "STOP"]).json()
    assert body["content"] == [{"type": "text", "text": "one "}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
    body = post(talk, messages=[user("count")], max_tokens=3).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["usage"]["output_tokens"] == 3


def test_the_end_of_the_context_is_its_own_reason() -> None:
    with serving(repeat("x")) as served, served.client() as client:
        body = {**SAME, "max_tokens": 100_000, "messages": [user("on and on")]}
        assert (
            client.post("/v1/messages", json=body).json()["stop_reason"]
            == "model_context_window_exceeded"
        )


def test_no_tokens_prewarm(talk: Talk) -> None:
    before = len(talk.requests)
    body = post(talk, messages=[user("warm this up")], max_tokens=0).json()
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
    assert body["usage"]["output_tokens"] == 0
    assert [item.sampling_params.max_tokens for item in talk.requests[before:]] == [0]
    again = post(talk, messages=[user("warm this up")]).json()
    assert again["usage"]["input_tokens"] == 1


def test_a_stream_says_what_the_whole_says(talk: Talk) -> None:
    talk.answers = ["Hi! é"] * 2
    fields = {"messages": [user("stream to me")], "stop_sequences": ["never"]}
    whole = post(talk, **fields).json()
    response = post(talk, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response)
    names = [name for name, _ in events]
    texts = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert names == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * len(texts),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(texts) == whole["content"][0]["text"] == "Hi! é"
    start = events[0][1]["message"]
    assert start["id"] == f"msg_{response.headers['request-id']}"
    assert (start["content"], start["stop_reason"]) == ([], None)
    num_tokens = len(talk.prompts[-1])
    assert start["usage"]["input_tokens"] == 1
    assert start["usage"]["cache_read_input_tokens"] == num_tokens - 1
    assert start["usage"]["output_tokens"] == 0
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {**start["usage"], "output_tokens": whole["usage"]["output_tokens"]}


def test_an_empty_answer_has_no_blocks(talk: Talk) -> None:
    talk.answers = ["", ""]
    assert post(talk, messages=[user("hush")]).json()["content"] == []
    names = [name for name, _ in named_events(post(talk, messages=[user("hush")], stream=True))]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_a_session_goes_on_exactly(talk: Talk) -> None:
    talk.answers = ["hello", "bye"]
    headers = {"X-Session-ID": "m"}
    body = {**SAME, "messages": [user("Hi")]}
    first = talk.client.post("/v1/messages", json=body, headers=headers)
    assert first.json()["history"] == first.headers["x-session-history"] == "exact"
    answered = {"role": "assistant", "content": first.json()["content"]}
    body = {**SAME, "messages": [user("Hi"), answered, user("More")], "stream": True}
    events = named_events(talk.client.post("/v1/messages", json=body, headers=headers))
    assert events[-2][1]["history"] == "exact"
    usage = events[0][1]["message"]["usage"]
    assert usage["cache_read_input_tokens"] == len(talk.prompts[-2]) + len("hello") + 1


# ---------------------------------------------------------------- breakpoints

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def usage_of(talk: Talk, **fields: Any) -> dict[str, Any]:
    response = post(talk, **fields)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in names) == len(talk.prompts[-1])
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    return usage


def tokens_of(text: str) -> int:
    return len(make_tokenizer().encode(text, add_special_tokens=False))


def test_what_a_breakpoint_covers_is_created_once(talk: Talk) -> None:
    system = [block("QQ these are very long rules for you", **MARK)]
    first = usage_of(talk, system=system, messages=[user("one")])
    covered = tokens_of("<s><|im_start|>system\nQQ these are very long rules for you")
    read = first["cache_read_input_tokens"]
    assert first["cache_creation_input_tokens"] == covered - read > 5
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] == covered - read
    assert talk.requests[-1].retention_s == 300
    second = usage_of(talk, system=system, messages=[user("two")])
    assert second["cache_creation_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= covered


def test_breakpoints_of_both_times(talk: Talk) -> None:
    usage = usage_of(
        talk,
        system=[block("ZZ some rules that live long", **HOUR)],
        messages=[
            {"role": "user", "content": [block("and some words", **MARK), block("and the rest")]}
        ],
    )
    head = "<s><|im_start|>system\nZZ some rules that live long"
    between = "<|im_end|>\n<|im_start|>user\nand some words"
    created = usage["cache_creation"]
    read = usage["cache_read_input_tokens"]
    assert created["ephemeral_1h_input_tokens"] == tokens_of(head) - read
    assert created["ephemeral_5m_input_tokens"] == tokens_of(between)
    assert usage["input_tokens"] == tokens_of("\nand the rest<|im_end|>\n<|im_start|>assistant\n")
    assert talk.requests[-1].retention_s == 3600


def test_a_breakpoint_at_the_end_of_it_all(talk: Talk) -> None:
    usage = usage_of(talk, messages=[user("VV words at the end")], **MARK)
    assert usage["input_tokens"] == tokens_of("<|im_end|>\n<|im_start|>assistant\n")
    assert usage["cache_creation_input_tokens"] > 0
    assert usage_of(talk, messages=[user("VV words at the end")], **MARK)["input_tokens"] == 1


def test_breakpoints_after_calls_and_results(talk: Talk) -> None:
    call = {"type": "tool_use", "id": "t9", "name": "look", "input": {"at": "XX"}, **MARK}
    usage = usage_of(
        talk, messages=[user("YY"), {"role": "assistant", "content": [call]}, user("tail")]
    )
    tail = "<|im_end|>\n<|im_start|>user\ntail<|im_end|>\n<|im_start|>assistant\n"
    assert tokens_of(tail) <= usage["input_tokens"] <= tokens_of(tail) + len('"}}</tool_call>') + 2


def test_a_longer_retention_stays(talk: Talk) -> None:
    post(talk, messages=[user("keep")], retention=7200, **HOUR)
    assert talk.requests[-1].retention_s == 7200


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": "Hi"}, "messages: "),
        ({"max_tokens": None}, "max_tokens: required"),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' are not"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' are not"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking' is not supported"),
        ({"mcp_servers": [{}]}, "'mcp_servers' is not supported"),
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: at most 16"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"system": [block("x", cache_control={"type": "ephemeral", "ttl": "2h"})]}, "ttl: "),
        ({"system": [block("x", **MARK)] * 5}, "cache_control: at most 4"),
        ({"system": [block("x", **MARK)] * 4, **MARK}, "at most 4 blocks can have it, found 5"),
        ({"system": [block("x", **MARK), block("y", **HOUR)]}, "1h must not come after"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t",
             "name": "n", "input": {}}]}]},
            "messages[0].content[0]: a message of the user has no tool_use",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(talk: Talk, fields: dict[str, Any], words: str) -> None:
    message = error_of(post(talk, **{"messages": [user("Hi")], **fields}), 400,
                       "invalid_request_error")  # fmt: skip
    assert words in message


def test_a_refusal_of_the_template_names_the_block_that_was_sent() -> None:
    def answer(template: str) -> str:
        with talking(card=make_card(chat_template=template)) as other:
            messages = [
                user("Hi"),
                {"role": "user", "content": "you"},
                {"role": "assistant", "content": "Yes?"},
                user("Go"),
            ]
            return error_of(post(other, messages=messages), 400, "invalid_request_error")

    loses = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    assert answer(loses).startswith("messages[2]: the model's chat template leaves this out")


def test_errors_before_the_routes_are_anthropics(talk: Talk) -> None:
    client = talk.client
    wrong_type = client.post("/v1/messages", content=b"x", headers={"Content-Type": "text/plain"})
    error_of(wrong_type, 415, "invalid_request_error")
    error_of(client.get("/v1/messages/batches"), 404, "not_found_error")
    error_of(client.get("/v1/messages"), 405, "invalid_request_error")
    error_of(post(talk, messages=[user("x")], model="other"), 404, "not_found_error")
    assert "error" in client.get("/v1/other").json()
    assert "type" not in client.get("/v1/other").json()
    too_long = post(talk, messages=[user("word " * 3000)])
    assert error_of(too_long, 400, "invalid_request_error").startswith("prompt is too long: ")


def test_keys_and_sizes() -> None:
    with serving(repeat("x"), api_keys=("secret",), max_body_size=2000) as served:
        with served.client() as client:
            body = {**SAME, "messages": [user("Hi")]}
            error_of(client.post("/v1/messages", json=body), 401, "authentication_error")
        with served.client(headers={"X-Api-Key": "secret"}) as client:
            assert client.post("/v1/messages", json=body).status_code == 200
            large = {**SAME, "messages": [user("x" * 3000)]}
            error_of(client.post("/v1/messages", json=large), 413, "request_too_large")


def test_a_full_server_is_overloaded() -> None:
    full = FakeWorker(make_card(), repeat("x"), max_num_waiting=0)
    with serving(workers=[full]) as served, served.client() as client:
        for stream in (False, True):
            body = {**SAME, "messages": [user("Hi")], "stream": stream}
            refused = client.post("/v1/messages", json=body)
            error_of(refused, 529, "overloaded_error")
            assert refused.headers["retry-after"] == "1"
        assert client.post("/v1/chat/completions", json=body).status_code == 429


def test_a_tenants_limits_and_caps(tmp_path: Path) -> None:
    limits = """
[tenants.acme.limits]
requests_per_minute = 2
[tenants.acme.caps]
max_retention = 600
"""
    tenants = write(tmp_path, two_tenants(limits))
    talk = Talk()
    key = {"X-Api-Key": "hs-acme"}
    with (
        serving(talk.script, tenant_file=tenants) as served,
        served.client(headers=key) as client,
    ):
        body = {**SAME, "messages": [user("Hi")]}
        assert client.post("/v1/messages", json={**body, **HOUR}).status_code == 200
        assert talk.requests[-1].retention_s == 600  # as much of the hour as it may have
        asked = client.post("/v1/messages", json={**body, "retention": 601})
        assert "retention: at most 600" in error_of(asked, 400, "invalid_request_error")
        limited = client.post("/v1/messages", json=body)
        error_of(limited, 429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) > 0


def test_a_failure_within_a_stream_is_an_error_event() -> None:
    def fail(worker: FakeWorker) -> None:
        (request_id,) = worker._running
        worker.fail_request(request_id, ErrorCode.INTERNAL, "it broke")

    with serving(repeat("x"), token_interval=0.02) as served, served.client() as client:
        body = {**SAME, "messages": [user("Hi")], "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/messages", json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if "content_block_delta" in line)
            served.call(fail, served.worker)
            rest = "\n".join(lines)
        assert "event: error\n" in rest
        assert '{"type":"error","error":{"type":"api_error"' in rest
        assert response.headers["request-id"] in rest
        assert "message_stop" not in rest


def test_models_in_anthropics_form(talk: Talk) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = talk.client.get("/v1/models", headers=headers).json()
    (info,) = page["data"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (MODEL_NAME, MODEL_NAME, False)
    assert (info["type"], info["id"]) == ("model", MODEL_NAME)
    assert info["created_at"].endswith("Z")
    assert talk.client.get(f"/v1/models/{MODEL_NAME}", headers=headers).json() == info
    error_of(talk.client.get("/v1/models/other", headers=headers), 404, "not_found_error")
    assert talk.client.get("/v1/models").json()["object"] == "list"
