"""A gateway on a real socket, in a thread, with fake workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from model_worker.protocol import AddRequest, ModelCard
from service.app import create_app, gateway_in, uvicorn_config
from service.config import GatewayConfig
from service.gateway import Gateway
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import MODEL_NAME, byte_ids_of, make_card

_T = TypeVar("_T")


def repeat(text: str) -> Callable[[AddRequest], Iterable[int]]:
    """A script that says ``text`` over and over, one token per byte."""
    ids = byte_ids_of(text)

    def script(request: AddRequest) -> Iterator[int]:
        while True:
            yield from ids

    return script


def say(text: str) -> Callable[[AddRequest], Iterable[int]]:
    """A script that says ``text`` once, one token per byte, and stops."""
    ids = byte_ids_of(text)
    return lambda request: ids


@dataclass
class Served:
    """A running server. ``workers`` may be told things by :meth:`call`."""

    base_url: str
    app: FastAPI
    workers: list[FakeWorker]
    loop: asyncio.AbstractEventLoop
    model: str = MODEL_NAME

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    @property
    def gateway(self) -> Gateway:
        return gateway_in(self.app)

    def client(self, **options: Any) -> httpx.Client:
        # Plain HTTP needs no certificates, and loading them takes longer than most tests.
        return httpx.Client(base_url=self.base_url, timeout=20.0, verify=False, **options)

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call on the server's event loop."""

        async def run() -> _T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10.0)


@contextlib.contextmanager
def serving(
    script: Callable[[AddRequest], Iterable[int]] | None = None,
    *,
    card: ModelCard | None = None,
    token_interval: float = 0.0,
    keepalive: float = 15.0,
    workers: list[FakeWorker] | None = None,
    prepare: Callable[[FakeWorker], None] = lambda worker: None,
    wait_ready: bool = True,
    max_num_seqs: int = 256,
    **settings: Any,
) -> Iterator[Served]:
    """A server on a free port of 127.0.0.1; ``settings`` are GatewayConfig's fields."""
    started: list[Served] = []
    failures: list[BaseException] = []
    is_up = threading.Event()
    servers: list[uvicorn.Server] = []
    config = GatewayConfig(**{"host": "127.0.0.1", "port": 0, **settings})
    listener = socket.create_server(("127.0.0.1", 0))

    async def main() -> None:
        fakes = workers or [
            FakeWorker(
                card or make_card(),
                script or repeat("one two three "),
                token_interval,
                max_num_seqs=max_num_seqs,
            )
        ]
        for fake in fakes:
            prepare(fake)
        app = create_app(config, WorkerRegistry(fakes), keepalive=keepalive)
        server = uvicorn.Server(uvicorn_config(app, config))
        servers.append(server)
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serve.done():
            await asyncio.sleep(0.005)
        while wait_ready and gateway_in(app).unready_reason and not serve.done():
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started.append(Served(url, app, list(fakes), asyncio.get_running_loop()))
        is_up.set()
        await serve

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            is_up.set()

    thread = threading.Thread(target=run, name="gateway-under-test")
    thread.start()
    is_up.wait(30.0)
    try:
        assert started, failures
        yield started[0]
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(15.0)
        listener.close()
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def routes_of(routes: object) -> list[APIRoute]:
    found: list[APIRoute] = []
    assert isinstance(routes, list)
    for route in routes:
        if isinstance(route, APIRoute):
            found.append(route)
        elif (inner := getattr(route, "original_router", None)) is not None:
            found += routes_of(inner.routes)
    return found


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a whole stream: decoded JSON, and "[DONE]" for the last."""
    events: list[Any] = []
    for line in response.text.split("\n\n"):
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry ``labels``."""
    total = 0.0
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"headstart_{name}" and labels.items() <= sample.labels.items():
                total += sample.value
    return total
