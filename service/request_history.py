"""What was asked lately, as hashes: the blocks of each request, and how many tokens were cached.

Owns a ring of records, bounded in requests and in bytes, kept in memory alone. A record has the
chained hashes of a prompt's and its answer's full blocks (cache_store.block_hash) and counts, no
token and no text. What a larger cache would have found and which prefixes are hot is for its
readers to say; it measures nothing and knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_store.block_hash import HASH_BYTES, Namespace
from cache_store.shared_prefixes import Place, SharedPrefixes, hash_prompt
from model_worker.protocol import ModelCard
from service.sessions.identity import session_digest

__all__ = ["MAX_BYTES", "MAX_REQUESTS", "RequestHistory", "RequestRecord", "ServedRequest"]

MAX_REQUESTS = 20_000
MAX_BYTES = 32 * 2**20
_RECORD_BYTES = 512  # of a record without its hashes, roughly
_LABEL_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What became of an admitted request, as its end knows it. ``token_ids`` are 1-D: the prompt's,
    then those of the answer whose keys and values were computed."""

    request_id: str
    tenant: str
    session: str  # a name that its client chose; empty for none
    cache_salt: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    num_output_tokens: int
    num_device_tokens: int
    num_host_tokens: int
    num_disk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One request. ``block_hashes`` is 1-D uint64, the first half of each block's hash; those from
    ``num_prompt_blocks`` on end in the answer. Equal hashes are equal blocks after equal prefixes
    of one namespace. ``namespace`` and ``session`` are short digests, in hexadecimal.
    """

    request_id: str
    at: float  # when it ended, seconds since the epoch
    tenant: str
    namespace: str
    session: str  # empty for none
    block_size: int  # tokens
    block_hashes: NDArray[np.uint64]
    num_prompt_blocks: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_device_tokens: int  # found in the cache, by tier
    num_host_tokens: int
    num_disk_tokens: int

    @property
    def num_cached_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens + self.num_disk_tokens

    @property
    def prompt_hashes(self) -> NDArray[np.uint64]:
        return self.block_hashes[: self.num_prompt_blocks]

    @property
    def num_bytes(self) -> int:
        return _RECORD_BYTES + self.block_hashes.nbytes


class RequestHistory:
    """``card`` gives the model's card once there is one, ``shared`` the prefixes that namespaces
    have in common. Belongs to the event loop. A listener is told each record as it comes.
    ``on_tokens`` is also given the ids that its hashes are of: for whoever may keep them."""

    def __init__(
        self,
        card: Callable[[], ModelCard | None],
        shared: Callable[[], SharedPrefixes | None],
        *,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
        on_tokens: Callable[[RequestRecord, NDArray[np.int32]], None] | None = None,
    ) -> None:
        self._card = card
        self._shared = shared
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_tokens = on_tokens
        self._records: deque[RequestRecord] = deque()
        self._num_bytes = 0
        self._listeners: list[Callable[[RequestRecord], None]] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add_listener(self, listener: Callable[[RequestRecord], None]) -> None:
        self._listeners.append(listener)

    def records(self) -> Sequence[RequestRecord]:
        """All that are kept, the oldest first."""
        return tuple(self._records)

    def add(self, served: ServedRequest) -> None:
        """Note a request that has ended; nothing before the model is known."""
        card = self._card()
        if card is None:
            return
        record = self._record(served, card)
        self._records.append(record)
        self._num_bytes += record.num_bytes
        while len(self._records) > self._max_requests or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._records.popleft().num_bytes
        for listener in self._listeners:
            listener(record)
        if self._on_tokens is not None:
            self._on_tokens(record, served.token_ids)

    def forget(self, tenant: str, session: str = "") -> int:
        """Drop all records of a tenant, or of one of its sessions; how many there were."""
        label = session_digest(tenant, session) if session else ""
        kept = [
            record
            for record in self._records
            if record.tenant != tenant or (label and record.session != label)
        ]
        num_dropped = len(self._records) - len(kept)
        self._records = deque(kept)
        self._num_bytes = sum(record.num_bytes for record in kept)
        return num_dropped

    def _record(self, served: ServedRequest, card: ModelCard) -> RequestRecord:
        namespace = Namespace(card.fingerprint, cache_salt=served.cache_salt)
        place: Place = namespace
        if (shared := self._shared()) is not None:
            place = shared.divide(namespace, served.token_ids[: served.num_prompt_tokens])
        hashes = hash_prompt(place, served.token_ids, card.block_size).joined
        session = session_digest(served.tenant, served.session) if served.session else ""
        return RequestRecord(
            request_id=served.request_id,
            at=self._clock(),
            tenant=served.tenant,
            namespace=namespace.root_hash[:_LABEL_BYTES].hex(),
            session=session,
            block_size=card.block_size,
            block_hashes=np.frombuffer(hashes, "<u8")[:: HASH_BYTES // 8].copy(),
            num_prompt_blocks=served.num_prompt_tokens // card.block_size,
            num_prompt_tokens=served.num_prompt_tokens,
            num_output_tokens=served.num_output_tokens,
            num_device_tokens=served.num_device_tokens,
            num_host_tokens=served.num_host_tokens,
            num_disk_tokens=served.num_disk_tokens,
        )
