"""What /metrics counts is what clients were told, and the log tells the same, to the token.

A real server whose pool is too small for what it is asked, with tenants: long answers that are
preempted, several choices and prompts, streams that are read to the end and streams that are left,
refusals of every sort, and at last the death of the worker in the midst of answers. The log is
JSON, and what was asked stands nowhere in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import models
from tests.server_kit import RealServer, Stream, real_server
from tests.session_kit import wait_for
from tests.tenant_kit import bearer, hash_of, two_tenants, write

ADMIN_KEY, KEYS = "hs-root", {"acme": "hs-acme", "globex": "hs-globex", "slow": "hs-slow"}
SLOW = f"""
[[tenants.slow.keys]]
sha256 = "{hash_of("hs-slow")}"

[tenants.slow.limits]
requests_per_minute = 1
"""
NEEDLE = "qzxvkjw"  # in all that is asked, and nowhere else
SOURCES = ("device", "host", "disk")


@dataclass
class Told:
    """What clients were told in answers and errors; the sums of it."""

    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # by what and tenant
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # by outcome and tenant
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)  # by type and code

    def usage(self, tenant: str, usage: dict[str, Any], *, is_whole: bool = True) -> None:
        """Of one that was left or lost (not ``is_whole``) the output goes on after it was told."""
        details = usage["prompt_tokens_details"]
        self.tokens["prompt", tenant] += usage["prompt_tokens"]
        self.tokens["cached", tenant] += details["cached_tokens"]
        if is_whole:
            self.tokens["output", tenant] += usage["completion_tokens"]
        by_source = details["cached_tokens_by_tier"]
        assert sum(by_source.values()) == details["cached_tokens"]
        for source in SOURCES:
            self.tokens[source, tenant] += by_source[source]

    def answer(self, tenant: str, body: dict[str, Any]) -> None:
        self.usage(tenant, body["usage"])
        for choice in body["choices"]:
            self.ended[choice["finish_reason"], tenant] += 1

    def refused(self, response: httpx.Response, status: int) -> None:
        assert response.status_code == status, response.text
        self.error(response.json()["error"])

    def error(self, error: dict[str, Any]) -> None:
        self.errors[error["type"], error["code"] or ""] += 1


@dataclass
class Load:
    """A server under mixed load, and what came of it. ``left`` are the ids of requests whose
    clients were not told the end."""

    server: RealServer
    told: Told = field(default_factory=Told)
    left: list[tuple[str, str, int]] = field(default_factory=list)  # id, tenant, tokens seen

    def post(self, tenant: str, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **fields}
        path = "chat/completions" if "messages" in fields else "completions"
        return httpx.post(
            f"{self.server.url}/v1/{path}",
            json=body,
            headers=bearer(KEYS.get(tenant, tenant)),
            timeout=120.0,
            verify=False,
        )

    def ask(self, tenant: str, **fields: Any) -> None:
        response = self.post(tenant, **fields)
        assert response.status_code == 200, response.text
        self.told.answer(tenant, response.json())

    def stream(self, tenant: str, **fields: Any) -> None:
        with self.open(tenant, **fields) as stream:
            *events, done = stream.events()
        assert done == "[DONE]"
        self.told.usage(tenant, events[-1]["usage"])
        for event in events:
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    self.told.ended[choice["finish_reason"], tenant] += 1

    def open(self, tenant: str, **fields: Any) -> Stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        headers = bearer(KEYS[tenant])
        return Stream(self.server.url, "tiny", headers, stream_options=options, **fields)

    def leave(self, tenant: str, num_events: int, **fields: Any) -> None:
        with self.open(tenant, **fields) as stream:
            self.note_left(tenant, stream, stream.events(num_events)[-1])
        self.told.ended["abort", tenant] += 1

    def note_left(self, tenant: str, stream: Stream, last: dict[str, Any]) -> None:
        self.told.usage(tenant, last["usage"], is_whole=False)
        request_id = stream.response.headers["x-request-id"]
        self.left.append((request_id, tenant, last["usage"]["completion_tokens"]))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.server.stderr.splitlines()]

    def lines_of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("request_id") == request_id]

    def counted(self) -> Counter[tuple[str, tuple[tuple[str, str], ...]]]:
        """All of /metrics by name and labels."""
        url = f"{self.server.url}/metrics"
        text = httpx.get(url, headers=bearer(ADMIN_KEY), timeout=30.0, verify=False).text
        return Counter(
            {
                (sample.name.removeprefix("headstart_"), tuple(sorted(sample.labels.items()))):
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )  # fmt: skip


def prompt_of(seed: int, num_words: int) -> str:
    source = random.Random(seed)
    words = ("the", "river", "runs", "by", "a", "town", "of", "old", "stone", "and", "wood")
    return f"{seed}. {NEEDLE} " + " ".join(source.choices(words, k=num_words))


def work(load: Load) -> None:
    """The load but for the worker's death."""
    shared = prompt_of(0, 150)
    load.ask("acme", prompt=shared, max_tokens=1)
    chat = [{"role": "user", "content": shared}]
    pair = [prompt_of(10, 40), prompt_of(11, 40)]
    asked = [{"prompt": prompt_of(number, 90), "max_tokens": 150} for number in range(1, 7)]
    streamed = [{"prompt": prompt_of(number, 60), "max_tokens": 120} for number in range(7, 10)]
    with ThreadPoolExecutor(16) as threads:
        futures = [threads.submit(load.ask, "acme", **fields) for fields in asked]
        futures += [threads.submit(load.stream, "globex", **fields) for fields in streamed]
        futures += [
            threads.submit(load.ask, "globex", prompt=pair, n=2, max_tokens=40),
            threads.submit(load.stream, "acme", messages=chat, max_tokens=20, n=3),
        ]
        for tenant in ("acme", "globex", "acme"):
            futures.append(threads.submit(load.ask, tenant, prompt=shared, max_tokens=5))
        for number, num_events in ((20, 3), (21, 9), (22, 1)):
            text = prompt_of(number, 50)
            futures.append(
                threads.submit(load.leave, "globex", num_events, prompt=text, max_tokens=400)
            )
        for future in futures:
            future.result()
    for number in range(1, 5):  # from the device, from below it, or computed anew
        load.ask("acme", prompt=prompt_of(number, 90), max_tokens=3)


