"""The dashboard in a real browser: Debian's Chromium, headless, through playwright.

Owns how it is started and what a page that misbehaves looks like. Whoever uses it starts one for a
file of tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WAIT_MS = 30_000
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "no chromium on PATH"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and in CI the browser tests must run")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@dataclass
class Seen:
    """What the browser complained about, and what it asked for."""

    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


def watch(page: Page) -> Seen:
    seen = Seen()
    page.on(
        "console",
        lambda message: (
            seen.errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.urls.append(request.url))
    return seen


def open_board(page: Page, url: str) -> Seen:
    """The page, once it has shown everything for the first time."""
    seen = watch(page)
    page.goto(url)
    wait_open(page)
    return seen


def wait_open(page: Page) -> None:
    page.wait_for_selector("main[aria-busy=false]", timeout=WAIT_MS)


def value(page: Page, name: str) -> float:
    """The figure behind what an element shows; nan where it shows none."""
    return float(page.locator(f"#{name}").get_attribute("data-value") or "nan")


def wait_for_value(page: Page, name: str, expected: float) -> None:
    script = "([id, value]) => Number(document.getElementById(id)?.dataset.value) === value"
    page.wait_for_function(script, arg=[name, expected], timeout=WAIT_MS)


def wait_for_text(page: Page, selector: str, text: str) -> None:
    script = "([css, text]) => document.querySelector(css)?.textContent.includes(text)"
    page.wait_for_function(script, arg=[selector, text], timeout=WAIT_MS)


def violations(page: Page) -> list[tuple[Any, list[Any]]]:
    """What axe-core finds: its rules, and the elements that break them."""
    found = Axe().run(page).response["violations"]
    return [(item["id"], [node["html"] for node in item["nodes"]][:3]) for item in found]
