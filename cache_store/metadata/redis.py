"""Metadata in Redis or Valkey, shared by all gateways and workers of a deployment.

Owns the form of the records there: workers under leases, one hash of chunks per worker, epoch and
model that lives as long as the worker's lease, sessions that live as long as their time. Knows
nothing of connections and breakers (RedisLink) and keeps nothing while Redis is out of reach
(ResilientMetadataStore).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from cache_store.cipher import Cipher
from cache_store.events import CacheEvent, Tier
from cache_store.metadata import scripts
from cache_store.metadata.base import BlockLocation, SessionRecord, WorkerRecord
from cache_store.metadata.chunk_changes import ChunkChanges, fold_events
from cache_store.metadata.keys import KEY_PREFIX, decode_part, encode_part, session_key
from cache_store.metadata.redis_link import ForeignDataError, RedisLink
from cache_store.metadata.session_codec import SealedSession, SessionCodec, UnreadableRecordError
from cache_store.metadata.stats import MetadataStats

__all__ = ["RedisMetadataStore", "new_write_id"]

_log = logging.getLogger("headstart.metadata")
_TIER_LETTERS = {Tier.DEVICE: b"d", Tier.HOST: b"h", Tier.DISK: b"s"}
_TIERS = {letter[0]: tier for tier, letter in _TIER_LETTERS.items()}
_CHUNKS_PER_COMMAND = 1024
_COMMANDS_PER_CALL = 8
_WRITE_ID_BYTES = 12


def new_write_id() -> bytes:
    """Names one write of a session, so that it is known again after its answer was lost."""
    return secrets.token_bytes(_WRITE_ID_BYTES)


class RedisMetadataStore:
    """``link`` is started and closed with the store. ``max_chunks`` bounds each worker's
    locations: beyond it chunks are forgotten at random, which shortens what is found."""

    def __init__(
        self, link: RedisLink, *, cipher: Cipher | None = None, max_chunks: int = 1_000_000
    ) -> None:
        self.link = link
        self._codec = SessionCodec(cipher)
        self._max_chunks = max_chunks
        self._num_unreadable = 0

    @property
    def is_degraded(self) -> bool:
        return self.link.breaker.is_open

    @property
    def stats(self) -> MetadataStats:
        breaker = self.link.breaker
        return MetadataStats(
            is_degraded=breaker.is_open,
            degraded_s=breaker.open_s,
            calls_total=self.link.num_calls,
            failures_total=self.link.num_failures,
            unreadable_total=self._num_unreadable,
        )

    async def start(self) -> None:
        await self.link.start()

    async def close(self) -> None:
        await self.link.close()

    # ------------------------------------------------------------ workers

    async def renew_worker(self, worker: WorkerRecord, lease_s: float) -> None:
        await self.link.script(
            scripts.RENEW,
            encode_part(worker.worker_id),
            worker.epoch,
            worker.endpoint,
            encode_part(worker.fingerprint),
            _milliseconds(lease_s),
        )

    async def remove_worker(self, worker_id: str) -> None:
        await self.link.script(scripts.REMOVE_WORKER, encode_part(worker_id))

    async def workers(self, fingerprint: str) -> Sequence[WorkerRecord]:
        return await self._workers(f"workers:{encode_part(fingerprint)}")

    async def all_workers(self) -> Sequence[WorkerRecord]:
        return await self._workers("workers")

    async def _workers(self, index: str) -> Sequence[WorkerRecord]:
        found = []
        for worker_id, epoch, endpoint, model in await self.link.script(scripts.WORKERS, index):
            try:
                record = WorkerRecord(
                    worker_id=decode_part(worker_id),
                    epoch=int(epoch),
                    endpoint=endpoint.decode(),
                    fingerprint=decode_part(model),
                )
            except ValueError:  # not written by us
                continue
            found.append(record)
        return sorted(found, key=lambda worker: worker.worker_id)

    # ------------------------------------------------------------ locations

    async def apply_events(
        self, worker: WorkerRecord, events: Sequence[CacheEvent], lease_s: float
    ) -> None:
        key = (
            f"{KEY_PREFIX}chunks:{encode_part(worker.fingerprint)}"
            f":{encode_part(worker.worker_id)}:{worker.epoch}"
        )
        commands = _commands(key, fold_events(events))
        while part := list(islice(commands, _COMMANDS_PER_CALL)):
            try:
                await self._run(key, part, lease_s)
            except ForeignDataError:
                await self._run(key, [("DEL", key), *part], lease_s)

    async def _run(self, key: str, commands: Sequence[Any], lease_s: float) -> None:
        async def run(client: Any) -> int:
            async with client.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                pipeline.execute_command("PEXPIRE", key, _milliseconds(lease_s))
                pipeline.execute_command("HLEN", key)
                # Raised here, since the client library quotes the command in what it raises.
                answers = await pipeline.execute(raise_on_error=False)
                for answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                return int(answers[-1])

        num_chunks = await self.link.call(run)
        excess = num_chunks - self._max_chunks
        while excess > 0:
            count = min(excess, _CHUNKS_PER_COMMAND)
            some = await self.link.command("HRANDFIELD", key, count)
            if not some:
                break
            await self.link.command("HDEL", key, *some)
            excess -= len(some)

    async def locate(self, fingerprint: str, chunk_hashes: bytes) -> Sequence[BlockLocation]:
        model = encode_part(fingerprint)
        rows = await self.link.script(scripts.LOCATE, f"workers:{model}", model, chunk_hashes)
        found = []
        for worker_id, epoch, letters in rows:
            try:
                tiers = tuple(_TIERS[letter] for letter in letters)
                found.append(BlockLocation(decode_part(worker_id), int(epoch), tiers))
            except (ValueError, KeyError):  # not written by us
                continue
        return found

    # ------------------------------------------------------------ sessions

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        row = await self._read(tenant, session_id)
        return None if row is None else self._decode(tenant, session_id, row)

    async def put_session(self, record: SessionRecord, expected_version: int) -> bool:
        return await self.write_session(
            record, expected_version, expected_version + 1, (new_write_id(),)
        )

    async def write_session(
        self,
        record: SessionRecord,
        expected_version: int,
        new_version: int,
        write_ids: Sequence[bytes],
    ) -> bool:
        """As put_session; ``write_ids`` name this write and then those of earlier tries and
        versions, any of which may have been stored although its answer was lost."""
        key = session_key(record.tenant, record.session_id)
        sealed = self._codec.encode(record, key)

        async def put(expected: int | bytes) -> bool:
            return bool(
                await self.link.script(
                    scripts.PUT,
                    encode_part(record.tenant),
                    encode_part(record.session_id),
                    expected,
                    new_version,
                    _milliseconds(record.expires_at),
                    sealed.meta,
                    sealed.history,
                    *write_ids,
                )
            )

        if await put(expected_version):
            return True
        if expected_version:
            return False
        # What does not open counts as absent, so it must not stand in the way for ever.
        row = await self._read(record.tenant, record.session_id)
        if row is None or self._decode(record.tenant, record.session_id, row) is not None:
            return False
        return await put(row[0] or b"0")

    async def delete_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        row = await self.link.script(scripts.DELETE, encode_part(tenant), encode_part(session_id))
        return self._decode(tenant, session_id, row) if row and row[0] else None

    async def list_sessions(
        self, tenant: str, *, cursor: str = "", limit: int = 100
    ) -> tuple[Sequence[SessionRecord], str]:
        rows = await self.link.script(
            scripts.LIST, encode_part(tenant), f"({encode_part(cursor)}" if cursor else "-", limit
        )
        found = []
        last = ""
        for part, version, meta in rows:
            try:
                last = decode_part(part)
            except ValueError:  # not written by us
                continue
            record = self._decode(tenant, last, (version, meta, b"")) if version else None
            if record is not None:
                found.append(record)
        return found, last if len(rows) == limit else ""

    async def num_sessions(self) -> int:
        return int(await self.link.script(scripts.COUNT))

    async def _read(self, tenant: str, session_id: str) -> Sequence[bytes | None] | None:
        """Version, meta and history; None where there is nothing."""
        key = session_key(tenant, session_id)
        try:
            row = await self.link.command("HMGET", key, "version", "meta", "history")
        except ForeignDataError:
            return None
        return row if row[0] is not None else None

    def _decode(
        self, tenant: str, session_id: str, row: Sequence[bytes | None]
    ) -> SessionRecord | None:
        version, meta, history = row
        key = session_key(tenant, session_id)
        try:
            if version is None or meta is None or history is None:
                raise UnreadableRecordError
            return self._codec.decode(
                tenant, session_id, key, _version(version), SealedSession(meta, history)
            )
        except UnreadableRecordError:
            self._num_unreadable += 1
            if self._num_unreadable == 1:
                _log.warning(
                    "Redis at %s holds sessions that cannot be read here (another encryption key, "
                    "or other software's); they count as absent",
                    self.link.address,
                )
            return None


def _version(text: bytes) -> int:
    if not text.isdigit():
        raise UnreadableRecordError
    return int(text)


def _commands(key: str, changes: ChunkChanges) -> Iterator[tuple[str | bytes, ...]]:
    if changes.is_cleared:
        yield ("DEL", key)
    removed = iter(changes.removed)
    while gone := list(islice(removed, _CHUNKS_PER_COMMAND)):
        yield ("HDEL", key, *gone)
    stored = iter(changes.stored.items())
    while held := list(islice(stored, _CHUNKS_PER_COMMAND)):
        fields = (part for chunk, tier in held for part in (chunk, _TIER_LETTERS[tier]))
        yield ("HSET", key, *fields)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
