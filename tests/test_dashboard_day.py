"""The dashboard over a real worker, and a day on which it finds what breaks the prefix."""

from __future__ import annotations

import re

from playwright.sync_api import Browser

from tests.browser_kit import browser, open_board, value, wait_for_text
from tests.day_kit import RULES, Day, hit_rate
from tests.http_kit import metric
from tests.target import Target

__all__ = ["browser"]  # a fixture


def test_the_breaker_is_named_and_once_it_is_fixed_the_hit_rate_rises(
    browser: Browser, tiny_target: Target
) -> None:
    day = Day(tiny_target.http, tiny_target.model, RULES[:240], ("ada", "bo"), max_tokens=4)
    morning = day.play(6, is_fixed=False)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    seen = open_board(page, tiny_target.url)
    wait_for_text(page, "#breakers", "A date or time in messages[0].content")
    (row,) = [
        text
        for text in page.locator("#breakers li").all_inner_texts()
        if "A date or time in messages[0].content" in text
    ]
    assert re.search(r"tokens lost", row)
    assert re.search(r"move the date or time .*: \+[\d,]+ tokens per request", row, re.I)
    wait_for_text(page, "#request-rows", "diverged")

    afternoon = day.play(8, is_fixed=True)[2:]  # the rules themselves are computed once
    assert hit_rate(morning) < 0.35
    assert hit_rate(afternoon) > 0.7
    for name, exported in (
        ("tokens-queried", "prefix_cache_queries_total"),
        ("tokens-hit", "prefix_cache_hits_total"),
    ):
        total = metric(tiny_target.http, exported)
        page.wait_for_function(
            "([id, value]) => Number(document.getElementById(id).dataset.value) === value",
            arg=[name, total],
        )
    for state in ("locked", "evictable", "free", "total"):
        assert value(page, f"kv-device-{state}") == metric(
            tiny_target.http, "kv_cache_blocks", state=state
        )
    assert value(page, "saved-time") > 0
    ada = page.locator("#session-rows tr", has_text="ada")
    assert re.search(r"[1-9]\d* of \d+ blocks on the device", ada.inner_html())
    assert seen.errors == []
    page.close()
