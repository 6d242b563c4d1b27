"""OpenAI's client for JavaScript, in a Node process, over real HTTP against a real server.

`make test` installs Node (a wheel) and the client (tests/node, at the versions of its lock file).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.target import Target, wait_until_idle

FOLDER = Path(__file__).parent / "node"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def told(tiny_target: Target) -> dict[str, Any]:
    """What the program prints of its calls."""
    node = shutil.which("node", path=str(BIN))
    if node is None or not (FOLDER / "node_modules" / "openai").is_dir():
        reason = "the Node client is not installed: make test does"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and in CI it must run")
        pytest.skip(reason)
    program = [node, str(FOLDER / "openai_client.mjs"), tiny_target.url, tiny_target.model]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_plain_and_streamed_answers_are_the_same(told: dict[str, Any], tiny_target: Target) -> None:
    assert told["models"] == [tiny_target.model]
    assert told["plain"]
    assert told["plain"] == told["streamed"] == told["final"]
    assert told["usage"]["completion_tokens"] == 8
    assert told["usage"]["prompt_tokens"] == told["prompt_tokens"]


def test_cached_tokens_are_told(told: dict[str, Any]) -> None:
    assert told["cached"] == told["prompt_tokens"] - 1


def test_forms_and_tools_are_kept_to(told: dict[str, Any]) -> None:
    assert json.loads(told["structured"])["colour"] in ("red", "green")
    assert told["called"]["name"] == "paint"
    assert json.loads(told["called"]["arguments"])["colour"] in ("red", "green")


def test_responses_go_on_and_are_streamed(told: dict[str, Any]) -> None:
    assert told["second"]["previous"]
    assert told["second"]["input"] > told["first"]["input"]
    assert told["events"][0] == "response.created"
    assert told["events"][-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in told["events"]


def test_a_refusal_is_an_exception_of_the_clients(told: dict[str, Any]) -> None:
    assert told["refused"] == {"status": 400, "param": "temperature", "kind": "BadRequestError"}


def test_an_aborted_stream_leaves_nothing(told: dict[str, Any], tiny_target: Target) -> None:
    wait_until_idle(tiny_target)
