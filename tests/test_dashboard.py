"""The dashboard in a real browser, against a real gateway over HTTP with a worker that is not."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests import gateway_kit
from tests.http_kit import Served, metric, repeat, serving

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 20_000
TOKEN_INTERVAL = 0.01  # seconds


def ask(served: Served, text: str, key: str = "", max_tokens: int = 8) -> dict[str, int]:
    """One answer; its prompt and cached tokens."""
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with served.client(headers=headers) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached}


def measured(served: Served, name: str, **labels: str) -> float:
    with served.client() as client:
        return metric(client, name, **labels)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "no chromium on PATH"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and in CI the browser tests must run")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    script = repeat("The Danube, the Loire and the Vistula. ")
    with serving(script, token_interval=TOKEN_INTERVAL) as gateway:
        yield gateway


@dataclass
class Seen:
    """What the browser complained about, and what it asked for."""

    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


def watch(page: Page) -> Seen:
    seen = Seen()
    page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.urls.append(request.url))
    return seen


def open_board(page: Page, url: str) -> Seen:
    seen = watch(page)
    page.goto(url)
    page.wait_for_selector("main[aria-busy=false]", timeout=WAIT_MS)
    return seen


def value(page: Page, name: str) -> float:
    return float(page.locator(f"#{name}").get_attribute("data-value") or "nan")


def wait_for_value(page: Page, name: str, expected: float) -> None:
    script = "([id, value]) => Number(document.getElementById(id).dataset.value) === value"
    page.wait_for_function(script, arg=[name, expected], timeout=WAIT_MS)


def test_it_shows_what_the_metrics_say(browser: Browser, served: Served) -> None:
    question = "Name three rivers of Europe, please. " * 4
    usages = [ask(served, text) for text in (question, question, "Hm?", question + "And a lake.")]
    assert usages[0]["cached"] == 0
    assert usages[1]["cached"] == usages[1]["prompt"] - 1
    page = browser.new_page()
    seen = open_board(page, served.base_url)
    queried = measured(served, "prefix_cache_queries_total")
    hit = measured(served, "prefix_cache_hits_total")
    assert queried == sum(usage["prompt"] for usage in usages)
    assert hit == sum(usage["cached"] for usage in usages)
    assert value(page, "tokens-queried") == queried
    assert value(page, "tokens-hit") == hit
    assert value(page, "hit-total") == hit / queried
    assert page.inner_text("#hit-total") == f"{100 * hit / queried:.1f} %"
    for kind in ("hit", "miss"):
        name = "time_to_first_token_seconds_count"
        assert value(page, f"ttft-{kind}-count") == measured(served, name, cache=kind) > 0
        assert 0 < value(page, f"ttft-{kind}-p50") <= value(page, f"ttft-{kind}-p95")
    for shown, state in (("kv-locked", "locked"), ("kv-evictable", "evictable"),
                         ("kv-free", "free"), ("kv-size", "total")):  # fmt: skip
        assert value(page, shown) == measured(served, "kv_cache_blocks", state=state)
    assert value(page, "kv-evictable") > 0
    assert value(page, "itl-p50") >= TOKEN_INTERVAL / 2
    assert value(page, "running") == measured(served, "num_requests_running") == 0
    assert value(page, "queued") == measured(served, "requests_queued") == 0
    assert page.inner_text("#models") == gateway_kit.MODEL_NAME
    assert page.inner_text("#state") == "ready"
    assert served.worker.worker_id in page.inner_text("#workers")
    assert seen.errors == []
    assert {httpx.URL(url).netloc for url in seen.urls} == {httpx.URL(served.base_url).netloc}
    page.close()


def test_it_lives(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    open_board(page, served.base_url)
    before = value(page, "tokens-queried")
    caller = threading.Thread(
        target=ask, args=(served, "A long story."), kwargs={"max_tokens": 300}
    )
    caller.start()
    wait_for_value(page, "running", 1)
    assert value(page, "in-flight") == 1
    assert value(page, "kv-locked") > 0
    caller.join()
    wait_for_value(page, "running", 0)
    after = measured(served, "prefix_cache_queries_total")
    assert after > before
    wait_for_value(page, "tokens-queried", after)
    page.wait_for_function(
        "() => document.querySelectorAll('#spark-running path.line').length === 1", timeout=WAIT_MS
    )
    page.close()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (320, 640), (820, 1180), (1600, 900)])
def test_nothing_scrolls_sideways(
    browser: Browser, served: Served, width: int, height: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": height})
    open_board(page, served.base_url)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    hero = page.locator("#hit-recent").bounding_box()
    assert hero is not None
    assert hero["x"] >= 0
    assert hero["x"] + hero["width"] <= width
    page.close()


def test_it_is_dark_where_that_is_wanted(browser: Browser, served: Served) -> None:
    contrasts = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
        open_board(page, served.base_url)
        paper = brightness(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        ink = brightness(page.evaluate("getComputedStyle(document.body).color"))
        contrasts[scheme] = paper - ink
        page.close()
    assert contrasts["light"] > 150
    assert contrasts["dark"] < -150


def brightness(css: str) -> float:
    """0 to 255, of "rgb(r, g, b)"."""
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", css)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_every_figure_is_named_for_those_who_cannot_see_it(
    browser: Browser, served: Served
) -> None:
    page = browser.new_page()
    open_board(page, served.base_url)
    unnamed = """() => [...document.querySelectorAll('svg')]
        .filter((svg) => svg.getAttribute('aria-hidden') !== 'true' && !svg.ariaLabel)
        .map((svg) => svg.id)"""
    assert page.evaluate(unnamed) == []
    for heading in ("Cache hit rate", "Time to first token", "Inter-token latency", "KV memory"):
        assert page.get_by_role("region", name=heading).count() == 1
    assert re.search(r"\d+ used by requests", page.locator("#kv-bar").get_attribute("aria-label")
                     or "")  # fmt: skip
    page.close()


def test_a_lost_worker_is_told(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    open_board(page, served.base_url)
    try:
        served.call(served.worker.set_lost, "it went for a walk")
        page.wait_for_selector("#state[data-state=lost]", timeout=WAIT_MS)
        assert "it went for a walk" in page.inner_text("#state")
        assert "it went for a walk" in page.inner_text("#workers")
    finally:
        served.call(served.worker.set_ready)
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)
    page.close()


def test_a_server_that_is_gone_is_told(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    open_board(page, served.base_url)
    page.route("**/dashboard/data", lambda route: route.abort())
    page.wait_for_selector("#state[data-state=offline]", timeout=WAIT_MS)
    assert page.inner_text("#state") == "no connection"
    page.unroute("**/dashboard/data")
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)
    page.close()


def test_with_keys_set_it_asks_for_the_admin_key(browser: Browser) -> None:
    keys: dict[str, Any] = {"api_keys": ("client-key",), "admin_keys": ("admin-key",)}
    with serving(**keys) as gateway:
        usage = ask(gateway, "Hello there.", key="client-key")
        context = browser.new_context()
        page = context.new_page()
        page.goto(gateway.base_url)
        page.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        assert not page.is_visible("#board")
        page.fill("#key", "client-key")
        page.press("#key", "Enter")
        page.wait_for_function(
            "() => document.getElementById('state').textContent.includes('does not open')",
            timeout=WAIT_MS,
        )
        page.fill("#key", "admin-key")
        page.press("#key", "Enter")
        page.wait_for_selector("main[aria-busy=false]", timeout=WAIT_MS)
        assert value(page, "tokens-queried") == usage["prompt"]
        assert not page.is_visible("#key-form")
        page.reload()
        page.wait_for_selector("main[aria-busy=false]", timeout=WAIT_MS)
        other_tab = context.new_page()
        other_tab.goto(gateway.base_url)
        other_tab.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        context.close()


def test_the_page_is_served_with_a_strict_policy(served: Served) -> None:
    with served.client() as client:
        response = client.get("/")
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith(("default-src 'self'", "default-src 'none'"))
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", response.text)
        assert client.get("/dashboard/nothing.js").status_code == 404
        assert client.get("/dashboard/..%2Fconfig.py").status_code == 404
