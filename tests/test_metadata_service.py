"""A gateway and its metadata store: which one it has, and what it says while that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.metadata.resilient import ResilientMetadataStore
from service.app import create_app, gateway_in
from service.config import ConfigError, GatewayConfig
from service.gateway import Gateway
from service.metadata import make_metadata_store
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import make_card
from tests.metadata_kit import make_session
from tests.redis_kit import Server, running_server


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig,
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    app = create_app(config, WorkerRegistry([FakeWorker(make_card(), lambda request: (1, 2))]))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        gateway = gateway_in(app)
        while gateway.unready_reason:
            await asyncio.sleep(0.01)
        yield gateway, client


async def test_health_says_degraded_until_redis_answers_again(tmp_path: Path) -> None:
    server = Server("redis", tmp_path)
    try:
        async with running_gateway(GatewayConfig(redis_url=server.url)) as (gateway, client):
            health = await client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            assert health.json()["reason"] == (
                "the metadata store is out of reach; requests go on without it"
            )
            assert "headstart_metadata_degraded 1.0" in (await client.get("/metrics")).text
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert await gateway.metadata.put_session(make_session(), 0)
            server.start()
            async with asyncio.timeout(10):
                while gateway.metadata.stats.num_kept:
                    await asyncio.sleep(0.01)
            assert (await client.get("/health")).json() == {"status": "ok"}
            metrics = (await client.get("/metrics")).text
            assert "headstart_metadata_degraded 0.0" in metrics
            assert await gateway.metadata.num_sessions() == 1
    finally:
        server.kill()


async def test_two_gateways_share_their_sessions_through_redis(tmp_path: Path) -> None:
    with running_server("redis", tmp_path) as server:
        config = GatewayConfig(redis_url=server.url)
        async with running_gateway(config) as (first, _), running_gateway(config) as (second, _):
            assert await first.metadata.put_session(make_session(history=b"words"), 0)
            found = await second.metadata.get_session("t1", "s1")
            assert found is not None
            assert found.history == b"words"
            assert not await second.metadata.put_session(make_session(), 0)


async def test_embedded_sessions_outlast_the_gateway_where_there_is_a_folder(
    tmp_path: Path,
) -> None:
    config = GatewayConfig(sessions_dir=str(tmp_path))
    async with running_gateway(config) as (gateway, _):
        assert await gateway.metadata.put_session(make_session(), 0)
    async with running_gateway(config) as (gateway, _):
        assert await gateway.metadata.get_session("t1", "s1") is not None
    async with running_gateway(GatewayConfig()) as (gateway, client):
        assert await gateway.metadata.get_session("t1", "s1") is None
        assert (await client.get("/health")).json() == {"status": "ok"}


def test_the_store_is_chosen_by_the_url() -> None:
    assert isinstance(make_metadata_store(GatewayConfig()), MemoryMetadataStore)
    config = GatewayConfig(redis_url="redis://127.0.0.1:1")
    assert isinstance(make_metadata_store(config), ResilientMetadataStore)


def test_a_key_file_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    config = GatewayConfig(encryption_key_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"^--encryption-key-file: the key file .* No such file"):
        make_metadata_store(config)
