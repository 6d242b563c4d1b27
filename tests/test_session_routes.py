"""Sessions over HTTP: what a request of one is answered, and what the worker is sent for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model_worker.protocol import AddRequest, PrefixAction, PrefixReply
from service.workers.fake import FakeWorker
from tests.gateway_kit import BLOCK_SIZE, MODEL_NAME, byte_ids_of, make_card, make_tokenizer
from tests.http_kit import events_of, metric
from tests.session_kit import TURN_END, assistant, ids_in, talking, user, wait_for

KEYS = {"api_keys": ("alice", "bob"), "admin_keys": ("root",)}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_is_sent_with_the_very_ids_that_were_generated(stream: bool) -> None:
    with talking("hello world") as talk:
        first = talk.chat([user("Hi")], stream=stream)
        second = talk.chat([user("Hi"), assistant("hello world"), user("More")])
        assert first.headers["X-Session-History"] == "exact"
        assert second.headers["X-Session-History"] == second.json()["history"] == "exact"
        begun = [*talk.prompts[0], *byte_ids_of("hello world"), TURN_END]
        assert talk.prompts[1][: len(begun)] == begun
        assert talk.text_of(1).endswith("<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")
        # What the fake worker remembers of prompt and answer is all found again.
        usage = second.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(begun)


def test_without_a_session_the_ids_are_the_canonical_ones() -> None:
    with talking("hello world") as talk:
        messages = [user("Hi"), assistant("hello world"), user("More")]
        talk.chat([user("Hi")])
        response = talk.chat(messages, session=None)
        assert "X-Session-History" not in response.headers
        assert "history" not in response.json()
        text = talk.text_of(1)
        canonical = make_tokenizer().encode(text, add_special_tokens=False).tolist()
        assert talk.prompts[1] == canonical
        assert byte_ids_of("hello world") != canonical


def test_a_stream_says_its_history_in_the_chunks_that_end_it() -> None:
    with talking() as talk:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, ending, usage, done = events_of(talk.chat([user("Hi")], **options))
        assert done == "[DONE]"
        assert (ending["history"], usage["history"]) == ("exact", "exact")
        assert all("history" not in piece for piece in pieces)


def test_an_edit_branches_and_is_encoded_anew() -> None:
    with talking("hello", "hello") as talk:
        talk.chat([user("Hi")])
        edited = talk.chat([user("Hi"), assistant("hello!"), user("More")])
        assert edited.json()["history"] == "retokenized"
        text = talk.text_of(1)
        assert talk.prompts[1] == make_tokenizer().encode(text, add_special_tokens=False).tolist()
        again = talk.chat([user("Hi"), assistant("hello!"), user("More"), assistant("hello")])
        assert again.json()["history"] == "exact"


def test_the_body_field_is_the_same_as_the_header() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")], session=None, session_id="s")
        turn = talk.chat([user("Hi"), assistant("hello"), user("x")], session_id="s")
        assert turn.json()["history"] == "exact"
        assert len(talk.client.get("/v1/sessions").json()["data"]) == 1


@pytest.mark.parametrize("name", ["", "é", "a b", "x" * 129, "-x", "a/b", "a\nb"])
def test_ids_that_are_none_are_refused(name: str) -> None:
    with talking() as talk:
        refused = talk.chat([user("Hi")], session=None, session_id=name)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "session_id"
        assert "1 to 128" in error["message"]
        if name.isascii() and "\n" not in name:
            assert talk.chat([user("Hi")], session=name).status_code == 400


def test_half_a_surrogate_pair_in_an_id_is_refused() -> None:
    with talking() as talk:
        raw = b'{"model":"tiny","messages":[],"session_id":"\\ud83d"}'
        headers = {"Content-Type": "application/json"}
        for path in ("/v1/chat/completions", "/v1/sessions"):
            response = talk.client.post(path, content=raw, headers=headers)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "session_id"


def test_two_different_ids_are_refused_and_both_named() -> None:
    with talking() as talk:
        refused = talk.chat([user("Hi")], session="one", session_id="two")
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "'one'" in message
        assert "'two'" in message
        assert talk.chat([user("Hi")], session="one", session_id="one").is_success


def test_a_session_takes_one_prompt_at_a_time() -> None:
    with talking() as talk:
        body = {"model": MODEL_NAME, "prompt": ["a", "b"], "session_id": "s"}
        refused = talk.client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")


def test_prompt_cache_key_names_no_session() -> None:
    with talking() as talk:
        assert talk.chat([user("Hi")], session=None, prompt_cache_key="k").is_success
        assert talk.client.get("/v1/sessions").json()["data"] == []


def test_completions_keep_their_ids_too() -> None:
    with talking("hello", "x") as talk:
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        body = {"model": MODEL_NAME, "prompt": text, "session_id": "s", "max_tokens": 50}
        assert talk.client.post("/v1/completions", json=body).json()["history"] == "exact"
        body["prompt"] = text + "hello<|im_end|>\nMore"
        assert talk.client.post("/v1/completions", json=body).json()["history"] == "exact"
        begun = [*talk.prompts[0], *byte_ids_of("hello"), TURN_END]
        assert talk.prompts[1][: len(begun)] == begun
        assert talk.prompts[0][0] == 0  # the first token that the tokenizer adds


def test_sessions_of_other_keys_are_not_there() -> None:
    with talking("hello", **KEYS) as talk:
        talk.chat([user("Hi")], headers=bearer("alice"))
        theirs = talk.chat([user("Hi"), assistant("hello"), user("x")], headers=bearer("bob"))
        assert theirs.json()["history"] == "exact"  # a session of bob's own begins
        canonical = make_tokenizer().encode(talk.text_of(1), add_special_tokens=False)
        assert talk.prompts[1] == canonical.tolist()
        for key in ("bob", "root"):
            headers = bearer(key)
            assert talk.client.get("/v1/sessions/only", headers=headers).status_code == 404
        talk.client.delete("/v1/sessions/s", headers=bearer("bob"))
        assert talk.client.get("/v1/sessions/s", headers=bearer("bob")).status_code == 404
        assert talk.client.get("/v1/sessions/s", headers=bearer("alice")).is_success
        assert talk.client.get("/v1/sessions").status_code == 401


def test_priority_and_retention_come_from_the_request_or_the_session() -> None:
    with talking() as talk:
        body = {"session_id": "s", "priority": 3, "retention": 90, "cache_salt": "salt"}
        assert talk.client.post("/v1/sessions", json=body).status_code == 201
        talk.chat([user("Hi")])
        talk.chat([user("Hi")], priority=-2, retention=1.5, cache_salt="other")
        talk.chat([user("Hi")], session=None, priority=10)
        sent = [(r.priority, r.retention_s, r.cache_salt) for r in talk.requests]
        assert sent == [(3, 90.0, "salt"), (-2, 1.5, "other"), (10, 0.0, "")]
        assert talk.chat([user("Hi")], priority=11).status_code == 400
        assert talk.chat([user("Hi")], retention=-1).status_code == 400


def test_another_salt_leaves_nothing_behind_under_the_old_one() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")], cache_salt="old")
        served = [*talk.prompts[0], *byte_ids_of("hello"), TURN_END]
        talk.chat([user("Hi")], cache_salt="new")
        wait_for(lambda: talk.commands(PrefixAction.DROP))
        (drop,) = talk.commands(PrefixAction.DROP)
        assert (ids_in(drop.prompt_token_ids), drop.cache_salt) == (served, "old")


def test_the_stored_prefix_is_called_back_before_the_request() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")])
        assert talk.commands(PrefixAction.PREFETCH) == []
        served = [*talk.prompts[0], *byte_ids_of("hello"), TURN_END]
        talk.chat([user("Hi"), assistant("hello"), user("More")])
        (prefetch,) = talk.commands(PrefixAction.PREFETCH)
        assert ids_in(prefetch.prompt_token_ids) == served


def test_a_client_that_leaves_is_remembered_as_far_as_it_got() -> None:
    def script(request: AddRequest) -> Iterator[int]:
        return itertools.cycle(byte_ids_of("hello "))

    with talking(script=script, token_interval=0.005) as talk:
        body = {"model": MODEL_NAME, "messages": [user("Hi")], "stream": True, "session_id": "s"}
        with talk.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(8):
                next(lines)
        wait_for(lambda: talk.served.worker.num_requests == 0)
        wait_for(lambda: talk.client.get("/v1/sessions/s").is_success)
        assert talk.client.get("/v1/sessions/s").json()["num_tokens"] > 20


def test_what_a_stop_string_cut_is_still_known_to_be_deleted() -> None:
    with talking("hello STOP and so on", "fine") as talk:
        cut = talk.chat([user("Hi")], stop="STOP").json()
        assert cut["choices"][0]["message"]["content"] == "hello "
        sessions = talk.served.gateway.sessions
        wait_for(lambda: not sessions._turns)
        turn = talk.chat([user("Hi"), assistant("hello "), user("x")])
        assert turn.json()["history"] == "retokenized"
        talk.client.delete("/v1/sessions/s")
        wait_for(lambda: len(talk.commands(PrefixAction.DROP)) == 2)
        dropped = [ids_in(item.prompt_token_ids) for item in talk.commands(PrefixAction.DROP)]
        known = [*talk.prompts[0], *byte_ids_of("hello STOP")]
        assert dropped[1][: len(known)] == known


def test_two_requests_of_one_session_at_once_are_both_answered() -> None:
    with talking("hello", "one", "two", token_interval=0.01) as talk:
        talk.chat([user("Hi")])
        told = [user("Hi"), assistant("hello")]
        with ThreadPoolExecutor(2) as pool:
            turns = list(pool.map(lambda text: talk.chat([*told, user(text)]), ("a", "b")))
        assert [turn.status_code for turn in turns] == [200, 200]
        assert [turn.json()["history"] for turn in turns] == ["exact", "exact"]
        assert metric(talk.client, "session_conflicts_total") == 1


def test_a_session_goes_back_to_its_worker() -> None:
    workers = [FakeWorker(make_card(), lambda request: byte_ids_of("x"), worker_id=name)
               for name in ("a", "b")]  # fmt: skip
    with talking(workers=workers) as talk:
        for number in range(8):
            for _ in range(3):
                talk.chat([user(f"Hi {number}")], session=f"s{number}")
        steps = [worker.stats.generated_tokens_total for worker in workers]
        assert sum(steps) == 24
        assert all(count % 3 == 0 and count for count in steps)


# ---------------------------------------------------------------- the life of sessions


def test_a_session_is_created_shown_and_listed() -> None:
    with talking("hello") as talk:
        created = talk.client.post("/v1/sessions", json={"session_id": "s", "ttl": 100})
        shown = created.json()
        assert created.status_code == 201
        assert shown["expires_at"] == pytest.approx(shown["created_at"] + 100, abs=0.01)
        assert (shown["id"], shown["num_tokens"], shown["hit_rate"]) == ("s", 0, None)
        assert shown["splicing"] == "on"
        again = talk.client.post("/v1/sessions", json={"session_id": "s"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")

        reply = PrefixReply(call_id="", num_device_tokens=17, num_host_tokens=16)
        talk.served.call(setattr, talk.served.worker, "prefix_reply", reply)
        talk.chat([user("Hi")])
        talk.chat([user("Hi")])
        usages = [len(ids) for ids in talk.prompts]
        shown = talk.client.get("/v1/sessions/s").json()
        assert shown["num_tokens"] == len(talk.prompts[0]) + len("fine") + 1
        assert shown["blocks"] == {"device": 2, "host": 1, "disk": 0}
        assert shown["hit_rate"] == pytest.approx((usages[1] - 1) / sum(usages))
        assert shown["expires_at"] == pytest.approx(shown["last_active_at"] + 100, abs=0.01)
        assert talk.client.get("/v1/sessions").json() == {
            "object": "list",
            "data": [shown],
            "next_cursor": None,
        }


def test_a_name_is_made_up_where_none_is_given() -> None:
    with talking() as talk:
        name = talk.client.post("/v1/sessions").json()["id"]
        assert talk.client.get(f"/v1/sessions/{name}").is_success
        assert talk.chat([user("Hi")], session=name).json()["history"] == "exact"


def test_the_list_comes_in_pages() -> None:
    with talking() as talk:
        names = {f"s{number}" for number in range(5)}
        for name in names:
            talk.client.post("/v1/sessions", json={"session_id": name})
        found, cursor = [], ""
        while True:
            page = talk.client.get("/v1/sessions", params={"limit": 2, "cursor": cursor}).json()
            found += [entry["id"] for entry in page["data"]]
            assert len(page["data"]) <= 2
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert sorted(found) == sorted(names)
        for limit in ("0", "101", "x", "²"):
            refused = talk.client.get("/v1/sessions", params={"limit": limit})
            assert refused.json()["error"]["param"] == "limit"


def test_a_fork_goes_on_from_there_and_so_does_the_first() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")])
        forked = talk.client.post("/v1/sessions/s/fork", json={"session_id": "f"})
        assert (forked.status_code, forked.json()["id"]) == (201, "f")
        begun = [*talk.prompts[0], *byte_ids_of("hello"), TURN_END]
        for name in ("f", "s"):
            turn = talk.chat([user("Hi"), assistant("hello"), user(name)], session=name)
            assert turn.json()["history"] == "exact"
            assert talk.prompts[-1][: len(begun)] == begun
        again = talk.client.post("/v1/sessions/s/fork", json={"session_id": "f"})
        assert again.status_code == 409
        assert talk.client.post("/v1/sessions/s/fork").status_code == 201  # a name is made up


def test_a_deleted_session_leaves_what_its_fork_goes_on_with() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")])
        talk.client.post("/v1/sessions/s/fork", json={"session_id": "f"})
        shared = len(talk.prompts[0]) + len("hello") + 1
        talk.chat([user("Hi"), assistant("hello"), user("More")])
        served = [*talk.prompts[1], *byte_ids_of("fine"), TURN_END]
        assert talk.client.delete("/v1/sessions/s").json()["deleted"] is True
        wait_for(lambda: talk.commands(PrefixAction.DROP))
        (drop,) = talk.commands(PrefixAction.DROP)
        assert ids_in(drop.prompt_token_ids) == served
        assert drop.keep_num_tokens == shared // BLOCK_SIZE * BLOCK_SIZE == 16


def test_a_deletion_is_asked_for_until_nothing_is_left() -> None:
    with talking("hello") as talk:
        held = PrefixReply(call_id="", num_blocks_left=2)
        talk.served.call(setattr, talk.served.worker, "prefix_reply", held)
        talk.chat([user("Hi")])
        served = [*talk.prompts[0], *byte_ids_of("hello"), TURN_END]
        talk.chat([user("Hi"), assistant("hullo"), user("x")])  # leaves the first answer behind
        branch = [*talk.prompts[1], *byte_ids_of("fine"), TURN_END]
        talk.client.delete("/v1/sessions/s")
        wait_for(lambda: len(talk.commands(PrefixAction.DROP)) >= 4)
        talk.served.call(setattr, talk.served.worker, "prefix_reply", PrefixReply(call_id=""))
        blocks = talk.served.gateway.sessions.blocks
        wait_for(lambda: blocks.num_waiting_drops == 0)
        asked = {tuple(ids_in(c.prompt_token_ids)) for c in talk.commands(PrefixAction.DROP)}
        assert asked == {tuple(branch), tuple(served)}


def test_unknown_and_deleted_sessions() -> None:
    with talking("hello") as talk:
        for method, path in (
            ("GET", "/v1/sessions/no"),
            ("DELETE", "/v1/sessions/no"),
            ("POST", "/v1/sessions/no/fork"),
            ("POST", "/v1/sessions/no/prewarm"),
        ):
            response = talk.client.request(method, path)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "session_not_found"
        talk.chat([user("Hi")])
        talk.client.delete("/v1/sessions/s")
        assert talk.client.get("/v1/sessions/s").status_code == 404
        turn = talk.chat([user("Hi"), assistant("hello"), user("x")])
        assert turn.json()["history"] == "exact"  # of a session that begins
        text = talk.text_of(1)
        assert talk.prompts[1] == make_tokenizer().encode(text, add_special_tokens=False).tolist()


def test_all_data_of_a_key_goes_at_once() -> None:
    with talking(**KEYS) as talk:
        for name in ("a", "b", "c"):
            talk.chat([user(name)], session=name, headers=bearer("alice"))
        talk.chat([user("Hi")], headers=bearer("bob"))
        gone = talk.client.delete("/v1/tenants/me/data", headers=bearer("alice")).json()
        assert gone == {"object": "tenant.data.deleted", "num_sessions": 3}
        wait_for(lambda: len(talk.commands(PrefixAction.DROP)) == 3)
        assert talk.client.get("/v1/sessions", headers=bearer("alice")).json()["data"] == []
        assert len(talk.client.get("/v1/sessions", headers=bearer("bob")).json()["data"]) == 1


# ---------------------------------------------------------------- prewarming and resetting


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_an_empty_answer(stream: bool) -> None:
    with talking() as talk:
        for path, fields in (
            ("/v1/chat/completions", {"messages": [user("Hi")]}),
            ("/v1/completions", {"prompt": "Hi"}),
        ):
            body = {"model": MODEL_NAME, "max_tokens": 0, "stream": stream, **fields}
            if stream:
                body["stream_options"] = {"include_usage": True}
            response = talk.client.post(path, json=body)
            if stream:
                *_, ending, last, _ = events_of(response)
                assert ending["choices"][0]["finish_reason"] == "length"
            else:
                last = response.json()
                (choice,) = last["choices"]
                assert choice["finish_reason"] == "length"
                assert choice.get("text", choice.get("message", {}).get("content")) == ""
            assert last["usage"]["completion_tokens"] == 0
            assert last["usage"]["prompt_tokens"] == len(talk.prompts[-1])


def test_prewarming_without_a_session() -> None:
    with talking() as talk:
        body = {"messages": [user("Hi")], "cache_salt": "s", "priority": 2, "retention": 5}
        warmed = talk.client.post("/v1/cache/prewarm", json=body).json()
        (request,) = talk.requests
        assert request.sampling_params.max_tokens == 0
        assert (request.cache_salt, request.priority, request.retention_s) == ("s", 2, 5.0)
        assert warmed["object"] == "cache.prewarm"
        assert warmed["usage"]["prompt_tokens"] == len(talk.prompts[0])
        turn = talk.chat([user("Hi")], session=None, cache_salt="s").json()
        cached = turn["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(talk.prompts[0]) - 1
        assert talk.client.post("/v1/cache/prewarm", json={"prompt": [5, 6, 7]}).is_success
        assert talk.prompts[-1] == [5, 6, 7]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [], "prompt": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False},
         "add_special_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "temperature": 0}, "temperature"),
        ({"prompt": "x", "model": "other"}, "model"),
    ],
)  # fmt: skip
def test_prewarm_bodies_that_are_refused(body: dict[str, Any], param: str) -> None:
    with talking() as talk:
        refused = talk.client.post("/v1/cache/prewarm", json=body)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == param


def test_sessions_are_prewarmed_at_their_creation_and_later() -> None:
    with talking("hello") as talk:
        body = {"session_id": "s", "messages": [user("Hi")], "cache_salt": "z"}
        created = talk.client.post("/v1/sessions", json=body)
        assert created.json()["num_tokens"] == len(talk.prompts[0])
        turn = talk.chat([user("Hi")])
        assert turn.json()["history"] == "exact"
        assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        later = [user("Hi"), assistant("hello"), user("More")]
        talk.answers.insert(0, "")
        warmed = talk.client.post("/v1/sessions/s/prewarm", json={"messages": later}).json()
        assert warmed["usage"]["completion_tokens"] == 0
        assert talk.chat(later).json()["history"] == "exact"
        assert talk.prompts[-1] == talk.prompts[-2]
        assert talk.client.post("/v1/sessions/s/prewarm").is_success
        last = talk.requests[-1]
        assert last.sampling_params.max_tokens == 0
        assert last.cache_salt == "z"
        assert ids_in(last.prompt_token_ids) == [*talk.prompts[-2], *byte_ids_of("fine"), TURN_END]
        assert {request.cache_salt for request in talk.requests} == {"z"}


def test_a_session_whose_prewarming_fails_is_not_created() -> None:
    with talking() as talk:
        body = {"session_id": "s", "messages": [{"role": "none"}]}
        assert talk.client.post("/v1/sessions", json=body).status_code == 400
        assert talk.client.get("/v1/sessions/s").status_code == 404
        talk.client.post("/v1/sessions", json={"session_id": "s"})
        empty = talk.client.post("/v1/sessions/s/prewarm")
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"ttl": 0}, "ttl"),
        ({"ttl": 2_592_001}, "ttl"),
        ({"priority": 11}, "priority"),
        ({"retention": -1}, "retention"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"session_id": "a b"}, "session_id"),
        ({"color": "red"}, "color"),
        ({"messages": "Hi"}, "messages"),
    ],
)
def test_session_bodies_that_are_refused(body: dict[str, Any], param: str) -> None:
    with talking() as talk:
        refused = talk.client.post("/v1/sessions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_reset_may_refuse_to_meet_running_requests() -> None:
    with talking(script=None, token_interval=0.01) as talk:
        path = "/reset_prefix_cache"
        assert talk.client.post(path, json={"running": "refuse"}).is_success
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 60, "stream": True}
        with talk.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = talk.client.post(path, params={"running": "refuse"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                409,
                "requests_running",
            )
            assert talk.client.post(path).is_success
            assert talk.client.post(path, json={"running": "drain"}).is_success
            assert talk.served.gateway.gate.num_in_flight == 0
        assert talk.client.post(path, json={"running": "often"}).status_code == 400


def test_a_reset_waits_no_longer_than_the_limit() -> None:
    with talking(script=None, token_interval=0.01, drain_timeout=0.05) as talk:
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2000, "stream": True}
        with talk.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # kept: to let go of it is to leave
            next(lines)
            late = talk.client.post("/reset_prefix_cache", json={"running": "drain"})
            assert late.status_code == 409


def test_metrics_count_turns() -> None:
    with talking("hello") as talk:
        talk.chat([user("Hi")])
        talk.chat([user("Hi"), assistant("hello"), user("x")])
        talk.chat([user("Ho")])
        assert metric(talk.client, "session_turns_total", history="exact") == 2
        assert metric(talk.client, "session_turns_total", history="retokenized") == 1
        assert metric(talk.client, "sessions") == 1
        assert metric(talk.client, "session_history_bytes") > 0
        assert "Hi" not in json.dumps(talk.client.get("/v1/sessions").json())
