"""Tells the metadata store that this worker is there, for gateways to find it.

Owns the lease and the thread that renews it, and the address that others can dial. A store that is
out of reach is tried again; the worker serves regardless. Knows nothing of requests or of the
cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from urllib.parse import urlsplit

import msgspec

from cache_store.metadata.base import MetadataError, WorkerRecord
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink

__all__ = ["Announcer", "dialable"]

LEASE_S = 15.0
RENEW_S = 5.0
_CLOSE_S = 2.0
_ANY_PORT = 9  # of no consequence: nothing is sent

_log = logging.getLogger("model_worker")


class Announcer:
    """``worker.endpoint`` is where the worker listens. Raises ValueError for a URL that is none."""

    def __init__(self, redis_url: str, worker: WorkerRecord, *, renew_s: float = RENEW_S) -> None:
        self._link_url = redis_url
        self._worker = worker
        self._renew_s = renew_s
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Withdraws the announcement, if the store answers. Once, after :meth:`start`."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._announce())
        except Exception:  # the worker serves without being found
            _log.exception("announcing the worker failed")
        finally:
            self._loop.close()

    async def _announce(self) -> None:
        store = RedisMetadataStore(RedisLink(self._link_url))
        await store.start()
        try:
            while not self._stopping.is_set():
                endpoint = dialable(self._worker.endpoint, self._link_url)
                record = msgspec.structs.replace(self._worker, endpoint=endpoint)
                with contextlib.suppress(MetadataError):  # said once by the link
                    await store.renew_worker(record, LEASE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._renew_s)
            with contextlib.suppress(MetadataError):
                await store.remove_worker(self._worker.worker_id)
        finally:
            await store.close()


def dialable(endpoint: str, redis_url: str) -> str:
    """``endpoint`` with an address in it: one that listens on all of a machine's is given the one
    from which the machine reaches Redis, since gateways are found there too."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not _is_any(host):
        return endpoint
    address = _own_address(urlsplit(redis_url).hostname)
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _is_any(host: str) -> bool:
    try:
        return host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False  # a name


def _own_address(peer: str | None) -> str:
    """The local end of the way to ``peer``; the machine's name where that cannot be told."""
    with contextlib.suppress(OSError):
        if peer is not None:
            family, kind, protocol, _, address = socket.getaddrinfo(
                peer, _ANY_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return socket.gethostname()
