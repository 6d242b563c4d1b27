"""The examples of docs/sessions.md, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx

from tests.gateway_kit import make_card
from tests.session_kit import talking

PAGE = (Path(__file__).parent.parent / "docs" / "sessions.md").read_text()
BASE_URL = "http://127.0.0.1:8000"


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert match
    return match[1]


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


def test_the_lines_for_curl() -> None:
    answers = ("Lisbon.", "The Tagus.", "A thousand kilometres.", "The Douro.")
    with talking(*answers, card=make_card(names=("demo",))) as talk:
        bare = re.sub(r"^#.*$|\\\n", "", block("sh"), flags=re.M)
        lines = bare.split("\ncurl ")
        commands = [shlex.split(f"curl {line}") for line in lines if line.strip()]
        responses = [run_curl(command, talk.served.base_url) for command in commands]
        statuses = [response.status_code for response in responses]
        assert statuses == [200, 200, 201, 200, 200, 200, 200]
        histories = [response.json().get("history") for response in responses]
        assert histories == ["exact", "exact", None, "exact", "retokenized", None, None]
        assert responses[5].json()["id"] == "trip"
        assert responses[6].json()["deleted"] is True


def test_the_lines_of_python() -> None:
    with talking("Lisbon.", "The Tagus.", card=make_card(names=("demo",))) as talk:
        code = block("python").replace(BASE_URL, talk.served.base_url)
        names: dict[str, Any] = {}
        exec(compile(code, "docs/sessions.md", "exec"), names)
        names["client"].close()
        assert names["histories"] == ["exact"] * 5 + ["retokenized"]
        assert {request.retention_s for request in talk.requests} == {600.0, 0.0}
        shown = talk.client.get("/v1/sessions").json()
        assert {entry["id"] for entry in shown["data"]} == {"walk", "walk-2"}
