"""/v1/responses over real HTTP: prompts, answers, and what is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from model_worker.protocol import ErrorCode, PrefixAction
from service.workers.fake import FakeWorker
from tests.gateway_kit import BLOCK_SIZE, MODEL_NAME, byte_ids_of
from tests.http_kit import repeat, serving
from tests.message_kit import named_events
from tests.session_kit import TURN_END, Talk, ids_in, talking, wait_for


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking() as started:
        yield started


def post(talk: Talk, given: Any, **fields: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "input": given, "max_output_tokens": 20, **fields}
    return talk.client.post("/v1/responses", json=body)


def respond(talk: Talk, given: Any, **fields: Any) -> dict[str, Any]:
    response = post(talk, given, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def asked(talk: Talk, given: Any, **fields: Any) -> str:
    """The text of the prompt that the input comes to."""
    respond(talk, given, **fields)
    return talk.text_of(-1)


def turns_of(text: str) -> list[str]:
    return [turn.removesuffix("<|im_end|>\n") for turn in text.split("<|im_start|>")[1:]]


def text_in(body: dict[str, Any]) -> str:
    (item,) = body["output"]
    text: str = item["content"][0]["text"]
    return text


# ---------------------------------------------------------------- the prompt


def test_a_text_and_instructions_are_a_chat(talk: Talk) -> None:
    written = asked(talk, "Hi", instructions="Be brief.")
    talk.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        session=None,
        max_tokens=20,
    )
    assert written == talk.text_of(-1)


def test_items_are_messages(talk: Talk) -> None:
    written = asked(
        talk,
        [
            {"role": "developer", "content": "Rules."},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": [],
                          "logprobs": None}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "wait", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "done"}]},
            {"role": "assistant", "content": "So be it."},
        ],
    )  # fmt: skip
    assert turns_of(written) == [
        "system\nRules.",
        "user\none\ntwo",
        'assistant\nI look.<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
        '<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
        "tool\n[c1]seen",
        "tool\n[c2]done",
        "assistant\nSo be it.",
        "assistant\n",
    ]


# ---------------------------------------------------------------- the answer


def test_a_whole_response(talk: Talk) -> None:
    talk.answers = ["Hello you"]
    response = post(talk, "greet me", metadata={"a": "b"}, temperature=0, store=False)
    body = response.json()
    name = response.headers["x-request-id"]
    num_tokens = len(talk.prompts[-1])
    cached = body["usage"]["input_tokens_details"]["cached_tokens"]
    assert body.pop("created_at") <= body.pop("completed_at")
    assert body == {
        "id": f"resp_{name}",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 20,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": MODEL_NAME,
        "output": [
            {
                "type": "message",
                "id": f"msg_{name}_0",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []}
                ],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": num_tokens,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": num_tokens - cached,
                "cached_tokens_by_tier": {"device": cached, "host": 0, "disk": 0},
            },
            "output_tokens": 10,
            "total_tokens": num_tokens + 10,
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert response.headers["x-headstart-cached-tokens"] == str(cached)


def test_an_answer_that_is_cut_is_incomplete(talk: Talk) -> None:
    talk.answers = ["one two three"]
    body = respond(talk, "count", max_output_tokens=3)
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text_in(body) == "one"


def test_an_answer_that_says_nothing(talk: Talk) -> None:
    talk.answers = [""]
    assert text_in(respond(talk, "hush")) == ""
    warm = respond(talk, "hush", max_output_tokens=0)
    assert (warm["status"], warm["output"]) == ("incomplete", [])


def test_a_stream_builds_what_the_whole_says(talk: Talk) -> None:
    talk.answers = ["Hi é"] * 2
    whole = respond(talk, "stream to me", store=False)
    response = post(talk, "stream to me", store=False, stream=True)
    events = named_events(response)
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    created, done = events[0][1]["response"], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created["id"] == done["id"] == f"resp_{response.headers['x-request-id']}"
    assert "".join(deltas) == text_in(done) == text_in(whole) == "Hi é"
    assert events[-2][1]["item"] == done["output"][0]
    assert done["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert done["usage"]["input_tokens_details"]["cached_tokens"] == len(talk.prompts[-1]) - 1
    assert "[DONE]" not in response.text


# ---------------------------------------------------------------- what is stored


def test_a_response_goes_on_exactly(talk: Talk) -> None:
    talk.answers = ["hello", "bye"]
    first = respond(talk, "Hi", instructions="Rules.")
    assert first["store"] is True
    assert first["history"] == "exact"
    second = respond(
        talk, "More", instructions="Rules.", previous_response_id=first["id"], max_output_tokens=9
    )
    assert turns_of(talk.text_of(-1)) == [
        "system\nRules.",
        "user\nHi",
        "assistant\nhello",
        "user\nMore",
        "assistant\n",
    ]
    assert second["history"] == "exact"
    served = [*talk.prompts[-2], *byte_ids_of("hello"), TURN_END]  # byte by byte, as answered
    assert talk.prompts[-1][: len(served)] == served
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == len(talk.prompts[-2]) + len("hello") + 1
    assert second["previous_response_id"] == first["id"]


def test_instructions_are_not_taken_over(talk: Talk) -> None:
    first = respond(talk, "Hi", instructions="Old rules.")
    respond(talk, "More", instructions="New rules.", previous_response_id=first["id"])
    assert turns_of(talk.text_of(-1))[0] == "system\nNew rules."
    assert turns_of(talk.text_of(-1))[1] == "user\nHi"
    bare = asked(talk, "More", previous_response_id=first["id"])
    assert turns_of(bare)[0] == "user\nHi"


def test_two_answers_to_one_response_branch(talk: Talk) -> None:
    talk.answers = ["root", "left", "right", "leaf", "leaf"]
    root = respond(talk, "Go")
    left = respond(talk, "left?", previous_response_id=root["id"])
    right = respond(talk, "right?", previous_response_id=root["id"])
    assert left["history"] == right["history"] == "exact"
    for branch, said in ((left, "left"), (right, "right")):
        leaf = respond(talk, "on", previous_response_id=branch["id"])
        assert leaf["history"] == "exact"
        assert turns_of(talk.text_of(-1)) == [
            "user\nGo",
            "assistant\nroot",
            f"user\n{said}?",
            f"assistant\n{said}",
            "user\non",
            "assistant\n",
        ]


def test_a_stream_is_stored_as_well(talk: Talk) -> None:
    talk.answers = ["streamed", "on"]
    events = named_events(post(talk, "Hi", stream=True))
    done = events[-1][1]["response"]
    assert talk.client.get(f"/v1/responses/{done['id']}").json() == done
    assert respond(talk, "And?", previous_response_id=done["id"])["history"] == "exact"


def test_what_is_stored_can_be_read_listed_and_deleted(talk: Talk) -> None:
    talk.answers = ["one", "two"]
    first = respond(talk, "a")
    items = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"},
             {"role": "user", "content": [{"type": "input_text", "text": "d"}]}]  # fmt: skip
    second = respond(talk, items, previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}"
    assert talk.client.get(path).json() == second

    def listed(**query: Any) -> dict[str, Any]:
        body: dict[str, Any] = talk.client.get(f"{path}/input_items", params=query).json()
        return body

    page = listed()
    said = [(item["role"], item["content"][0]["type"], item["content"][0]["text"])
            for item in page["data"]]  # fmt: skip
    assert said == [
        ("user", "input_text", "d"),
        ("assistant", "output_text", "c"),
        ("user", "input_text", "b"),
    ]
    ids = [item["id"] for item in page["data"]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[2], False)
    assert [item["id"] for item in listed(order="asc")["data"]] == ids[::-1]
    part = listed(limit=1, after=ids[0])
    assert ([item["id"] for item in part["data"]], part["has_more"]) == ([ids[1]], True)
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "other"}):
        answer = talk.client.get(f"{path}/input_items", params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))

    assert talk.client.delete(path).json() == {
        "id": second["id"],
        "object": "response",
        "deleted": True,
    }
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        gone = talk.client.request(method, path + end, json={} if method == "POST" else None)
        assert gone.status_code == 404, (method, end)
    again = post(talk, "x", previous_response_id=second["id"])
    assert (again.status_code, again.json()["error"]["code"]) == (
        400,
        "previous_response_not_found",
    )
    assert respond(talk, "x", previous_response_id=first["id"])["history"] == "exact"


def test_a_deletion_drops_what_only_that_response_has(talk: Talk) -> None:
    first = respond(talk, "keep this")
    second = respond(talk, "and this goes", previous_response_id=first["id"])
    num_before = len(talk.commands(PrefixAction.DROP))
    talk.client.delete(f"/v1/responses/{second['id']}")
    wait_for(lambda: len(talk.commands(PrefixAction.DROP)) > num_before)
    drop = talk.commands(PrefixAction.DROP)[-1]
    assert ids_in(drop.prompt_token_ids)[: len(talk.prompts[-1])] == talk.prompts[-1]
    num_shared = len(talk.prompts[-2]) + len("fine") + 1
    assert drop.keep_num_tokens == num_shared // BLOCK_SIZE * BLOCK_SIZE > 0


def test_only_responses_in_the_background_could_be_cancelled(talk: Talk) -> None:
    body = respond(talk, "Hi")
    answer = talk.client.post(f"/v1/responses/{body['id']}/cancel", json={})
    assert answer.status_code == 400


def test_stored_responses_are_no_sessions_to_see(talk: Talk) -> None:
    respond(talk, "Hi")
    assert talk.client.get("/v1/sessions").json()["data"] == []


def test_nothing_is_kept_of_a_response_that_is_not_stored(talk: Talk) -> None:
    talk.answers = ["kept", "gone"]
    kept = respond(talk, "Hi")
    count = talk.served.call(lambda: len(talk.served.gateway.sessions._book))
    gone = respond(talk, "More", previous_response_id=kept["id"], store=False)
    assert (gone["store"], gone["history"]) == (False, "exact")
    assert talk.client.get(f"/v1/responses/{gone['id']}").status_code == 404
    alone = respond(talk, "Hi", store=False)
    assert "history" not in alone
    assert talk.served.call(lambda: len(talk.served.gateway.sessions._book)) == count


def test_responses_are_the_callers_own() -> None:
    with serving(repeat("x"), api_keys=("one", "two")) as served:
        with served.client(headers={"X-Api-Key": "one"}) as client:
            body = {"model": MODEL_NAME, "input": "Hi", "max_output_tokens": 3}
            mine = client.post("/v1/responses", json=body).json()["id"]
            assert client.get(f"/v1/responses/{mine}").status_code == 200
        with served.client(headers={"X-Api-Key": "two"}) as client:
            for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                assert client.request(method, f"/v1/responses/{mine}{end}").status_code == 404
            stolen = client.post("/v1/responses", json={**body, "previous_response_id": mine})
            assert stolen.status_code == 400
        with served.client(headers={"X-Api-Key": "one"}) as client:
            assert client.delete("/v1/tenants/me/data").json()["num_sessions"] == 1
            assert client.get(f"/v1/responses/{mine}").status_code == 404


def test_a_gateway_that_stores_nothing() -> None:
    with serving(repeat("x"), no_store=True) as served, served.client() as client:
        body = {"model": MODEL_NAME, "input": "Hi", "max_output_tokens": 3, "store": True}
        response = client.post("/v1/responses", json=body).json()
        assert response["store"] is False
        assert client.get(f"/v1/responses/{response['id']}").status_code == 404


# ---------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": "{"}]},
            "input[0]",
        ),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"session_id": "s"}, "session_id"),
        ({"tempratur": 1}, "tempratur"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_what_cannot_be_is_refused_by_name(talk: Talk, fields: dict[str, Any], param: str) -> None:
    response = post(talk, **{"given": "Hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


def test_what_is_too_long_is_the_input(talk: Talk) -> None:
    error = post(talk, "word " * 3000).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_a_session_cannot_be_named(talk: Talk) -> None:
    body = {"model": MODEL_NAME, "input": "Hi"}
    response = talk.client.post("/v1/responses", json=body, headers={"X-Session-ID": "s"})
    assert response.status_code == 400


def test_what_asks_for_nothing_is_taken(talk: Talk) -> None:
    respond(
        talk,
        "Hi",
        reasoning={"effort": None, "summary": None},
        background=False,
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        user="u",
        service_tier="auto",
        text={"format": None},
        tools=[],
    )


def test_a_failure_within_a_stream_ends_it() -> None:
    def fail(worker: FakeWorker) -> None:
        (request_id,) = worker._running
        worker.fail_request(request_id, ErrorCode.INTERNAL, "it broke")

    with serving(repeat("x"), token_interval=0.02) as served, served.client() as client:
        body = {"model": MODEL_NAME, "input": "Hi", "stream": True, "max_output_tokens": 900}
        with client.stream("POST", "/v1/responses", json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if "output_text.delta" in line)
            served.call(fail, served.worker)
            rest = "\n".join(lines)
        assert "event: error\n" in rest
        assert '"status":"failed"' in rest.split("event: response.failed\n")[1]
        name = f"resp_{response.headers['x-request-id']}"
        assert client.get(f"/v1/responses/{name}").status_code == 404
        time.sleep(0.2)  # what a session would keep of it would be there by now
        assert not served.call(lambda: len(served.gateway.sessions._book))


def test_a_store_that_does_not_answer(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache_store.metadata.base import MetadataError

    first = respond(talk, "Hi")

    async def away(*_: Any) -> None:
        raise MetadataError("away")

    store = talk.served.gateway.metadata
    monkeypatch.setattr(store, "put_session", away)
    body = respond(talk, "More", previous_response_id=first["id"])
    assert body["store"] is False
    monkeypatch.setattr(store, "get_session", away)
    assert post(talk, "More", previous_response_id=first["id"]).status_code == 503
    assert respond(talk, "More")["store"] is False


def test_logprobs_whole_and_streamed(talk: Talk) -> None:
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    talk.answers += ["Oslo", "Oslo"]
    part = respond(talk, "City?", **scored)["output"][0]["content"][0]
    assert b"".join(bytes(item["bytes"]) for item in part["logprobs"]) == b"Oslo"
    for item in part["logprobs"]:
        assert -9999.0 <= item["logprob"] <= 0
        assert len(item["top_logprobs"]) == 2
    events = named_events(post(talk, "City?", stream=True, **scored))
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    assert [item for data in deltas for item in data["logprobs"]] == part["logprobs"]
