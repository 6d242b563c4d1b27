"""Whether one long prompt holds up everybody's streams: the gateway alone, over HTTP.

    python -m benchmarks.gateway [--seconds N] [--output FILE]

Workload: streams of a fake worker that emits a token every 10 ms for each, while chats of some
30,000 tokens are sent one after another, each different, so that each is tokenized and hashed in
full. The tokenizer is the demo model's. The server has a process of its own; the client here shares
the machine with it. The gap is the time between two chunks of one stream as the client sees them;
figures with no long chat in flight stand beside those with.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from benchmarks.report import print_table, save
from benchmarks.texts import system_prompt
from cache_store.block_hash import HASH_VERSION
from model_worker.protocol import ModelCard
from service.app import create_app, uvicorn_config
from service.config import GatewayConfig
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry

TOKEN_INTERVAL_S = 0.010
LONG_CHAT_WORDS = 28_500  # some 30,000 tokens
STREAM_COUNTS = (8, 32)
GOAL_MS = 50.0


def demo_card() -> ModelCard:
    """The demo model's tokenizer, and numbers that only have to be plausible."""
    from model_worker.loader import resolve_model
    from model_worker.loader.tokenizer_files import read_tokenizer_files

    return ModelCard(
        model="demo",
        served_model_names=("demo",),
        fingerprint="benchmark",
        block_size=32,
        hash_version=HASH_VERSION,
        max_model_len=131_072,
        vocab_size=49_152,
        eos_token_ids=(2,),
        tokenizer_files=read_tokenizer_files(resolve_model("demo").folder),
        kv_bytes_per_token=46_080,
        num_blocks=4096,
        dtype="float32",
        device="cpu",
    )


def serve(card: ModelCard, port: int) -> None:
    """The child process: a gateway over a fake worker that says one word without end."""
    worker = FakeWorker(card, lambda _request: cycle((500, 600, 700)), TOKEN_INTERVAL_S)
    config = GatewayConfig(port=port, log_level="warning")
    app = create_app(config, WorkerRegistry([worker]))
    uvicorn.Server(uvicorn_config(app, config)).run()


class Client:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=120, limits=limits)
        self.gaps: list[float] = []
        self.num_long = 0

    async def wait_ready(self) -> None:
        for _ in range(600):
            try:
                if (await self._http.get(f"{self._url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise RuntimeError("the gateway is not ready")

    async def stream(self, until: float) -> None:
        body = {**self._body("Tell me a story."), "stream": True, "max_tokens": 100_000}
        last = None
        async with self._http.stream("POST", self._path(), json=body) as response:
            async for line in response.aiter_lines():
                now = time.perf_counter()
                if not line.startswith("data: {"):
                    continue
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                if now > until:
                    return

    async def long_chats(self, until: float, seed: int) -> None:
        numbers = random.Random(seed)
        while time.perf_counter() < until:
            text = system_prompt(LONG_CHAT_WORDS, numbers.randrange(2**31))
            response = await self._http.post(
                self._path(), json={**self._body(text), "max_tokens": 1}
            )
            response.raise_for_status()
            assert response.json()["usage"]["prompt_tokens"] > 28_000
            self.num_long += 1

    async def close(self) -> None:
        await self._http.aclose()

    def _path(self) -> str:
        return f"{self._url}/v1/chat/completions"

    def _body(self, text: str) -> dict[str, Any]:
        return {"model": "demo", "messages": [{"role": "user", "content": text}]}


async def measure(port: int, num_streams: int, seconds: float, with_long: bool) -> dict[str, Any]:
    client = Client(port)
    await client.wait_ready()
    until = time.perf_counter() + seconds
    tasks = [client.stream(until) for _ in range(num_streams)]
    if with_long:
        tasks.append(client.long_chats(until, num_streams))
    await asyncio.gather(*tasks)
    await client.close()
    gaps = sorted(client.gaps)
    return {
        "streams": num_streams,
        "long_chats": client.num_long,
        "median_ms": round(gaps[len(gaps) // 2] * 1000, 2),
        "p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1000, 2),
        "max_ms": round(gaps[-1] * 1000, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(demo_card(), port))
    child.start()
    try:
        results = [
            asyncio.run(measure(port, count, arguments.seconds, with_long))
            for count in STREAM_COUNTS
            for with_long in (False, True)
        ]
    finally:
        child.terminate()
        child.join()
    print_table([(*row.values(), GOAL_MS) for row in results], (*results[0], "p99 goal"))
    save("gateway", f"a token per {TOKEN_INTERVAL_S * 1000:.0f} ms", results, arguments.output)


if __name__ == "__main__":
    main()
