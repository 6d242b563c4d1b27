"""One request inside a worker: its tokens, how far their KV is computed, and its lease.

Owns the token buffer and the counters that the scheduler advances. Knows nothing of the queue it
waits in, of other requests, or of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from cache_store.block_hash import NO_HASHES, BlockHashes
from cache_store.cache import Lease
from cache_store.shared_prefixes import Place
from model_worker.grammar import TokenMatcher
from model_worker.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int32]
NO_POSITIONS = range(0)


class RequestStatus(Enum):
    PREPARING = auto()  # its grammar is being compiled; no scheduler knows of it
    WAITING = auto()  # holds no block and no lock
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Request ids are unique per link only."""

    link_id: str
    request_id: str


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by the engine thread.

    Invariant: num_computed_tokens < num_tokens while the request lives, since the last token's KV
    is computed by the step that samples the next one.

    Of what a step in flight does only the marks are here: ``num_in_flight_tokens`` are computed in
    steps whose results are not known, and ``num_placeholders`` of the tokens that they draw have a
    token after them. All else changes with the result.
    """

    key: RequestKey
    namespace: Place
    sampling_params: SamplingParams
    seed: int
    arrival_s: float
    order: int  # arrival order, the scheduler's notion of age
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output together may not exceed it
    _buffer: TokenIds
    num_tokens: int
    prompt_block_hashes: BlockHashes = NO_HASHES
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_placeholders: int = 0
    num_cached_tokens: int | None = None  # of the admission that was reported, or of the last one
    num_host_tokens: int = 0  # of these, promoted
    num_disk_tokens: int = 0
    bonus_s: float = 0.0  # see Cache.acquire
    tenant: str = ""
    lease: Lease | None = None
    waits_for: bytes | None = None  # hash of the block that a leader is computing
    was_coalesced: bool = False
    admitted_s: float | None = None  # its first step, with all that it brings from lower tiers
    load_s: float = 0.0  # waited for that, before
    is_admission_reported: bool = False
    matcher: TokenMatcher | None = None  # what its grammar allows next
    num_unscored_tokens: int = 0  # of the prompt, whose logprobs are wanted and not known yet

    @classmethod
    def create(
        cls,
        key: RequestKey,
        namespace: Place,
        prompt_token_ids: TokenIds,
        sampling_params: SamplingParams,
        *,
        seed: int,
        arrival_s: float,
        order: int,
        max_model_len: int,
        bonus_s: float = 0.0,
        tenant: str = "",
    ) -> Request:
        num_prompt_tokens = len(prompt_token_ids)
        return cls(
            key=key,
            namespace=namespace,
            sampling_params=sampling_params,
            seed=seed,
            arrival_s=arrival_s,
            order=order,
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=min(num_prompt_tokens + sampling_params.max_tokens, max_model_len),
            _buffer=prompt_token_ids,
            num_tokens=num_prompt_tokens,
            bonus_s=bonus_s,
            tenant=tenant,
            num_unscored_tokens=(
                0 if sampling_params.num_prompt_logprobs is None else num_prompt_tokens
            ),
        )

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and output, int32 (num_tokens,); a view that the next append may outdate."""
        return self._buffer[: self.num_tokens]

    @property
    def output_token_ids(self) -> TokenIds:
        return self._buffer[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_loaded(self) -> bool:
        """Whether all that its lease brings is on the device."""
        return self.lease is not None and not self.lease.is_loading

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that is not done reads and writes its blocks."""
        return self.num_in_flight_tokens > 0

    @property
    def num_launched_tokens(self) -> int:
        """Computed or being computed: where its next step begins."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Those that no step has computed or is computing; one of them may still be drawn."""
        known = self.num_tokens - self.num_computed_tokens
        return known + self.num_placeholders - self.num_in_flight_tokens

    @property
    def matchable_token_ids(self) -> TokenIds:
        """Those that may come from the cache.

        All but the last, whose logits the answer goes on from; and of a prompt whose logprobs are
        wanted those alone whose rows are not needed any more, since the cache holds no logits.
        """
        if not self.num_unscored_tokens:
            return self.token_ids[:-1]
        return self.token_ids[: max(self.num_prompt_tokens - self.num_unscored_tokens - 1, 0)]

    def begins(self, now_s: float) -> None:
        """Its first step is launched; ``now_s`` is on the clock of arrivals and of transfers."""
        self.admitted_s = now_s
        loading = () if self.lease is None else self.lease.loading
        if loading:
            started_s = max(self.arrival_s, min(job.started_s for job in loading))
            self.load_s = max(0.0, now_s - started_s)

    def start(self, lease: Lease) -> None:
        """It runs with ``lease``, for the first time or once more."""
        self.status = RequestStatus.RUNNING
        self.lease = lease
        self.num_computed_tokens = lease.num_cached_tokens
        if not self.is_admission_reported:
            self.num_cached_tokens = lease.num_cached_tokens
            self.num_host_tokens = lease.num_host_tokens
            self.num_disk_tokens = lease.num_disk_tokens

    def scored_by(self, start: int, num_rows: int) -> range:
        """Positions of the prompt's tokens whose logprobs are wanted, not known yet, and given by
        ``num_rows`` rows from position ``start`` on: each by the row before it.

        From 1 on, since nothing precedes the first; of a prompt that has no other, range(1, 1).
        """
        if not self.num_unscored_tokens:
            return NO_POSITIONS
        num_known = self.num_prompt_tokens - self.num_unscored_tokens
        first = max(num_known, start + 1)
        stop = min(start + num_rows + 1, self.num_prompt_tokens)
        return range(first, stop) if first < stop or first == 1 else NO_POSITIONS

    def has_scored(self, positions: range) -> None:
        """What :meth:`scored_by` gave for a step that is done."""
        if positions.start > 0:
            self.num_unscored_tokens = self.num_prompt_tokens - positions.stop

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._buffer):
            grown = np.empty(min(2 * self.num_tokens, self.max_num_tokens), dtype=np.int32)
            grown[: self.num_tokens] = self._buffer
            self._buffer = grown
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.matcher is not None:
            self.matcher.advance(token_id)
