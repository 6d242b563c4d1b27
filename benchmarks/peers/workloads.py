"""What is asked of each server: one turn of each workload, and the samples that it gives.

Owns lengths and orders of requests. A turn asks the same of every server for the same seed, with
prompts that no other seed has, so that the first of a turn finds nothing stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.client import Answer, CompletionClient
from benchmarks.peers.prompts import question, shared_prompt
from benchmarks.peers.replay import replay_turn
from benchmarks.peers.settings import TIGHT, WIDE, ServerShape

Samples = dict[str, list[float]]

NUM_USERS = 8
SHORT_ANSWER = 8
LONG_ANSWER = 64
NUM_WARM = 3
SESSIONS, SESSION_WORDS, SESSION_RETURNS, TURN_WORDS, TURN_ANSWER = 4, 800, 2, 70, 16
ONE_OFF_PROMPTS, ONE_OFF_WORDS, ONE_OFF_ANSWER = 4, 400, 16
LONG_WORDS = {"long_4k": 3_920, "long_8k": 7_540}  # some 4,050 and 7,800 tokens


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    shape: ServerShape
    num_runs: int  # unless told otherwise
    turn: Callable[[CompletionClient, int], Awaitable[Samples]]
    is_of_cache_off: bool = False  # what our servers without a cache are there for

    def asks(self, peer_name: str) -> bool:
        """Whether a peer takes part if nobody named the peers."""
        if peer_name.endswith("nodrafts"):
            return self.name == "shared_1"  # the one that is about decoding alone
        if self.is_of_cache_off:
            return peer_name.startswith("headstart")
        return not peer_name.endswith("nocache")


async def warm_up(client: CompletionClient) -> None:
    """Let a fresh server compile and allocate what it does on first use."""
    for seed in (-1, -2):
        prompt = shared_prompt(seed, 300)
        await client.complete(prompt, SHORT_ANSWER)
        await client.complete(prompt + question(0), SHORT_ANSWER)
    await _together(client, [shared_prompt(-3, 20) + question(n) for n in range(4)], SHORT_ANSWER)


async def shared_1(client: CompletionClient, seed: int) -> Samples:
    """One user: the prompt new, then stored, then a long answer alone."""
    prefix = shared_prompt(seed)
    cold = await client.complete(prefix + question(0), SHORT_ANSWER)
    warm = [await client.complete(prefix + question(n + 1), SHORT_ANSWER) for n in range(NUM_WARM)]
    long = await client.complete(prefix + question(NUM_WARM + 1), LONG_ANSWER)
    return {
        "cold_ttft_s": [cold.ttft_s],
        "warm_ttft_s": [answer.ttft_s for answer in (*warm, long)],
        "decode_tokens_per_s": [long.decode_tokens_per_s],
        **_sizes([cold, *warm, long]),
    }


async def shared_8(client: CompletionClient, seed: int) -> Samples:
    """Eight users at once: with a prompt that is new, then with it stored."""
    prefix = shared_prompt(1_000 + seed)
    cold = await _together(
        client, [prefix + question(n) for n in range(NUM_USERS)], LONG_ANSWER // 4
    )
    warm = await _together(
        client, [prefix + question(NUM_USERS + n) for n in range(NUM_USERS)], LONG_ANSWER
    )
    return {
        "cold_ttft_s": [answer.ttft_s for answer in cold],
        "cold_tokens_per_s": [_tokens_per_s(cold)],
        "ttft_s": [answer.ttft_s for answer in warm],
        "tokens_per_s": [_tokens_per_s(warm)],
        **_sizes([*cold, *warm]),
    }


async def sessions(client: CompletionClient, seed: int) -> Samples:
    """Chats that take turns, so that each returns after all others have spoken."""
    texts = [shared_prompt(10_000 + 100 * seed + n, SESSION_WORDS) for n in range(SESSIONS)]
    first: list[Answer] = []
    returned: list[Answer] = []
    started = 0.0
    for turn in range(SESSION_RETURNS + 1):
        if turn == 1:
            started = time.perf_counter()
        for number in range(SESSIONS):
            texts[number] += question(100 * turn + number)
            answer = await client.complete(texts[number], TURN_ANSWER)
            (returned if turn else first).append(answer)
            more = shared_prompt(20_000 + 100 * seed + 10 * turn + number, TURN_WORDS)
            texts[number] += f"{answer.text}\n\n{more}"
    seconds = time.perf_counter() - started
    return {
        "first_ttft_s": [answer.ttft_s for answer in first],
        "return_ttft_s": [answer.ttft_s for answer in returned],
        "requests_per_s": [len(returned) / seconds],
        **_sizes(returned),
    }


async def zero_reuse(client: CompletionClient, seed: int) -> Samples:
    """Prompts that share nothing, some at once."""
    prompts = [
        shared_prompt(30_000 + 100 * seed + n, ONE_OFF_WORDS) for n in range(ONE_OFF_PROMPTS)
    ]
    answers = await _together(client, prompts, ONE_OFF_ANSWER)
    num_tokens = sum(answer.prompt_tokens + answer.completion_tokens for answer in answers)
    return {
        "ttft_s": [answer.ttft_s for answer in answers],
        "all_tokens_per_s": [num_tokens / _duration_s(answers)],
        **_sizes(answers),
    }


def long_context(name: str) -> Callable[[CompletionClient, int], Awaitable[Samples]]:
    async def turn(client: CompletionClient, seed: int) -> Samples:
        prefix = shared_prompt(40_000 + seed, LONG_WORDS[name])
        cold = await client.complete(prefix + question(0), SHORT_ANSWER)
        warm = [await client.complete(prefix + question(n), SHORT_ANSWER) for n in (1, 2)]
        long = await client.complete(prefix + question(3), LONG_ANSWER // 2)
        return {
            "cold_ttft_s": [cold.ttft_s],
            "warm_ttft_s": [answer.ttft_s for answer in (*warm, long)],
            "decode_tokens_per_s": [long.decode_tokens_per_s],
            **_sizes([cold, *warm, long]),
        }

    return turn


async def _together(
    client: CompletionClient, prompts: Sequence[str], max_tokens: int
) -> list[Answer]:
    return await asyncio.gather(*(client.complete(prompt, max_tokens) for prompt in prompts))


def _duration_s(answers: Sequence[Answer]) -> float:
    return max(a.last_s for a in answers) - min(a.started_s for a in answers)


def _tokens_per_s(answers: Sequence[Answer]) -> float:
    return sum(answer.completion_tokens for answer in answers) / _duration_s(answers)


def _sizes(answers: Sequence[Answer]) -> Samples:
    return {
        "prompt_tokens": [float(answer.prompt_tokens) for answer in answers],
        "cached_tokens": [
            float(answer.cached_tokens) for answer in answers if answer.cached_tokens is not None
        ],
    }


WORKLOADS = (
    Workload("shared_1", "Shared prompt, one user", WIDE, 4, shared_1),
    Workload("shared_8", "Shared prompt, eight users at once", WIDE, 2, shared_8),
    Workload("sessions", "Chats in turn, memory for all", WIDE, 2, sessions),
    Workload("sessions_beyond", "Chats in turn, memory for half", TIGHT, 2, sessions),
    Workload("zero_reuse", "Prompts that share nothing", WIDE, 5, zero_reuse, True),
    Workload("long_4k", "Prompt of 4,000 tokens", WIDE, 1, long_context("long_4k")),
    Workload("long_8k", "Prompt of 7,800 tokens", WIDE, 1, long_context("long_8k")),
    Workload("tau_replay", "Replay of tool-calling chats", WIDE, 1, replay_turn),
)
