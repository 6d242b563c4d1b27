"""The dashboard in a real browser, against a real gateway over HTTP with a worker that is not."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import gateway_kit
import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from service.app import create_app, uvicorn_config
from service.config import GatewayConfig
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ANSWER = "The Danube, the Loire and the Vistula."
WAIT_MS = 20_000


@dataclass
class Served:
    url: str
    worker: FakeWorker
    loop: asyncio.AbstractEventLoop

    def ask(self, text: str, key: str | None = None, max_tokens: int = 8) -> dict[str, int]:
        """One answer; its prompt, cached and completion tokens."""
        body = {
            "model": gateway_kit.MODEL_NAME,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.url}/v1/chat/completions"
        response = httpx.post(url, json=body, headers=headers, timeout=30)
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return {"prompt": usage["prompt_tokens"], "cached": cached,
                "completion": usage["completion_tokens"]}  # fmt: skip

    def metric(self, name: str, **labels: str) -> float:
        """The present value of one sample of /metrics; it must be there exactly once."""
        found = []
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name:
                given = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if labels.items() <= given.items():
                    found.append(float(match[3]))
        assert len(found) == 1, (name, labels, found)
        return found[0]


@contextmanager
def serving(config: GatewayConfig, token_interval: float = 0.01) -> Iterator[Served]:
    """A gateway on a free port, in a thread of its own."""
    ids = gateway_kit.ids_of(ANSWER) * 20
    loop = asyncio.new_event_loop()
    worker = FakeWorker(
        gateway_kit.make_card(), lambda request: ids, token_interval, worker_id="local"
    )
    app = create_app(config, WorkerRegistry([worker]))
    server = uvicorn.Server(uvicorn_config(app, config))
    listener = uvicorn_config(app, config).bind_socket()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(server.serve(sockets=[listener]))
        loop.close()

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wait_until_ready(url)
        yield Served(url, worker, loop)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()
    assert not thread.is_alive()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    pytest.fail("the gateway did not get ready")


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
    with serving(GatewayConfig(port=0)) as gateway:
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
    usages = [served.ask(text) for text in (question, question, "Hm?", question + "And a lake.")]
    assert usages[0]["cached"] == 0
    assert usages[1]["cached"] == usages[1]["prompt"] - 1
    page = browser.new_page()
    seen = open_board(page, served.url)
    queried = served.metric("headstart_prefix_cache_queries_total")
    hit = served.metric("headstart_prefix_cache_hits_total")
    assert queried == sum(usage["prompt"] for usage in usages)
    assert hit == sum(usage["cached"] for usage in usages)
    assert value(page, "tokens-queried") == queried
    assert value(page, "tokens-hit") == hit
    assert value(page, "hit-total") == hit / queried
    assert page.inner_text("#hit-total") == f"{100 * hit / queried:.1f} %"
    for kind in ("hit", "miss"):
        name = "headstart_time_to_first_token_seconds_count"
        assert value(page, f"ttft-{kind}-count") == served.metric(name, cache=kind) > 0
        assert 0 < value(page, f"ttft-{kind}-p50") <= value(page, f"ttft-{kind}-p95")
    for shown, state in (("kv-locked", "locked"), ("kv-evictable", "evictable"),
                         ("kv-free", "free"), ("kv-size", "total")):  # fmt: skip
        assert value(page, shown) == served.metric("headstart_kv_cache_blocks", state=state)
    assert value(page, "kv-evictable") > 0
    assert value(page, "itl-p50") >= 0.005  # a token every 10 ms
    assert value(page, "running") == served.metric("headstart_num_requests_running") == 0
    assert value(page, "queued") == served.metric("headstart_requests_queued") == 0
    assert page.inner_text("#models") == gateway_kit.MODEL_NAME
    assert page.inner_text("#state") == "ready"
    assert "local" in page.inner_text("#workers")
    assert seen.errors == []
    assert {httpx.URL(url).netloc for url in seen.urls} == {httpx.URL(served.url).netloc}
    page.close()


def test_it_lives(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    open_board(page, served.url)
    before = value(page, "tokens-queried")
    caller = threading.Thread(
        target=served.ask, args=("A long story.",), kwargs={"max_tokens": 300}
    )
    caller.start()
    wait_for_value(page, "running", 1)
    assert value(page, "in-flight") == 1
    assert value(page, "kv-locked") > 0
    caller.join()
    wait_for_value(page, "running", 0)
    after = served.metric("headstart_prefix_cache_queries_total")
    assert after > before
    wait_for_value(page, "tokens-queried", after)
    page.wait_for_function(
        "document.querySelectorAll('#spark-running path.line').length === 1", timeout=WAIT_MS
    )
    page.close()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (320, 640), (820, 1180), (1600, 900)])
def test_nothing_scrolls_sideways(
    browser: Browser, served: Served, width: int, height: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": height})
    open_board(page, served.url)
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
        open_board(page, served.url)
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
    open_board(page, served.url)
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
    open_board(page, served.url)
    try:
        served.loop.call_soon_threadsafe(served.worker.set_lost, "it went for a walk")
        page.wait_for_selector("#state[data-state=lost]", timeout=WAIT_MS)
        assert "it went for a walk" in page.inner_text("#state")
        assert "it went for a walk" in page.inner_text("#workers")
    finally:
        served.loop.call_soon_threadsafe(served.worker.set_ready)
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)
    page.close()


def test_a_server_that_is_gone_is_told(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    open_board(page, served.url)
    page.route("**/dashboard/data", lambda route: route.abort())
    page.wait_for_selector("#state[data-state=offline]", timeout=WAIT_MS)
    assert page.inner_text("#state") == "no connection"
    page.unroute("**/dashboard/data")
    page.wait_for_selector("#state[data-state=ready]", timeout=WAIT_MS)
    page.close()


def test_with_keys_set_it_asks_for_the_admin_key(browser: Browser) -> None:
    config = GatewayConfig(port=0, api_keys=("client-key",), admin_keys=("admin-key",))
    with serving(config) as gateway:
        usage = gateway.ask("Hello there.", key="client-key")
        context = browser.new_context()
        page = context.new_page()
        page.goto(gateway.url)
        page.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        assert not page.is_visible("#board")
        page.fill("#key", "client-key")
        page.press("#key", "Enter")
        page.wait_for_function(
            "document.getElementById('state').textContent.includes('does not open')",
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
        other_tab.goto(gateway.url)
        other_tab.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        context.close()


def test_the_page_is_served_with_a_strict_policy(served: Served) -> None:
    response = httpx.get(served.url, timeout=10)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'self'" in policy or "default-src 'none'" in policy
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", response.text)
    assert httpx.get(f"{served.url}/dashboard/nothing.js", timeout=10).status_code == 404
    assert httpx.get(f"{served.url}/dashboard/..%2Fconfig.py", timeout=10).status_code == 404
