"""One request as it is answered: noted while it happens, explained only when somebody asks.

Owns what a request leaves for that: references to its token ids and its conversation, and a few
times. Noting costs some attributes; comparing, hashing and decoding are done elsewhere, later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import EvictedPrefix, RequestOutput
from service.conversation import Conversation
from service.diagnostics.record import RequestRecord
from service.sessions.identity import is_response_session

__all__ = ["NO_TOKENS", "PromptSource", "RequestTrace", "TracedPrompt"]

NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False
_BYTES_PER_TOKEN = 10  # of a conversation: its text and what holds it
_BYTES_PER_MESSAGE = 512
_BYTES_PER_TOOL = 2048
_BYTES_PER_REQUEST = 1024


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What a prompt was written from: a conversation, or the text of one field. ``path_of`` is what
    the client calls a path of the conversation."""

    conversation: Conversation | None = None
    field: str = "prompt"
    path_of: Callable[[str], str] | None = None

    @property
    def num_bytes(self) -> int:
        """About what it takes beside its text."""
        if self.conversation is None:
            return 0
        num_messages, num_tools = len(self.conversation.messages), len(self.conversation.tools)
        return num_messages * _BYTES_PER_MESSAGE + num_tools * _BYTES_PER_TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPrompt:
    """Whose prompt it is and what it was asked with. ``request_id`` is what clients may ask for,
    ``previous_id`` the request that this one says to go on from."""

    request_id: str = ""
    tenant: str = ""
    session: str = ""
    previous_id: str = ""
    model: str = ""
    fingerprint: str = ""
    block_size: int = 1  # tokens
    num_tokens: int = 0
    cache_salt: str = field(default="", repr=False)  # of the namespace
    token_ids: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS, repr=False)
    source: PromptSource = field(default_factory=PromptSource, repr=False)
    had_other_model: bool = False  # when its session was served last
    is_scored: bool = False  # whether logprobs of the prompt were asked for: it is computed whole


class RequestTrace:
    """Written from the event loop; read from there and by whoever explains it.

    ``received_at`` is on ``clock``, which counts seconds; ``started_at`` is in seconds since 1970.
    """

    __slots__ = (
        "_clock",
        "_on_end",
        "decode_s",
        "first_admission",
        "first_token_at",
        "load_s",
        "number",
        "outcome",
        "output_token_ids",
        "prefill_s",
        "prompt",
        "queue_s",
        "received_at",
        "sent_at",
        "started_at",
        "ttft_s",
        "worker_epoch",
        "worker_id",
    )

    def __init__(
        self,
        prompt: TracedPrompt | None = None,
        received_at: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        started_at: float = 0.0,
        on_end: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self.prompt = TracedPrompt() if prompt is None else prompt
        self.received_at = received_at
        self.started_at = started_at
        self.number = 0  # its place among all that were listed; 0 if it was not
        self.first_admission: RequestOutput | None = None
        self.output_token_ids = NO_TOKENS
        self.worker_id = ""
        self.worker_epoch = 0
        self.sent_at: float | None = None  # both on the clock
        self.first_token_at: float | None = None
        self.outcome = "running"
        self.queue_s: float | None = None
        self.load_s: float | None = None
        self.prefill_s: float | None = None
        self.decode_s: float | None = None
        self.ttft_s: float | None = None
        self._clock = clock
        self._on_end = on_end

    # ------------------------------------------------------------ as it happens

    def sent(self, worker_id: str, worker_epoch: int) -> None:
        """``worker_epoch`` tells the lives of a worker apart."""
        self.worker_id, self.worker_epoch = worker_id, worker_epoch
        self.sent_at = self._clock()

    def admitted(self, output: RequestOutput, queue_s: float) -> None:
        """``output`` is the first one that told of cached tokens."""
        if self.first_admission is None:
            self.first_admission, self.queue_s, self.load_s = output, queue_s, output.load_s

    def token(self, prefill_s: float | None) -> None:
        """One or more have come; ``prefill_s`` is the worker's word, with the first."""
        if self.first_token_at is None:
            self.first_token_at = self._clock()
            self.prefill_s = prefill_s

    def ended(
        self, outcome: str, ttft_s: float | None = None, output_token_ids: Sequence[int] = ()
    ) -> None:
        """However it ended. ``output_token_ids`` are those that the worker has computed."""
        self.outcome = outcome
        self.ttft_s = ttft_s
        if self.first_token_at is not None:
            self.decode_s = self._clock() - self.first_token_at
        if output_token_ids:
            self.output_token_ids = np.asarray(output_token_ids, dtype=np.int32)
        if self._on_end is not None:
            self._on_end(self)

    # ------------------------------------------------------------ afterwards

    @property
    def is_listed(self) -> bool:
        """Whether it is the first choice of its prompt."""
        return self.number > 0

    @property
    def is_admitted(self) -> bool:
        return self.first_admission is not None

    @property
    def has_ended(self) -> bool:
        return self.outcome != "running"

    @property
    def num_cached_tokens(self) -> int:
        """0 before its admission."""
        admission = self.first_admission
        return 0 if admission is None else admission.num_cached_tokens or 0

    @property
    def evicted(self) -> EvictedPrefix | None:
        """What the worker says of tokens that it had once."""
        return None if self.first_admission is None else self.first_admission.evicted

    @property
    def served_ids(self) -> NDArray[np.int32]:
        """The prompt and, once it has ended, the answer."""
        if not len(self.output_token_ids):
            return self.prompt.token_ids
        return np.concatenate((self.prompt.token_ids, self.output_token_ids))

    @property
    def num_bytes(self) -> int:
        """About what is held for it."""
        num_tokens = len(self.prompt.token_ids)
        num_ids = num_tokens + len(self.output_token_ids)
        text = num_tokens * _BYTES_PER_TOKEN if self.prompt.source.conversation else 0
        return _BYTES_PER_REQUEST + num_ids * 4 + text + self.prompt.source.num_bytes

    def record(self, reason: str = "") -> RequestRecord:
        """As it stands now."""
        prompt, admission = self.prompt, self.first_admission
        num_host = 0 if admission is None else admission.num_host_tokens
        num_disk = 0 if admission is None else admission.num_disk_tokens
        return RequestRecord(
            request_id=prompt.request_id,
            started_at=self.started_at,
            tenant=prompt.tenant,
            session="" if is_response_session(prompt.session) else prompt.session,
            model=prompt.model,
            worker_id=self.worker_id,
            num_prompt_tokens=prompt.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_device_tokens=self.num_cached_tokens - num_host - num_disk,
            num_host_tokens=num_host,
            num_disk_tokens=num_disk,
            num_output_tokens=len(self.output_token_ids),
            reason=reason,
            queue_s=self.queue_s,
            load_s=self.load_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            ttft_s=self.ttft_s,
            outcome=self.outcome,
        )
