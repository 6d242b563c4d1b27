"""Several workers behind a gateway: requests go where their prompt is; workers come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

from cache_store.events import BlockStored, Tier
from cache_store.metadata.base import WorkerRecord
from model_worker.announcer import Announcer
from service.app import create_app, gateway_in
from service.config import GatewayConfig
from service.gateway import Gateway
from service.locator import chunk_hashes
from service.workers.base import WorkerState
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import make_card
from tests.redis_kit import running_server
from tests.worker_rigs import RemoteRig

PROMPT = [5 + n % 100 for n in range(600)]


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig, *workers: FakeWorker
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    app = create_app(config, WorkerRegistry(workers))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
    ):
        yield gateway_in(app), client


async def until(condition: Callable[[], object], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


def fake_workers(*names: str) -> list[FakeWorker]:
    return [FakeWorker(make_card(), lambda request: (5, 6), worker_id=name) for name in names]


def holds(worker: FakeWorker, prompt: list[int], cache_salt: str = "") -> None:
    hashes = chunk_hashes(make_card(), np.asarray(prompt, dtype=np.int32), cache_salt)
    worker.tell(BlockStored(Tier.DEVICE, hashes))


async def complete(client: httpx.AsyncClient, **fields: object) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


async def test_a_request_goes_to_the_worker_that_holds_its_prompt() -> None:
    workers = fake_workers("a", "b", "c")
    config = GatewayConfig(workers=("ipc:///a", "ipc:///b", "ipc:///c"))
    async with running_gateway(config, *workers) as (gateway, client):
        await until(lambda: not gateway.unready_reason)
        await complete(client)
        assert workers[0].stats.generated_tokens_total == 2  # none holds it: the first by name
        holds(workers[1], PROMPT[:256])
        holds(workers[2], PROMPT)
        async with asyncio.timeout(5):
            while not await gateway.metadata.workers(make_card().fingerprint):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await complete(client)
        assert workers[2].stats.generated_tokens_total == 2
        await complete(client, cache_salt="another wall")
        assert workers[0].stats.generated_tokens_total == 4
        metrics = (await client.get("/metrics")).text
        assert 'headstart_routed_requests_total{reason="longest_prefix"} 1.0' in metrics
        assert 'headstart_routed_requests_total{reason="least_loaded"} 2.0' in metrics
        assert 'headstart_location_lookups_total{outcome="found"} 1.0' in metrics
        assert 'headstart_location_lookups_total{outcome="none"} 2.0' in metrics


async def test_a_gateway_with_its_own_child_tells_and_asks_nothing() -> None:
    (worker,) = fake_workers("local")
    async with running_gateway(GatewayConfig(), worker) as (gateway, client):
        await until(lambda: not gateway.unready_reason)
        holds(worker, PROMPT)
        await complete(client)
        assert list(await gateway.metadata.all_workers()) == []


async def test_health_says_when_workers_cannot_be_looked_for() -> None:
    config = GatewayConfig(redis_url="redis://127.0.0.1:1", finds_workers=True)
    async with running_gateway(config) as (_, client):
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["message"] == (
            "Not ready: no worker is known; the metadata store, where workers are found, is out of "
            "reach."
        )


async def test_workers_are_found_through_redis_while_the_gateway_runs(tmp_path: Path) -> None:
    rigs = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        rigs.append(RemoteRig(folder))
    with running_server("redis", tmp_path) as server:
        config = GatewayConfig(
            redis_url=server.url,
            finds_workers=True,
            link_secret_file=rigs[0].config.link_secret_file,
        )
        announcers = []
        async with running_gateway(config) as (gateway, client):
            assert "no worker is known" in (await client.get("/health")).text
            for name, rig in zip(("first", "second"), rigs, strict=True):
                await rig.revive()
                record = WorkerRecord(
                    worker_id=name,
                    epoch=time.time_ns(),
                    endpoint=rig.config.endpoint,
                    fingerprint="f" * 32,
                )
                announcers.append(Announcer(server.url, record, renew_s=0.1))
                announcers[-1].start()
            registry = gateway.registry
            await until(lambda: len(registry.ready_workers()) == 2)
            assert {worker.worker_id for worker in registry.workers} == {"first", "second"}
            await rigs[0].kill()
            await asyncio.to_thread(announcers[0].close)
            await until(lambda: [w.worker_id for w in registry.workers] == ["second"])
            server.kill()
            await asyncio.to_thread(announcers[1].close)
            await asyncio.sleep(1.5)  # nobody lists it, and nobody could
            assert [worker.state for worker in registry.workers] == [WorkerState.READY]
        for rig in rigs:
            await rig.close()
