"""What a gateway answers while it loads, is full, drains, or has several workers."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model_worker.protocol import ModelCard, TokenizerFile
from service.tokenizer import ModelTokenizer
from service.workers.fake import FakeWorker
from tests.gateway_kit import MODEL_NAME, make_card
from tests.http_kit import events_of, metric, repeat, serving

BODY = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 2}
LONG = {**BODY, "max_tokens": 2000, "stream": True}


def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_health_says_why_until_a_worker_is_ready() -> None:
    def loading(worker: FakeWorker) -> None:
        worker.set_loading("reading weights")

    with serving(prepare=loading, wait_ready=False) as served, served.client() as client:
        response = client.get("/health")
        assert response.status_code == 503
        assert "reading weights" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        assert client.get("/live").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.get("/dashboard/data").json()["ready"] is False
        for refused in (client.get("/v1/models"), client.post("/v1/completions", json=BODY)):
            assert refused.status_code == 503
            assert "reading weights" in refused.json()["error"]["message"]
        served.call(served.worker.set_ready)
        until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_tokenizer_that_does_not_load_is_the_reason() -> None:
    card = make_card()
    broken = TokenizerFile(name="tokenizer.json", content=b"{}", sha256="0" * 64)
    card = type(card)(**{**_fields(card), "tokenizer_files": (broken,)})
    with serving(card=card, wait_ready=False) as served, served.client() as client:
        until(lambda: "digest" in client.get("/health").json()["error"]["message"])


def test_an_unforeseen_failure_to_load_the_tokenizer_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_space(_: ModelCard) -> ModelTokenizer:
        raise OSError("no space left on /secret/folder")

    monkeypatch.setattr(ModelTokenizer, "from_card", no_space)
    with serving(wait_ready=False) as served, served.client() as client:
        until(lambda: "tokenizer fails (OSError)" in client.get("/health").text)
        assert "secret" not in client.get("/health").text


def _fields(card: Any) -> dict[str, Any]:
    return {name: getattr(card, name) for name in card.__struct_fields__}


def test_a_full_queue_is_429_and_empties_again() -> None:
    with (
        serving(repeat("x"), token_interval=0.02, max_num_seqs=1, max_queue=2) as served,
        served.client() as client,
        ThreadPoolExecutor(2) as threads,
    ):
        with client.stream("POST", "/v1/completions", json=LONG) as running:
            lines = running.iter_lines()  # kept: a dropped iterator closes the connection
            next(lines)
            waiting = [threads.submit(client.post, "/v1/completions", json=BODY) for _ in range(2)]
            until(lambda: served.gateway.gate.num_queued == 2)
            for stream in (False, True):
                refused = client.post("/v1/completions", json={**BODY, "stream": stream})
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [future.result().status_code for future in waiting] == [200, 200]
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert served.gateway.gate.num_queued == served.gateway.gate.num_in_flight == 0


def test_more_prompts_than_the_queue_holds() -> None:
    with serving(max_queue=2) as served, served.client() as client:
        response = client.post("/v1/completions", json={**BODY, "prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert served.gateway.gate.num_in_flight == 0


def test_a_full_worker_is_429() -> None:
    worker = FakeWorker(
        make_card(), repeat("x"), token_interval=0.02, max_num_seqs=1, max_num_waiting=0
    )
    with serving(workers=[worker]) as served, served.client() as client:
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"


def test_draining_lets_the_running_end_and_refuses_the_new() -> None:
    with serving(repeat("x"), token_interval=0.02) as served, served.client() as client:
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(
                client.post, "/v1/completions", json={**LONG, "max_tokens": 30}
            )
            until(lambda: served.worker.stats.num_running == 1)
            drained = asyncio.run_coroutine_threadsafe(served.gateway.drain(10.0), served.loop)
            until(lambda: served.gateway.gate.is_draining)
            refused = client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert client.get("/health").status_code == 503
            assert client.get("/live").status_code == 200
            events = events_of(running.result())
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert drained.result(10.0) is True


def test_draining_is_bounded() -> None:
    with (
        serving(repeat("x"), token_interval=0.02) as served,
        served.client() as client,
        client.stream("POST", "/v1/completions", json=LONG) as running,
    ):
        lines = running.iter_lines()  # kept: a dropped iterator closes the connection
        next(lines)
        drained = asyncio.run_coroutine_threadsafe(served.gateway.drain(0.05), served.loop)
        assert drained.result(5.0) is False


def two_workers() -> list[FakeWorker]:
    return [
        FakeWorker(make_card(), repeat("x"), token_interval=0.02, worker_id=f"w{index}")
        for index in range(2)
    ]


def test_requests_go_to_the_least_loaded_worker() -> None:
    with (
        serving(workers=two_workers()) as served,
        served.client() as client,
        client.stream("POST", "/v1/completions", json=LONG) as one,
        client.stream("POST", "/v1/completions", json=LONG) as two,
    ):
        lines = [one.iter_lines(), two.iter_lines()]  # kept: dropped ones close the connection
        assert all(next(each) for each in lines)
        assert [worker.stats.num_running for worker in served.workers] == [1, 1]


def test_counters_do_not_fall_when_a_worker_starts_again() -> None:
    with serving(repeat("x")) as served, served.client() as client:
        client.post("/v1/completions", json=BODY)
        assert metric(client, "worker_generated_tokens_total") == 2
        served.call(served.worker.set_lost)
        assert metric(client, "worker_generated_tokens_total") == 2
        served.call(served.worker.set_ready)
        assert metric(client, "worker_generated_tokens_total") == 2
        client.post("/v1/completions", json=BODY)
        assert metric(client, "worker_generated_tokens_total") == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hits_are_counted_once_per_request_whatever_the_waiting(path: str) -> None:
    with (
        serving(repeat("x"), token_interval=0.005, max_num_seqs=2) as served,
        served.client() as client,
        ThreadPoolExecutor(6) as threads,
    ):
        content = "Shelf holds jars of plum jam. " * 8
        body = (
            {**BODY, "prompt": content}
            if path == "/v1/completions"
            else {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]}
        )
        body["max_tokens"] = 10
        futures = [threads.submit(client.post, path, json=body) for _ in range(8)]
        usages = [future.result().json()["usage"] for future in futures]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert cached > 0
        assert metric(client, "prefix_cache_hits_total") == cached
        assert metric(client, "prefix_cache_queries_total") == sum(
            usage["prompt_tokens"] for usage in usages
        )
        shown = client.get("/dashboard/data").json()
        assert shown["hit_rate"]["hit"] == cached
        assert shown["windows"]["1m"]["hit_rate"] == shown["hit_rate"]
        assert shown["windows"]["1m"]["ttft_hit_s"]["count"] >= 1


def test_a_client_that_leaves_while_it_sends_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with serving() as served, served.client() as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
                "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            connection.sendall(head.encode())
        until(lambda: "the client left while it was sending" in caplog.text)
        assert "failed" not in caplog.text