def be_refused(load: Load) -> None:
    told, url = load.told, load.server.url
    told.refused(load.post("acme", prompt=NEEDLE, max_tokens=4, no_such_field=NEEDLE), 400)
    told.refused(load.post("acme", prompt=NEEDLE, max_tokens=4, temperature=9), 400)
    told.refused(load.post("acme", prompt=NEEDLE, model=NEEDLE), 404)
    told.refused(load.post("acme", prompt=prompt_of(3, 3000), max_tokens=4), 400)
    told.refused(load.post("nobody", prompt=NEEDLE), 401)
    headers = bearer(KEYS["acme"])
    told.refused(httpx.get(f"{url}/dashboard/data", headers=headers, verify=False), 403)
    told.refused(httpx.get(f"{url}/{NEEDLE}", headers=headers, verify=False), 404)
    told.refused(httpx.get(f"{url}/v1/completions", headers=headers, verify=False), 405)
    load.ask("slow", prompt=NEEDLE, max_tokens=2)
    told.refused(load.post("slow", prompt=NEEDLE, max_tokens=2), 429)


def lose_the_worker(load: Load) -> None:
    """In the midst of one plain answer and one stream."""
    fields = {"prompt": prompt_of(30, 30), "max_tokens": 700}
    before = len(admitted(load))
    with ThreadPoolExecutor(1) as threads, load.open("acme", **fields) as stream:
        plain = threads.submit(load.post, "globex", prompt=prompt_of(31, 30), max_tokens=700)
        last = stream.events(2)[-1]
        wait_for(lambda: len(admitted(load)) == before + 2)
        os.kill(load.server.worker_pid, signal.SIGKILL)
        load.note_left("acme", stream, last)
        *_, failure, done = stream.events()
        assert done == "[DONE]"
        load.told.error(failure["error"])
        load.told.refused(plain.result(), 503)
    load.told.ended["error", "acme"] += 1
    load.told.ended["error", "globex"] += 1
    request_id = plain.result().headers["x-request-id"]
    (line,) = [each for each in load.lines_of(request_id) if each["event"] == "request admitted"]
    # It was admitted, which only its log and the counters know: the client was told an error.
    load.told.tokens["prompt", "globex"] += line["prompt_tokens"]
    load.told.tokens["cached", "globex"] += line["cached_tokens"]
    below = line.get("host_tokens", 0)
    load.told.tokens["device", "globex"] += line["cached_tokens"] - below
    load.told.tokens["host", "globex"] += below
    load.left.append((request_id, "globex", 0))


