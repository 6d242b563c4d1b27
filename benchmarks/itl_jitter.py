"""Whether the gateway and the engine get in each other's way on the same cores.

    python -m benchmarks.itl_jitter [--rounds N] [--tokens N] [--output FILE]

Workload: one stream of a real server, first alone, then while chats of some 30,000 tokens, which
the gateway tokenizes in full and then refuses for their length, are sent one after another. The gap
is the time between two tokens as the client sees them; medians and 99th percentiles, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks.report import print_table, save
from benchmarks.server_kit import Server
from benchmarks.texts import system_prompt

LONG_CHAT_WORDS = 28_500


def gaps_of_stream(client: httpx.Client, server: Server, num_tokens: int, seed: int) -> list[float]:
    body = {
        "model": "demo",
        "prompt": system_prompt(60, seed),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        arrivals = [
            time.perf_counter()
            for line in response.iter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        ]
    # The last chunk comes with the one before it.
    return [later - earlier for earlier, later in pairwise(arrivals[:-1])]


class LongChats(threading.Thread):
    """Sends one after another until told to stop; counts the refusals."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/chat/completions"
        self._stopped = threading.Event()
        self.num_refused = 0

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopped.is_set():
                text = system_prompt(LONG_CHAT_WORDS, self.num_refused)
                body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
                response = client.post(self._url, json=body)
                assert response.status_code == 400, response.text
                self.num_refused += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gaps: dict[str, list[float]] = {"alone": [], "beside long chats": []}
    num_refused = 0
    with Server("--speculation", "off") as server, httpx.Client(timeout=120) as client:
        gaps_of_stream(client, server, 20, 999)
        for number in range(arguments.rounds):
            gaps["alone"] += gaps_of_stream(client, server, arguments.tokens, 2 * number)
            chats = LongChats(server)
            chats.start()
            try:
                gaps["beside long chats"] += gaps_of_stream(
                    client, server, arguments.tokens, 2 * number + 1
                )
            finally:
                chats.stop()
                num_refused += chats.num_refused
    results = {
        name: {
            "gaps": len(values),
            "median_ms": round(statistics.median(values) * 1e3, 2),
            "p99_ms": round(statistics.quantiles(values, n=100)[98] * 1e3, 2),
        }
        for name, values in gaps.items()
    }
    print_table([(name, *row.values()) for name, row in results.items()],
                ("stream", "gaps", "median ms", "p99 ms"))  # fmt: skip
    workload = (__doc__ or "").split("Workload: ")[1].strip()
    save("itl_jitter", workload, {**results, "long_chats": num_refused}, arguments.output)


if __name__ == "__main__":
    main()
