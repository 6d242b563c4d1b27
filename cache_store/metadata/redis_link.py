"""The way to one Redis: each call answered or failed within a bounded time.

Owns the connections, the time limit, the breaker with the probe that closes it, and the mapping of
every failure to MetadataError. Messages carry the server's address and the kind of failure, never
its text: a server quotes what it was sent. Knows nothing of what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cache_store.metadata.base import MetadataError
from cache_store.metadata.breaker import Breaker
from cache_store.metadata.keys import KEY_PREFIX
from cache_store.metadata.redis_url import RedisUrl, parse_redis_url

__all__ = ["ForeignDataError", "RedisLink"]

_log = logging.getLogger("headstart.metadata")
_MAX_CONNECTIONS = 16
_PROBE_LIFETIME_MS = 10_000
_CODE = re.compile(r"[A-Z]{2,20}\b")
_T = TypeVar("_T")


class ForeignDataError(MetadataError):
    """What lies under one of our keys is of another type."""


class RedisLink:
    """``timeout_s`` bounds each call, connecting included; the breaker opens after
    ``max_failures`` in a row, and is then tried every ``probe_s`` seconds. Raises ValueError for a
    URL that is none."""

    def __init__(
        self, url: str, *, timeout_s: float = 0.5, max_failures: int = 2, probe_s: float = 0.5
    ) -> None:
        self._url = parse_redis_url(url)
        self._timeout_s = timeout_s
        self._probe_s = probe_s
        # Any: the library leaves execute_command untyped.
        self._client: Any = _client(self._url, timeout_s)
        self._scripts: dict[str, Any] = {}
        self.breaker = Breaker(max_failures)
        self.num_calls = 0
        self.num_failures = 0
        self._opened = asyncio.Event()
        self._recovery_listeners: list[Callable[[], Awaitable[None]]] = []
        self._prober: asyncio.Task[None] | None = None
        self._has_checked_policy = False

    def __repr__(self) -> str:
        return f"RedisLink({self._url.address})"

    @property
    def address(self) -> str:
        return self._url.address

    def on_recovery(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Await ``listener`` each time the server answers again."""
        self._recovery_listeners.append(listener)

    async def start(self) -> None:
        """Returns when the server has answered, or once the breaker is open: by the same count of
        failures as later, so that one late answer is no outage at start either."""
        while not self.breaker.is_open:
            failure = await self._probe()
            if not failure:
                self.breaker.succeed()
                await self._check_policy()
                break
            if self.breaker.fail():
                self._note_open(failure)
        self._prober = asyncio.create_task(self._probe_while_open())

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        with contextlib.suppress(Exception):  # a server that is gone needs no goodbye
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose(close_connection_pool=True)

    async def command(self, *arguments: bytes | str | int | float) -> Any:
        return await self.call(lambda client: client.execute_command(*arguments))

    async def script(self, text: str, *arguments: bytes | str | int) -> Any:
        """Run a Lua program, with the prefix of all keys before its arguments."""
        script = self._scripts.get(text)
        if script is None:
            script = self._scripts[text] = self._client.register_script(text)
        return await self.call(lambda _: script(args=(KEY_PREFIX, *arguments)))

    async def call(self, action: Callable[[Any], Awaitable[_T]]) -> _T:
        """The result of ``action``. Raises MetadataError, at once while the breaker is open."""
        self.num_calls += 1
        if self.breaker.is_open:
            self.num_failures += 1
            raise MetadataError(f"Redis at {self.address} is out of reach")
        try:
            result = await self._bounded(action)
        except Exception as error:
            self.num_failures += 1
            failure = _failure(error)
            if _is_foreign(error):
                raise ForeignDataError(f"Redis at {self.address}: {failure}") from None
            if self.breaker.fail():
                self._note_open(failure)
            raise MetadataError(f"Redis at {self.address}: {failure}") from None
        self.breaker.succeed()
        return result

    async def _bounded(self, action: Callable[[Any], Awaitable[_T]]) -> _T:
        async with asyncio.timeout(self._timeout_s):
            return await action(self._client)

    # ------------------------------------------------------------ breaker

    def _note_open(self, failure: str) -> None:
        _log.warning("Redis at %s is out of reach (%s): going on without it", self.address, failure)
        self._opened.set()

    async def _probe_while_open(self) -> None:
        while True:
            await self._opened.wait()
            await asyncio.sleep(self._probe_s)
            if await self._probe():
                continue
            seconds = self.breaker.close()
            self._opened.clear()
            _log.info("Redis at %s answers again after %.1f s", self.address, seconds)
            await self._check_policy()
            for listener in self._recovery_listeners:
                await self._tell(listener)

    async def _tell(self, listener: Callable[[], Awaitable[None]]) -> None:
        try:
            await listener()
        except Exception:  # the probe has to go on
            _log.exception("a listener to the recovery of Redis failed")

    async def _probe(self) -> str:
        """Empty if the server takes a write, else why not. One that is full, read-only or loading
        answers a PING, and is of no use."""
        try:
            await self._bounded(
                lambda client: client.execute_command(
                    "SET", f"{KEY_PREFIX}probe", "1", "PX", _PROBE_LIFETIME_MS
                )
            )
        except Exception as error:
            return _failure(error)
        return ""

    async def _check_policy(self) -> None:
        """Warn once where sessions could be evicted, or where that cannot be found out."""
        if self._has_checked_policy:
            return
        self._has_checked_policy = True
        try:
            memory = await self._bounded(lambda client: client.execute_command("INFO", "memory"))
            policy = str(memory["maxmemory_policy"])
        except Exception as error:
            _log.warning(
                "Redis at %s does not tell its maxmemory-policy (%s), so it could not be checked; "
                "sessions are safe only with noeviction",
                self.address,
                _failure(error),
            )
            return
        if policy != "noeviction":
            _log.warning(
                "Redis at %s has maxmemory-policy %s: it may drop sessions when it is full; "
                "set noeviction",
                self.address,
                policy,
            )


def _client(url: RedisUrl, timeout_s: float) -> Redis:
    options = dict(url.options)
    if "path" in options:
        options["connection_class"] = UnixDomainSocketConnection
    elif url.is_encrypted:
        options["connection_class"] = SSLConnection
    pool = BlockingConnectionPool(
        max_connections=_MAX_CONNECTIONS,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),  # the breaker decides, within the time limit
        protocol=2,
        **options,
    )
    return Redis.from_pool(pool)


def _is_foreign(error: Exception) -> bool:
    return isinstance(error, redis_errors.ResponseError) and _code(error) == "WRONGTYPE"


def _failure(error: Exception) -> str:
    """The kind of a failure, without anything that the server or the network said."""
    if isinstance(error, TimeoutError | redis_errors.TimeoutError):
        return "no answer in time"
    if isinstance(error, redis_errors.AuthenticationError):
        return "it refuses the password"
    if isinstance(error, redis_errors.ResponseError):
        return f"it answers {_code(error)}"
    if isinstance(error, redis_errors.ConnectionError | OSError):
        return "no connection"
    return f"it fails with {type(error).__name__}"


def _code(error: redis_errors.ResponseError) -> str:
    """The server's word for an error, such as OOM or READONLY."""
    match = _CODE.match(error.status_code or str(error))
    return match[0] if match else "an error"
