"""Streams over real HTTP: whole characters, keep-alive, failures half way, clients that leave."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from model_worker.protocol import AddRequest, ErrorCode
from service.workers.fake import FakeWorker
from tests.gateway_kit import MODEL_NAME, byte_ids_of, make_card
from tests.http_kit import Served, events_of, metric, repeat, say, serving

TEXT = "naïve 猫 🦊👩‍🚀 끝"
TURN_END = 3


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Say it."}], **fields}


def until(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_idle(served: Served) -> bool:
    gate, stats = served.gateway.gate, served.worker.stats
    return (
        not (gate.num_in_flight or gate.num_queued or stats.num_running or stats.num_waiting)
        and not stats.num_locked_blocks
    )


def test_split_characters_at_every_length() -> None:
    """Joined deltas are the plain text; U+FFFD only where the answer ends inside a character."""
    with serving(say(TEXT)) as served, served.client() as client:
        for max_tokens in range(1, 21):
            plain = client.post("/v1/chat/completions", json=body_of(max_tokens=max_tokens)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            response = client.post(
                "/v1/chat/completions", json=body_of(max_tokens=max_tokens, **options)
            )
            for line in response.content.split(b"\n"):
                line.decode("utf-8", "strict")
            *chunks, usage = events_of(response)[:-1]
            pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
            text = plain["choices"][0]["message"]["content"]
            assert "".join(pieces) == text
            assert text == TEXT.encode()[:max_tokens].decode("utf-8", "replace")
            assert usage["usage"]["completion_tokens"] == max_tokens
            assert usage["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
            assert "\ufffd" not in "".join(pieces[:-2])


def test_the_end_of_sequence_token_is_counted_and_gives_no_text() -> None:
    script = [*byte_ids_of("done"), TURN_END]
    with serving(lambda request: script) as served, served.client() as client:
        answer = client.post("/v1/chat/completions", json=body_of()).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "done"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", TURN_END)
        assert answer["usage"]["completion_tokens"] == 5
        stop_token_ids = byte_ids_of("n")
        answer = client.post(
            "/v1/chat/completions", json=body_of(stop_token_ids=stop_token_ids)
        ).json()
        assert answer["choices"][0]["message"]["content"] == "do"
        assert answer["choices"][0]["stop_reason"] == stop_token_ids[0]


def test_usage_counts_through_the_token_that_completes_the_stop_string() -> None:
    with serving(repeat("one two three ")) as served, served.client() as client:
        answer = client.post("/v1/chat/completions", json=body_of(stop="two")).json()
        assert answer["choices"][0]["message"]["content"] == "one "
        assert answer["usage"]["completion_tokens"] == len("one two")
        until(lambda: is_idle(served))


def test_an_answer_without_any_text() -> None:
    with serving(lambda request: [TURN_END]) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of(stream=True))
        chunks = events_of(response)[:-1]
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {},
        ]
        assert metric(client, "time_to_first_token_seconds_count") == 1


def test_comments_keep_a_waiting_stream_alive() -> None:
    with (
        serving(repeat("x"), token_interval=0.5, keepalive=0.1) as served,
        served.client() as client,
    ):
        response = client.post("/v1/chat/completions", json=body_of(stream=True, max_tokens=1))
        before_text = response.text.partition("data: ")[0]
        assert before_text.count(": keepalive\n\n") >= 2
        assert events_of(response)[-1] == "[DONE]"


def test_the_official_client_ignores_comments() -> None:
    with serving(say("hello"), token_interval=0.15, keepalive=0.05) as served:
        client = openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0)
        with client:
            stream = client.chat.completions.create(**body_of(stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "hello"


def failing_after(num_tokens: int) -> Any:
    def script(request: AddRequest) -> Any:
        yield from byte_ids_of("x" * num_tokens)
        raise RuntimeError("secret prompt text")

    return script


def test_a_failure_after_the_headers_is_an_event_and_the_stream_ends() -> None:
    with serving(failing_after(3)) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of(stream=True))
        assert response.status_code == 200
        *chunks, error, done = events_of(response)
        assert done == "[DONE]"
        assert error["error"]["type"] == "internal_error"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert is_idle(served)
        assert metric(client, "requests_total", outcome="error") == 1


def test_a_failure_of_the_engine_is_500_with_a_body() -> None:
    with serving(failing_after(3)) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of())
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_worker_refuses_at_once_has_its_own_status(stream: bool) -> None:
    class Refusing(FakeWorker):
        def submit(self, request: AddRequest) -> Any:
            found = super().submit(request)
            self.fail_request(request.request_id, ErrorCode.NEVER_FITS, "larger than the pool")
            return found

    worker = Refusing(make_card(), repeat("x"))
    with serving(workers=[worker]) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of(stream=stream))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "never_fits"


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_worker_ends_its_requests_with_a_typed_error(stream: bool) -> None:
    with serving(repeat("x"), token_interval=0.02) as served, served.client() as client:
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(
                client.post, "/v1/chat/completions", json=body_of(stream=stream)
            )
            until(lambda: served.worker.stats.generated_tokens_total > 3)
            served.call(served.worker.set_lost, "gone")
            response = future.result()
        if stream:
            error, done = events_of(response)[-2:]
            assert done == "[DONE]"
        else:
            assert response.status_code == 503
            error = response.json()
        assert error["error"]["code"] == "worker_lost"
        assert is_idle(served)
        assert client.get("/health").status_code == 503
        served.call(served.worker.set_ready)
        assert client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json=body_of(max_tokens=1)).is_success


def leave_after(client: httpx.Client, num_chunks: int) -> None:
    with client.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as response:
        lines = response.iter_lines()
        for _ in range(num_chunks):
            next(lines)


def test_two_hundred_clients_that_leave_mid_stream() -> None:
    with serving(repeat("saga "), token_interval=0.005) as served, served.client() as client:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: leave_after(client, 5), range(200)))
        until(lambda: is_idle(served), 2.0)
        total = served.worker.stats.generated_tokens_total
        time.sleep(0.1)
        assert served.worker.stats.generated_tokens_total == total
        assert metric(client, "requests_total", outcome="abort") == 200
        assert client.post("/v1/chat/completions", json=body_of(max_tokens=1)).is_success


def test_leaving_aborts_within_a_step() -> None:
    with serving(repeat("saga "), token_interval=0.1) as served, served.client() as client:
        leave_after(client, 3)
        total = served.worker.stats.generated_tokens_total
        until(lambda: is_idle(served), 0.3)
        assert served.worker.stats.generated_tokens_total <= total + 2


def test_clients_that_give_up_on_a_plain_answer() -> None:
    with serving(repeat("saga "), token_interval=0.01) as served, served.client() as client:
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body_of(), timeout=0.1)
        until(lambda: is_idle(served), 2.0)
        assert metric(client, "requests_total", outcome="abort") == 5


def test_leaving_while_queued_in_the_worker() -> None:
    with (
        serving(repeat("x"), token_interval=0.02, max_num_seqs=1) as served,
        served.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as first,
    ):
        lines = first.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body_of(stream=True), timeout=0.1)
        until(lambda: served.worker.stats.num_waiting == 0)
        assert served.worker.stats.num_running == 1


def test_several_prompts_end_together_when_the_client_leaves() -> None:
    with serving(repeat("x"), token_interval=0.01) as served, served.client() as client:
        body = {"model": MODEL_NAME, "prompt": ["a", "b", "c"], "max_tokens": 2000}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.1)
        until(lambda: is_idle(served), 2.0)


def test_a_body_cut_off_half_way_leaves_no_trace() -> None:
    with serving() as served, served.client() as client:
        host, port = served.base_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            connection.sendall(head.encode())
        assert client.get("/health").status_code == 200
        assert is_idle(served)


def test_events_are_json_on_one_line() -> None:
    with serving(say("a\nb\r\nc\u2028d")) as served, served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of(stream=True))
        for block in response.content.split(b"\n\n")[:-1]:
            assert block.startswith(b"data: ")
            assert b"\n" not in block
            if block != b"data: [DONE]":
                json.loads(block.removeprefix(b"data: "))
