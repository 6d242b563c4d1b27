"""What was cached, what is counted, and what is left behind. See tests/test_conformance.py."""

from __future__ import annotations

import re
import time

import pytest

from tests.http_kit import metric
from tests.target import Target, text_of, wait_until_idle


def test_the_same_prompt_twice(target: Target) -> None:
    prompt = f"{time.time_ns()} " + "Shelf holds jars of plum jam. " * 12
    cold = target.complete(prompt).json()
    warm = target.complete(prompt).json()
    assert text_of(cold) == text_of(warm)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    # What begins every prompt (a first token, the first digits of the time) may be there.
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    assert warm["usage"]["prompt_tokens"] - 64 < cached < warm["usage"]["prompt_tokens"]


def test_every_metric_is_documented_and_counters_end_in_total(target: Target) -> None:
    target.chat()
    text = target.http.get("/metrics").text
    helped = set(re.findall(r"^# HELP (\S+) \S", text, re.M))
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    assert helped == set(typed)
    assert all(name.startswith("headstart_") for name in typed)
    assert all(name.endswith("_total") for name, kind in typed.items() if kind == "counter")
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)
    for name in (
        "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total",
        "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting",
        "num_preemptions_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds",
    ):  # fmt: skip
        assert f"headstart_{name}" in typed


COUNTED = (
    "prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total",
    "prompt_tokens_total", "prompt_tokens_cached_total", "time_to_first_token_seconds_count",
    "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
    "inter_token_latency_seconds_count",
)  # fmt: skip


def test_metrics_are_the_sums_over_answers(target: Target) -> None:
    wait_until_idle(target)
    before = {name: metric(target.http, name) for name in COUNTED}
    usages = [target.chat("Ten times.", ignore_eos=True).json()["usage"] for _ in range(10)]
    grown = {name: metric(target.http, name) - before[name] for name in COUNTED}
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown == {
        "prefix_cache_queries_total": prompt,
        "prefix_cache_hits_total": cached,
        "generation_tokens_total": 80,
        "prompt_tokens_total": prompt,
        "prompt_tokens_cached_total": cached,
        "time_to_first_token_seconds_count": 10,
        "e2e_request_latency_seconds_count": 10,
        "request_queue_time_seconds_count": 10,
        "inter_token_latency_seconds_count": 70,
    }


def test_dashboard_shows_the_same_hit_rate(target: Target) -> None:
    target.chat()
    shown = target.http.get("/dashboard/data").json()["hit_rate"]
    assert shown["queried"] == metric(target.http, "prefix_cache_queries_total")
    assert shown["hit"] == metric(target.http, "prefix_cache_hits_total") <= shown["queried"]
    assert shown["rate"] == pytest.approx(shown["hit"] / shown["queried"])


def test_one_generated_token_gives_no_broken_rates(target: Target) -> None:
    assert target.chat(max_tokens=1).status_code == 200
    text = target.http.get("/dashboard/data").text
    assert "NaN" not in text
    assert "Infinity" not in text
