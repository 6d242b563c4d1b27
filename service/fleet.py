"""The workers of a gateway as a group: who joins and leaves, and which of them holds a prompt.

Owns the parts that bind the registry to the metadata store: discovery of workers that announce
themselves, the way of their cache events into the store, and the look-up of prompts there. They
are off in a gateway whose one worker is its own child. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_store.metadata.base import MetadataStore, WorkerRecord
from cache_store.shared_prefixes import SharedPrefixes
from model_worker.protocol import LinkError, read_link_secret
from service.config import GatewayConfig
from service.location_feed import LocationFeed
from service.locator import PrefixLocator
from service.routing import RoutingCollector
from service.workers.base import Worker
from service.workers.discovery import WorkerDiscovery
from service.workers.registry import WorkerRegistry
from service.workers.remote import RemoteWorker

__all__ = ["Fleet"]


class Fleet:
    """``threads`` hash prompts. Belongs to one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: WorkerRegistry,
        metadata: MetadataStore,
        threads: Executor,
    ) -> None:
        self._config = config
        self._registry = registry
        self._locator = PrefixLocator(metadata, threads)
        self._discovery = WorkerDiscovery(metadata, registry, self._connect)
        self._feed = LocationFeed(
            metadata, lambda: registry.workers, self._discovery.announces_itself
        )
        self._has_own_child = not config.workers and not config.finds_workers
        if not self._has_own_child:
            registry.add_event_listener(self._feed.take)

    def start(self) -> None:
        """After the metadata store and the registry."""
        if self._has_own_child:
            return
        self._feed.start()
        if self._config.finds_workers:
            self._discovery.start()

    async def close(self) -> None:
        """Ahead of the registry and the metadata store."""
        await self._discovery.close()
        await self._feed.close()
        await self._locator.close()

    async def locate(
        self, token_ids: NDArray[np.int32], cache_salt: str
    ) -> Mapping[tuple[str, int], int]:
        """Tokens held of a prompt (1-D), by worker id and epoch. Waits some 20 ms at most."""
        card = self._registry.card
        if card is None or self._has_own_child:
            return {}
        return await self._locator.locate(card, token_ids, cache_salt)

    def share_prefixes(self, shared: SharedPrefixes) -> None:
        """Prompts that begin with one of these are looked up as the workers keep them."""
        self._locator.shared = shared

    @property
    def shared_prefixes(self) -> SharedPrefixes | None:
        """Those that workers were told of; None before they were."""
        return self._locator.shared

    def collector(self, reasons: Mapping[str, int]) -> RoutingCollector:
        """``reasons`` counts why workers were chosen."""
        return RoutingCollector(reasons, self._locator.outcomes, lambda: self._feed.num_overflows)

    def _connect(self, record: WorkerRecord) -> Worker:
        file = self._config.link_secret_file
        try:
            secret = None if file is None else read_link_secret(Path(file))
            return RemoteWorker(record.endpoint, secret, worker_id=record.worker_id)
        except LinkError as error:
            raise ValueError(str(error)) from None
