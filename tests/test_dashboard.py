"""The dashboard in a real browser, against a real gateway over HTTP with a worker that is not."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from model_worker.protocol import PrefixAction
from service.sessions.sessions import SessionSettings
from tests import gateway_kit
from tests.browser_kit import (
    WAIT_MS,
    browser,
    open_board,
    value,
    violations,
    wait_for_text,
    wait_for_value,
    wait_open,
)
from tests.http_kit import Served, metric, repeat, serving

__all__ = ["browser"]  # a fixture

TOKEN_INTERVAL = 0.005  # seconds
EVIL = "<img src=x onerror=alert(1)>"


def ask(served: Served, text: str, **options: Any) -> dict[str, int]:
    """One answer; its prompt and cached tokens."""
    key = options.pop("key", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        **options,
    }
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
def served() -> Iterator[Served]:
    script = repeat("The Danube, the Loire and the Vistula. ")
    with serving(script, token_interval=TOKEN_INTERVAL) as gateway:
        yield gateway


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()


# ---------------------------------------------------------------- what it shows


def test_an_empty_server_says_so(browser: Browser) -> None:
    with serving(wait_ready=False, prepare=lambda worker: worker.set_loading("42 %")) as gateway:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        seen = open_board(page, gateway.base_url)
        assert page.inner_text("#state") == "Loading"
        assert "42 %" in page.inner_text("#cause")
        for text in ("No request yet.", "No session yet", "No two requests", "Not enough requests"):
            assert text in page.inner_text("main"), text
        assert not re.search(r"NaN|undefined|null|Infinity", page.inner_text("body"))
        assert page.is_disabled("#chat-send")
        gateway.call(gateway.worker.set_ready)
        page.wait_for_selector("#top[data-state=ready]", timeout=WAIT_MS)
        assert page.inner_text("#cause") == "1 worker takes requests"
        assert seen.errors == []
        page.close()


def test_it_shows_what_the_metrics_say(page: Page, served: Served) -> None:
    question = "Name three rivers of Europe, please. " * 4
    usages = [ask(served, text) for text in (question, question, "Hm?", question + "And a lake.")]
    assert usages[0]["cached"] == 0
    assert usages[1]["cached"] == usages[1]["prompt"] - 1
    seen = open_board(page, served.base_url)
    queried = measured(served, "prefix_cache_queries_total")
    hit = measured(served, "prefix_cache_hits_total")
    assert queried == sum(usage["prompt"] for usage in usages)
    assert hit == sum(usage["cached"] for usage in usages)
    assert value(page, "tokens-queried") == queried
    assert value(page, "tokens-hit") == value(page, "saved-tokens") == hit
    assert value(page, "computed-tokens") == queried - hit
    assert value(page, "hit-total") == hit / queried
    assert page.inner_text("#hit-total") == f"{100 * hit / queried:.1f} %"
    assert value(page, "generated") == measured(served, "generation_tokens_total")
    for kind in ("hit", "miss"):
        name = "time_to_first_token_seconds_count"
        assert value(page, f"ttft-{kind}-count") == measured(served, name, cache=kind) > 0
        assert 0 < value(page, f"ttft-{kind}-p50") <= value(page, f"ttft-{kind}-p95")
    for state in ("locked", "evictable", "free", "total"):
        shown = value(page, f"kv-device-{state}")
        assert shown == measured(served, "kv_cache_blocks", state=state)
    assert value(page, "kv-device-evictable") > 0
    assert value(page, "itl-p50") >= TOKEN_INTERVAL / 2
    assert value(page, "running") == measured(served, "num_requests_running") == 0
    assert value(page, "queued") == measured(served, "requests_queued") == 0
    assert page.inner_text("#models") == gateway_kit.MODEL_NAME
    assert page.inner_text("#state") == "Ready"
    assert served.worker.worker_id in page.inner_text("#workers")
    assert seen.errors == []
    assert {httpx.URL(url).netloc for url in seen.urls} == {httpx.URL(served.base_url).netloc}


def test_the_charts_follow_the_same_counters(page: Page, served: Served) -> None:
    open_board(page, served.base_url)
    question = "Name three lakes of Europe, please. " * 4
    usage = [ask(served, question) for _ in range(2)][1]
    with served.client() as client:
        for _ in range(100):
            body = client.get("/dashboard/data/series?span=10m").json()
            if body["times"] and body["columns"]["hit_rate"][-1]:
                break
    rates = [rate for rate in body["columns"]["hit_rate"] if rate is not None]
    assert 0 < rates[-1] <= usage["cached"] / usage["prompt"]
    page.wait_for_function(
        "() => Number(document.getElementById('chart-hit-hit_device').dataset.value) > 0",
        timeout=WAIT_MS,
    )
    label = page.locator("#chart-hit .plot").get_attribute("aria-label") or ""
    assert re.fullmatch(r"Hit rate over time, by tier: device \d+ %(, \w+ (0 %|\u2013))*", label)
    for span, after in (("1d", "0"), ("10m", "1")):  # from then on what is new alone
        wanted = f"span={span}&after={after}"
        with page.expect_response(lambda r, wanted=wanted: wanted in r.url, timeout=WAIT_MS):
            page.check(f"input[name=span][value='{span}']", force=True)


def test_it_lives(page: Page, served: Served) -> None:
    open_board(page, served.base_url)
    before = value(page, "tokens-queried")
    caller = threading.Thread(
        target=ask, args=(served, "A long story."), kwargs={"max_tokens": 800}
    )
    caller.start()
    wait_for_value(page, "running", 1)
    assert value(page, "in-flight") == 1
    assert value(page, "kv-device-locked") > 0
    wait_for_text(page, "#request-rows", "running")
    caller.join()
    wait_for_value(page, "running", 0)
    after = measured(served, "prefix_cache_queries_total")
    assert after > before
    wait_for_value(page, "tokens-queried", after)


def test_requests_and_their_common_prefixes_are_listed(page: Page, served: Served) -> None:
    rule = "Answer in one word, and never in two, whatever you are asked. " * 6
    usages = [ask(served, rule + end, session_id=f"s-{end}") for end in ("Sea", "Lake", "Hill")]
    seen = open_board(page, served.base_url)
    rows = page.locator("#request-rows tr")
    texts = rows.all_inner_texts()[:3]
    for text, usage, name in zip(texts, reversed(usages), ("Hill", "Lake", "Sea"), strict=True):
        assert f"{usage['cached']} / {usage['prompt']}" in text
        assert f"s-{name}" in text
        assert "length" in text
    bars = rows.first.locator(".timeline .bar")
    assert re.fullmatch(
        r"queue \S+( \S+)?, prefill \S+( \S+)?, decode \S+ \S+|queue .*",
        bars.get_attribute("aria-label") or "",
    )
    # The shared rule is whole blocks of the prompts that begin with it.
    block = gateway_kit.BLOCK_SIZE
    listed = page.locator("#prefix-list").inner_text()
    found = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens\s+3 requests", listed)]
    assert found
    assert all(number % block == 0 for number in found)
    assert max(found) >= usages[1]["cached"] // block * block - block
    assert page.locator("#prefix-tree rect").count() > 0
    assert "more of the prompt tokens" in page.inner_text("#curve-said")
    assert seen.errors == []


def test_what_happened_is_marked(page: Page, served: Served) -> None:
    with served.client() as client:
        dropped = client.post("/reset_prefix_cache").json()["num_blocks_dropped"]
    open_board(page, served.base_url)
    try:
        served.call(served.worker.set_lost, f"it went for a walk {EVIL}")
        page.wait_for_selector("#top[data-state=lost]", timeout=WAIT_MS)
        assert "it went for a walk" in page.inner_text("#cause")
        assert "it went for a walk" in page.inner_text("#workers")
        since = value(page, "since-at")
    finally:
        served.call(served.worker.set_ready)
    page.wait_for_selector("#top[data-state=ready]", timeout=WAIT_MS)
    assert value(page, "since-at") >= since
    wait_for_text(page, "#events", "has started again")
    events = page.locator("#events li").all_inner_texts()
    assert any(f"cache reset: {dropped} blocks dropped" in text for text in events)
    assert any("is lost: it went for a walk" in text for text in events)
    assert any("the gateway has started" in text for text in events)
    assert page.locator("img[src=x]").count() == 0


def test_a_server_that_is_gone_is_told(page: Page, served: Served) -> None:
    open_board(page, served.base_url)
    page.route("**/dashboard/data", lambda route: route.abort())
    page.wait_for_selector("#top[data-state=offline]", timeout=WAIT_MS)
    assert page.inner_text("#cause") == "no connection to the server"
    page.unroute("**/dashboard/data")
    page.wait_for_selector("#top[data-state=ready]", timeout=WAIT_MS)


# ---------------------------------------------------------------- what can be done


def test_a_chat_shows_what_each_turn_found(page: Page, served: Served) -> None:
    seen = open_board(page, served.base_url)
    page.wait_for_selector("#chat-send:enabled", timeout=WAIT_MS)
    for turn, text in enumerate(("Which rivers do you know?", f"{EVIL} And lakes?"), start=1):
        page.fill("#chat-text", text)
        page.press("#chat-text", "Enter")
        page.wait_for_function(
            "(n) => document.querySelectorAll('#chat-turns .figures[data-cached]').length === n",
            arg=turn,
            timeout=WAIT_MS,
        )
    figures = page.locator("#chat-turns .figures")
    first, second = (figures.nth(n) for n in (0, 1))
    assert int(second.get_attribute("data-cached") or 0) >= int(
        first.get_attribute("data-prompt") or 0
    )
    assert re.search(r"prompt tokens cached · first token after \d+", second.inner_text())
    assert "The Danube" in page.locator("#chat-turns .assistant .said").nth(1).inner_text()
    assert EVIL in page.locator("#chat-turns .user .said").nth(1).inner_text()
    assert page.locator("img[src=x]").count() == 0
    page.click("#chat-new")
    assert page.locator("#chat-turns .said").count() == 0
    assert seen.errors == []


def add_sessions(served: Served, names: list[str]) -> None:
    """As if clients had created them, whatever they are called."""

    async def add() -> None:
        for name in names:
            assert await served.gateway.sessions.create("default", name, SessionSettings())

    asyncio.run_coroutine_threadsafe(add(), served.loop).result(60.0)


def test_ten_thousand_sessions_are_paged_and_searched(page: Page, served: Served) -> None:
    before = int(measured(served, "sessions"))
    add_sessions(served, [f"many-{number:05}" for number in range(10_000)])
    seen = open_board(page, served.base_url)
    assert value(page, "session-count") == measured(served, "sessions") == before + 10_000
    first = page.locator("#session-rows tr")
    assert first.count() == 12
    assert "many-09999" in first.first.inner_text()
    page.click("#session-next")
    wait_for_text(page, "#session-range", f"13\u201324 of {before + 10_000:,}")
    assert "many-09987" in page.locator("#session-rows").inner_text()
    page.fill("#session-search", "MANY-0123")
    wait_for_text(page, "#session-range", "1\u201310 of 10")
    assert page.is_disabled("#session-next")
    page.fill("#session-search", "no such name")
    page.wait_for_selector("#no-sessions:visible", timeout=WAIT_MS)
    assert seen.errors == []


def test_sessions_are_forked_evicted_and_deleted(page: Page, served: Served) -> None:
    usage = ask(served, "Which rivers flow into the Black Sea?", session_id="rivers")
    add_sessions(served, [EVIL])
    seen = open_board(page, served.base_url)
    assert page.locator("#session-rows th").first.inner_text() == EVIL
    assert page.locator("img").count() == 1  # the page's own
    page.fill("#session-search", "rivers")
    row = page.locator("#session-rows tr", has_text="rivers").first
    row.wait_for(timeout=WAIT_MS)
    wait_for_text(page, "#session-range", "1\u20131 of 1")
    # Prompt and answer, of which the last token was never fed back.
    assert str(usage["prompt"] + 8) in row.locator("td.num").first.inner_text()
    num_commands = len(served.worker.prefix_commands)
    twice(page, "evict rivers")
    wait_for_text(page, "#session-note", "its blocks are being evicted")
    for _ in range(100):
        commands = served.worker.prefix_commands[num_commands:]
        if PrefixAction.DROP in {command.action for command in commands}:
            break
        page.wait_for_timeout(50)
    assert PrefixAction.DROP in {command.action for command in commands}
    row.get_by_role("button", name="fork rivers").click()
    wait_for_text(page, "#session-note", "forked as s-")
    fork = page.inner_text("#session-note").removeprefix("forked as ")
    twice(page, "delete rivers")
    page.wait_for_selector("#no-sessions:visible", timeout=WAIT_MS)
    with served.client() as client:
        assert client.get("/v1/sessions/rivers").status_code == 404
        assert client.get(f"/v1/sessions/{fork}").status_code == 200
    assert seen.errors == []


def twice(page: Page, name: str) -> None:
    """What cannot be undone is asked for twice."""
    button = page.get_by_role("button", name=name)
    button.click()
    assert button.inner_text() == "sure?"
    button.click()


# ---------------------------------------------------------------- for whom it is


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_nothing_scrolls_sideways(
    browser: Browser, served: Served, scheme: Any
) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    seen = open_board(page, served.base_url)
    wait_for_text(page, "#request-rows", "length")
    paper = brightness(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper > 220 if scheme == "light" else paper < 40
    assert violations(page) == []
    for width in (360, 820, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert violations(page) == []
    assert seen.errors == []
    page.close()


def brightness(css: str) -> float:
    """0 to 255, of "rgb(r, g, b)"."""
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", css)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_with_keys_set_it_asks_for_the_admin_key(browser: Browser) -> None:
    keys: dict[str, Any] = {"api_keys": ("client-key",), "admin_keys": ("admin-key",)}
    with serving(**keys, show_prompt_text=True) as gateway:
        text = "The secret of the lake is that nobody has ever swum in it. " * 3
        usage = [ask(gateway, text, key="client-key") for _ in range(2)][1]
        context = browser.new_context()
        page = context.new_page()
        page.goto(gateway.base_url)
        page.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        assert not page.is_visible("#board")
        page.fill("#key", "client-key")
        page.press("#key", "Enter")
        wait_for_text(page, "#cause", "does not open")
        page.fill("#key", "admin-key")
        page.press("#key", "Enter")
        wait_open(page)
        assert value(page, "tokens-queried") == 2 * usage["prompt"]
        assert not page.is_visible("#key-form")
        wait_for_text(page, "#prefix-list", "The secret of")
        page.reload()
        wait_open(page)
        other_tab = context.new_page()
        other_tab.goto(gateway.base_url)
        other_tab.wait_for_selector("#key-form:visible", timeout=WAIT_MS)
        context.close()


def test_prompts_are_not_shown_unless_that_was_asked_for(served: Served) -> None:
    ask(served, "The secret of the lake is that nobody has ever swum in it. " * 3)
    ask(served, "The secret of the lake is that nobody has ever swum in it. " * 3)
    with served.client() as client:
        paths = ("", "/series", "/requests", "/findings", "/sessions")
        bodies = [client.get(f"/dashboard/data{path}").text for path in paths]
    assert "secret" not in "".join(bodies)
    assert '"shows_text":false' in bodies[3]


def test_the_page_is_served_with_a_strict_policy(served: Served) -> None:
    with served.client() as client:
        response = client.get("/")
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", response.text)
        assert not re.search(r"<script>|<style|\bon\w+=|style=", response.text)
        assert client.get("/dashboard/vendor/uplot.LICENSE").text.startswith("The MIT License")
        for path in ("nothing.js", "..%2Fboard.py", "vendor/..%2F..%2Fboard.py", "vendor"):
            assert client.get(f"/dashboard/{path}").status_code == 404
