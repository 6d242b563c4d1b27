"""The pictures of docs/dashboard.md: `python -m tests.dashboard_pictures` makes them anew.

Owns what is pictured: a day at the library (tests/day_kit.py) on the demo model, before its breaker
is fixed and after. Takes some minutes on a small machine.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.browser_kit import FLAGS, wait_open
from tests.day_kit import RULES, Day
from tests.server_kit import RealServer

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MAX_BYTES = 200_000
SERVER = (
    *("--model", "demo", "--block-size", "16"),
    *("--kv-cache-memory", "160MiB", "--host-cache-size", "320MiB", "--max-num-seqs", "8"),
    *("--max-model-len", "3072"),
)
NUM_REQUESTS = 48


def picture(
    browser: Browser, url: str, name: str, height: int, *, width: int = 1280, scheme: str = "light"
) -> None:
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page.goto(url)
    wait_open(page)
    page.wait_for_timeout(3_000)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    file = IMAGES / name
    image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
    assert file.stat().st_size < MAX_BYTES, f"{file}: {file.stat().st_size} bytes"


@contextlib.contextmanager
def going_on(day: Day, *, is_fixed: bool) -> Iterator[None]:
    """Somebody asks while pictures are taken."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            day.play(1, is_fixed=is_fixed)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join()


@contextlib.contextmanager
def demo_server() -> Iterator[RealServer]:
    """One that may take its time to start."""
    server = RealServer(*SERVER)
    try:
        server.wait_ready(1_200.0)
        yield server
    finally:
        server.stop()


def main() -> None:
    chromium = shutil.which("chromium")
    with (
        demo_server() as server,
        httpx.Client(base_url=server.url, timeout=300.0, verify=False) as http,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        day = Day(http, "demo", RULES * 3)
        began = time.monotonic()
        day.play(NUM_REQUESTS, is_fixed=False)
        with going_on(day, is_fixed=False):
            picture(browser, server.url, "dashboard-before.png", 1400)
        day.play(NUM_REQUESTS, is_fixed=True)
        with going_on(day, is_fixed=True):
            picture(browser, server.url, "dashboard-after.png", 1400)
            picture(browser, server.url, "dashboard.png", 1000)
            picture(browser, server.url, "dashboard-phone.png", 780, width=390, scheme="dark")
        browser.close()
        print(f"{time.monotonic() - began:.0f} s of a day; pictures are in {IMAGES}")


if __name__ == "__main__":
    main()
