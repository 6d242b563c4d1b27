"""Examples of the documentation, to be run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx

__all__ = ["BASE_URL", "curl_commands", "example", "run_curl"]

BASE_URL = "http://127.0.0.1:8000"
_DOCS = Path(__file__).parent.parent / "docs"


def example(page: str, language: str, section: str = "") -> str:
    """The first one of ``language`` in the page, or in its section of that title."""
    text = (_DOCS / page).read_text()
    if section:
        text = text.split(f"## {section}\n")[1].split("\n## ")[0]
    match = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert match
    return match[1]


def curl_commands(text: str) -> list[list[str]]:
    """The words of each."""
    bare = re.sub(r"^#.*$|\\\n", "", text, flags=re.M)
    return [shlex.split(f"curl {line}") for line in ("\n" + bare).split("\ncurl ") if line.strip()]


def run_curl(words: list[str], base_url: str) -> httpx.Response:
    """As curl would: a POST if it is given data."""
    method, url, data = "GET", "", ""
    headers: dict[str, str] = {}
    rest = iter(words)
    assert next(rest) == "curl"
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, text = next(rest).partition(": ")
            headers[name] = text
        elif word == "-d":
            data = next(rest)
            method = "POST"
        elif word != "-s":
            assert not url, word
            url = word.replace(BASE_URL, base_url)
    assert url.startswith(base_url)
    return httpx.request(method, url, headers=headers, content=data, verify=False, timeout=20.0)
