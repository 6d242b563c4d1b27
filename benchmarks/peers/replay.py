"""A slice of tau-bench's recorded airline chats, sent to a server as it was recorded.

Owns which chats and how they overlap: four at once, each sends its next request when the answer to
the last has come (what the recorded agent said goes into the history, so that every server gets
the same prompts). Think times are left out; the file has them, and they would measure waiting.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.client import Answer, CompletionClient
from benchmarks.traces import DATA

FILE = "replay_tau_airline_sessions.jsonl.gz"
NUM_CHATS = 4
NUM_REQUESTS = 8  # of each chat, from its first on
ANSWER_TOKENS = 16


def chats(seed: int) -> list[list[str]]:
    """The prompts of NUM_CHATS chats; other seeds have other chats, as far as there are any."""
    with gzip.open(DATA / FILE, "rt", encoding="utf-8") as lines:
        sessions = [json.loads(line) for line in lines]
    long_ones = [s for s in sessions if len(s["requests"]) >= NUM_REQUESTS]
    first = seed * NUM_CHATS % (len(long_ones) - NUM_CHATS)
    return [list(_prompts(session)) for session in long_ones[first : first + NUM_CHATS]]


def _prompts(session: dict[str, Any]) -> Iterator[str]:
    for _at_s, count in session["requests"][:NUM_REQUESTS]:
        yield "\n\n".join(_text(m) for m in session["messages"][:count]) + "\n\nassistant:"


def _text(message: dict[str, Any]) -> str:
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        text += json.dumps(call["function"], sort_keys=True)
    return f"{message['role']}: {text}"


async def replay_turn(client: CompletionClient, seed: int) -> dict[str, list[float]]:
    async def one_chat(prompts: list[str]) -> list[Answer]:
        return [await client.complete(prompt, ANSWER_TOKENS) for prompt in prompts]

    started = time.perf_counter()
    histories = await asyncio.gather(*(one_chat(prompts) for prompts in chats(seed)))
    answers = [answer for history in histories for answer in history]
    seconds = time.perf_counter() - started
    return {
        "ttft_s": [answer.ttft_s for answer in answers],
        "requests_per_s": [len(answers) / seconds],
        "prompt_tokens": [float(answer.prompt_tokens) for answer in answers],
        "cached_tokens": [float(a.cached_tokens) for a in answers if a.cached_tokens is not None],
    }
