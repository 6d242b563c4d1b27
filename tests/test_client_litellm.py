"""litellm, which many routers and agents are built on, over real HTTP.

In a process of its own, as programs use it: at import it reads a table of models from the network
unless told otherwise, and it keeps sockets open for ever, which is not ours to hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gateway_kit import MODEL_NAME
from tests.session_kit import talking

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Cork"}}</tool_call>'
CITY = '{"name": "Cork"}'

PROGRAM = """
import asyncio, json, sys
import litellm

url, model = sys.argv[1:]
openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
anthropic = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none"}
ask = [{"role": "user", "content": "Sky?"}]
tool = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
told = {}

plain = litellm.completion(messages=ask, **openai)
told["plain"] = plain.choices[0].message.content
told["prompt_tokens"] = plain.usage.prompt_tokens
warm = litellm.completion(messages=ask, **openai)
told["cached"] = warm.usage.prompt_tokens_details.cached_tokens

chunks = litellm.completion(messages=ask, stream=True, **openai)
told["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

call = litellm.completion(messages=ask, tools=[tool], **openai).choices[0].message.tool_calls[0]
told["call"] = [call.function.name, json.loads(call.function.arguments)]

form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}
structured = litellm.completion(messages=ask, response_format=form, **openai)
told["structured"] = json.loads(structured.choices[0].message.content)

message = litellm.completion(messages=ask, max_tokens=20, **anthropic)
told["anthropic"] = message.choices[0].message.content

async def later():
    return (await litellm.acompletion(messages=ask, **openai)).choices[0].message.content
told["later"] = asyncio.run(later())

try:
    litellm.completion(messages=ask, temperature=9, **openai)
except litellm.BadRequestError as error:
    told["refused"] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    answers = ("Blue.", "Blue.", "Blue.", CALL, CITY, "Grey.", "Later.")
    with talking(*answers) as talk:
        program = [sys.executable, "-c", PROGRAM, talk.served.base_url, MODEL_NAME]
        offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            program, capture_output=True, text=True, timeout=120, check=False, env=offline
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_chats_streams_and_counts(told: dict[str, Any]) -> None:
    assert told["plain"] == told["streamed"] == "Blue."
    assert told["later"] == "Later."
    assert told["cached"] == told["prompt_tokens"] - 1


def test_it_calls_tools_and_reads_structured_answers(told: dict[str, Any]) -> None:
    assert told["call"] == ["weather", {"city": "Cork"}]
    assert told["structured"] == {"name": "Cork"}


def test_it_speaks_the_api_of_messages(told: dict[str, Any]) -> None:
    assert told["anthropic"] == "Grey."


def test_a_refusal_names_the_field(told: dict[str, Any]) -> None:
    assert "temperature" in told["refused"]