def admitted(load: Load) -> list[dict[str, Any]]:
    return [line for line in load.lines() if line["event"] == "request admitted"]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    folder = tmp_path_factory.mktemp("told")
    models.save_model("llama", folder / "model", chat_template=models.CHAT_TEMPLATE)
    (folder / "admin-keys").write_text(ADMIN_KEY)
    with real_server(
        *("--model", str(folder / "model"), "--served-model-name", "tiny", "--num-threads", "1"),
        *(
            "--model-cache-dir",
            str(folder / "digests"),
            "--max-num-seqs",
            "8",
            "--max-model-len",
            "1024",
        ),
        *("--block-size", "16", "--kv-cache-memory", "900KiB", "--host-cache-size", "4MiB"),
        *("--tenant-file", write(folder, two_tenants(SLOW))),
        *("--admin-key-file", str(folder / "admin-keys")),
        *("--log-format", "json", "--log-level", "debug"),
    ) as server:
        load = Load(server)
        work(load)
        be_refused(load)
        load.counted()
        lose_the_worker(load)
        yield load
        for _ in range(2):  # at once: a worker that is just being started again takes its time
            server.signal(signal.SIGINT)


def test_counters_equal_what_clients_were_told(load: Load) -> None:
    counted, told = load.counted(), load.told

    def count(name: str, **labels: str) -> float:
        return counted[name, tuple(sorted(labels.items()))]

    preemptions = sum(v for (name, _), v in counted.items() if name == "num_preemptions_total")
    assert preemptions > 0  # they were read before the worker died, and have not fallen
    for tenant in KEYS:
        told_prompt, told_cached = told.tokens["prompt", tenant], told.tokens["cached", tenant]
        assert count("prefix_cache_queries_total", tenant=tenant) == told_prompt
        assert count("prompt_tokens_total", tenant=tenant) == told_prompt
        assert count("prefix_cache_hits_total", tenant=tenant) == told_cached
        for source in SOURCES:
            found = count("prompt_tokens_cached_total", tenant=tenant, source=source)
            assert found == told.tokens[source, tenant], (tenant, source)
        for outcome in ("stop", "length", "abort", "error"):
            found = count("requests_total", tenant=tenant, outcome=outcome)
            assert found == told.ended[outcome, tenant], (tenant, outcome)
    errors = {
        (dict(labels)["type"], dict(labels)["code"]): value
        for (name, labels), value in counted.items()
        if name == "request_errors_total"
    }
    assert errors == dict(told.errors)
    assert len(errors) >= 8
    assert count("worker_losses_total") == 1


def test_output_is_what_clients_were_told_and_the_log_tells_of_the_rest(load: Load) -> None:
    counted = load.counted()
    rest: Counter[str] = Counter()
    for request_id, tenant, num_seen in load.left:
        (line,) = [line for line in load.lines_of(request_id) if line["event"] == "request ended"]
        assert line["outcome"] in ("abort", "error")
        assert line["output_tokens"] >= num_seen
        rest[tenant] += line["output_tokens"]
    for tenant in KEYS:
        found = counted["generation_tokens_total", (("tenant", tenant),)]
        assert found == load.told.tokens["output", tenant] + rest[tenant]


def test_each_event_of_a_request_is_one_line(load: Load) -> None:
    events: dict[str, list[str]] = {}
    for line in load.lines():
        assert {"time", "level", "logger", "event"} <= set(line)
        if "request_id" in line:
            events.setdefault(line["request_id"], []).append(line["event"])
    received, admission = "request received", "request admitted"
    first, ended = "request has its first token", "request ended"
    refused, failed = "request refused", "request failed"
    lives = Counter(tuple(each) for each in events.values())
    assert set(lives) <= {
        (received, admission, first, ended),
        (admission, first, ended),  # a further choice
        (refused,),
        (received, admission, first, ended, failed),  # the worker was lost
    }
    assert lives[received, admission, first, ended] > 15
    assert lives[admission, first, ended] == 3 + 2
    assert sum(count for life, count in lives.items() if refused in life) == 9
    assert sum(count for life, count in lives.items() if failed in life) == 2


def test_the_log_tells_of_workers_and_links(load: Load) -> None:
    events = [line["event"] for line in load.lines()]
    assert events.index("link opened") < events.index("worker lost")
    assert "worker ready" in events
    lost = [line for line in load.lines() if line["event"] == "worker lost"]
    assert {line["level"] for line in lost} == {"warning"}
    assert "SIGKILL" in lost[-1]["detail"]


def test_nothing_that_was_asked_is_in_the_log(load: Load) -> None:
    assert NEEDLE not in load.server.stderr
    assert NEEDLE not in load.server.stdout
