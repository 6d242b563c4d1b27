"""A worker's announcement: made, renewed, withdrawn, and made again when Redis comes back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cache_store.metadata.base import WorkerRecord
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink
from model_worker.announcer import Announcer, dialable
from tests.metadata_kit import make_worker
from tests.redis_kit import PATIENCE_S, Server, running_server


async def listed(server: Server) -> Sequence[WorkerRecord]:
    store = RedisMetadataStore(RedisLink(server.url, timeout_s=PATIENCE_S))
    await store.start()
    try:
        return await store.all_workers()
    finally:
        await store.close()


def until_listed(server: Server, expected: Sequence[WorkerRecord]) -> None:
    deadline = time.monotonic() + 10
    while list(asyncio.run(listed(server))) != list(expected):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_is_announced_until_it_ends(tmp_path: Path) -> None:
    with running_server("redis", tmp_path) as server:
        announcer = Announcer(server.url, make_worker(), renew_s=0.05)
        announcer.start()
        until_listed(server, [make_worker()])
        announcer.close()
        assert list(asyncio.run(listed(server))) == []


def test_it_is_announced_again_after_redis_was_gone(tmp_path: Path) -> None:
    server = Server("redis", tmp_path)
    try:
        announcer = Announcer(server.url, make_worker(), renew_s=0.05)
        announcer.start()
        server.start()
        until_listed(server, [make_worker()])
        server.kill()
        server.start()
        until_listed(server, [make_worker()])
        server.kill()
        began = time.monotonic()
        announcer.close()
        assert time.monotonic() - began < 1.5
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://0.0.0.0:7000", "tcp://127.0.0.1:7000"),
        ("tcp://*:7000", "tcp://127.0.0.1:7000"),
        ("tcp://[::]:7000", "tcp://127.0.0.1:7000"),
        ("tcp://10.1.2.3:7000", "tcp://10.1.2.3:7000"),
        ("tcp://worker:7000", "tcp://worker:7000"),
        ("ipc:///run/w", "ipc:///run/w"),
    ],
)
def test_an_endpoint_on_every_address_is_given_one_that_can_be_dialled(
    endpoint: str, expected: str
) -> None:
    assert dialable(endpoint, "redis://:secret@127.0.0.1:6379/0") == expected


def test_without_a_way_to_redis_the_machines_name_is_given() -> None:
    name = socket.gethostname()
    assert dialable("tcp://0.0.0.0:7", "unix:///run/r.sock") == f"tcp://{name}:7"
