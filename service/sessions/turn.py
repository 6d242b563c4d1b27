"""One request of a session: the ids of its prompt, and what the session becomes by its answer.

Owns the comparison with the stored history at the start and the compare-and-set at the end. Knows
nothing of HTTP, and of workers no more than the id of the one that served it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_store.metadata.base import MetadataError, SessionRecord
from service.generation import Outcome
from service.sessions.branches import add
from service.sessions.history import (
    NEVER,
    History,
    Prompt,
    ServedAnswer,
    is_extended_by,
    prepare_ids,
    prepare_text,
)
from service.sessions.identity import SessionKey
from service.sessions.records import SessionRecords, touched
from service.tenants.tenant import Caps
from service.tokenizer import ModelTokenizer

__all__ = ["ModelView", "SessionBranch", "Turn", "TurnStart"]

_MAX_TRIES = 4
_log = logging.getLogger("headstart.sessions")

TokenIds = NDArray[np.int32]  # 1-D


@dataclass(frozen=True, slots=True)
class ModelView:
    """What sessions need of the served model. ``block_size`` is in tokens."""

    fingerprint: str
    block_size: int
    tokenizer: ModelTokenizer


@dataclass(frozen=True, slots=True)
class SessionBranch:
    """A session that begins with what another, ``origin``, has at this moment, or with nothing. If
    it ``is_kept`` not, its turn leaves no trace in the store."""

    origin: SessionRecord | None
    is_kept: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """What a turn goes by. ``record`` is None for a session that begins, and for one that could
    not be read, which ``is_read`` tells apart."""

    record: SessionRecord | None
    is_read: bool
    cache_salt: str  # of the namespace, the tenant's part included
    ttl: float  # of a session that begins
    caps: Caps = field(default_factory=Caps)  # on what the record asks for
    branch: SessionBranch | None = None

    @property
    def source(self) -> SessionRecord | None:
        """Whose history and settings it goes on with."""
        return self.record if self.branch is None else self.branch.origin


class Turn:
    """``drop`` has a token sequence removed from the workers (ids, cache salt);
    ``in_background`` runs what nobody waits for; ``on_end`` is called once nothing is kept any
    more."""

    def __init__(
        self,
        key: SessionKey,
        start: TurnStart,
        model: ModelView,
        records: SessionRecords,
        *,
        drop: Callable[[TokenIds, str], None],
        in_background: Callable[[Coroutine[Any, Any, None]], None],
        on_conflict: Callable[[], None],
        on_end: Callable[[Turn], None],
    ) -> None:
        self.key = key
        self._start = start
        self._model = model
        self._tokenizer = model.tokenizer
        self._records = records
        self._drop = drop
        self._in_background = in_background
        self._on_conflict = on_conflict
        self._on_end = on_end
        self._base = start.record
        inherited = self._inherited_history()
        self._history = inherited or self._beginning()
        # What the session was served last is then of another model, and of no use.
        self.had_other_model = inherited is None and _has_history(start.source)
        self._text: str | None = None
        self._first_ids: tuple[int, ...] = ()
        self._prompt: Prompt | None = None
        self._is_forgotten = False
        self._is_counted = False
        self._is_ended = False
        self._num_late = 0

    @property
    def worker_id(self) -> str:
        """Of the worker that served the session last; empty for none."""
        return "" if self._start.source is None else self._start.source.worker_id

    @property
    def cache_salt(self) -> str:
        return self._start.cache_salt

    @property
    def priority(self) -> int:
        record = self._start.record
        return self._start.caps.priority(0 if record is None else record.priority)

    @property
    def retention_s(self) -> float:
        record = self._start.record
        return 0.0 if record is None else self._start.caps.retention(record.retention_s)

    @property
    def history(self) -> str:
        """``exact`` or ``retokenized``, once the prompt is there."""
        assert self._prompt is not None
        return "exact" if self._prompt.is_exact else "retokenized"

    @property
    def stored_ids(self) -> TokenIds:
        return self._history.token_ids

    def forget(self) -> None:
        """The session is deleted: nothing of this turn is to be kept."""
        self._is_forgotten = True

    # ------------------------------------------------------------ the prompt

    def ids_of_text(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Called in a thread: it encodes what is new of the text."""
        tokenizer = self._tokenizer
        first_ids = tokenizer.first_ids if add_special_tokens else ()
        if first_ids is None:  # the tokenizer ends a text: nothing can be spliced after it
            return self.ids_of_ids(tokenizer.encode(text, add_special_tokens=True))

        def encode(part: str) -> TokenIds:
            return tokenizer.encode(part, add_special_tokens=False)

        self._text, self._first_ids = text, first_ids
        self._prompt = prepare_text(
            text, self._history, tokenizer.splicer, encode, first_ids=first_ids
        )
        return self._prompt.token_ids

    def ids_of_ids(self, token_ids: TokenIds) -> TokenIds:
        """Of a prompt that the client tokenized: its ids are taken as they are."""
        self._prompt = prepare_ids(token_ids, self._history)
        return token_ids

    # ------------------------------------------------------------ the answer

    async def keep(self, outcome: Outcome) -> None:
        """Store what was served. Never raises for the store's sake."""
        if self._start.branch is not None and not self._start.branch.is_kept:
            return
        prompt = self._prompt
        assert prompt is not None
        answer = ServedAnswer(
            token_ids=outcome.output_token_ids,
            text=outcome.text,
            stop_token_id=outcome.stop_token_id,
        )
        try:
            is_kept = not self._is_forgotten and await self._store(prompt, answer, outcome)
        except MetadataError:
            _log.warning("a session's history was not stored: the metadata store did not answer")
            return
        if not is_kept:  # deleted meanwhile: what this turn computed has to go as well
            self._drop(self._answered(prompt, answer)[0].token_ids, self.cache_salt)

    def keep_later(self, outcome: Awaitable[Outcome]) -> None:
        """As :meth:`keep`, once it is known what the worker computed; nobody waits for it."""

        async def wait_and_keep() -> None:
            try:
                known = await outcome
                if self._start.branch is None:  # else nothing is kept of what was given up
                    await self.keep(known)
            finally:
                self._num_late -= 1
                self._tell_end()

        self._num_late += 1
        self._in_background(wait_and_keep())

    def end(self) -> None:
        """The request is over, however it ended. May be called more than once."""
        self._is_ended = True
        self._tell_end()

    def _tell_end(self) -> None:
        if self._is_ended and not self._num_late:
            self._on_end(self)

    async def _store(self, prompt: Prompt, answer: ServedAnswer, outcome: Outcome) -> bool:
        """Whether it is stored, or rightly is not; False if the session is gone from here."""
        base, stored = self._base, self._history
        for _ in range(_MAX_TRIES):
            history, given_up = self._merged(prompt, answer, stored)
            record = self._next_record(base, history, outcome)
            if await self._records.put(record, base):
                self._drop_left_behind(base, given_up)
                version = 1 if base is None else base.version + 1
                self._base = msgspec.structs.replace(record, version=version)
                self._history, self._is_counted = history, True
                return True
            self._on_conflict()
            latest = await self._records.get(self.key)
            if self._is_forgotten or (latest is None and base is not None):
                return False
            if latest is not None and latest.cache_salt != self.cache_salt:
                return False  # it went on in another namespace: nothing of it stands beside ours
            base = latest
            stored = self._stored_history(latest) or self._history
        _log.warning("a session's turn was not stored: the session changes too quickly")
        return True

    def _merged(
        self, prompt: Prompt, answer: ServedAnswer, stored: History
    ) -> tuple[History, Sequence[TokenIds]]:
        """This turn after what is stored by now, or beside it where the texts part."""
        if stored is prompt.base:
            return self._answered(prompt, answer)
        ours = self._answered(replace(prompt, base=stored), answer)
        text = None if self._text is None else self._text + answer.text
        if is_extended_by(stored, text, self._first_ids, ours[0].token_ids):
            return ours
        beside = add(stored.branches, stored.token_ids, ours[0].token_ids)
        kept = msgspec.structs.replace(stored, branches=beside.branches)
        return kept, beside.given_up

    def _answered(self, prompt: Prompt, answer: ServedAnswer) -> tuple[History, Sequence[TokenIds]]:
        stop_id = answer.stop_token_id
        stop_text = None if stop_id is None else self._tokenizer.splicer.text_of(stop_id)
        return prompt.answered(answer, self._tokenizer.decode_exactly, stop_text)

    def _next_record(
        self, base: SessionRecord | None, history: History, outcome: Outcome
    ) -> SessionRecord:
        now = self._records.clock()
        if base is None:
            blank = SessionRecord(
                tenant=self.key.tenant,
                session_id=self.key.session_id,
                version=0,
                created_at=now,
                last_active_at=now,
                expires_at=now,
            )
            base = touched(blank, now, self._start.ttl)
        assert self._prompt is not None
        num_asked = 0 if self._is_counted else len(self._prompt.token_ids)
        num_cached = 0 if self._is_counted else outcome.num_cached_tokens
        return msgspec.structs.replace(
            touched(base, now),
            cache_salt=self.cache_salt,
            worker_id=outcome.worker_id,
            num_prompt_tokens_total=base.num_prompt_tokens_total + num_asked,
            num_cached_tokens_total=base.num_cached_tokens_total + num_cached,
            history=history.encode(),
        )

    def _drop_left_behind(self, base: SessionRecord | None, given_up: Sequence[TokenIds]) -> None:
        for token_ids in given_up:
            self._drop(token_ids, self.cache_salt)
        if base is not None and base.cache_salt != self.cache_salt:
            history = self._stored_history(base)
            for token_ids in history.sequences() if history is not None else ():
                self._drop(token_ids, base.cache_salt)

    def _inherited_history(self) -> History | None:
        history = self._stored_history(self._start.source)
        if history is None or self._start.branch is None or self._start.source is None:
            return history
        return history.forked(self._start.source.session_id)

    def _stored_history(self, record: SessionRecord | None) -> History | None:
        return None if record is None else History.decode(record.history, self._model.fingerprint)

    def _beginning(self) -> History:
        """Of a session without a history: exact on its first turn, and not where it was lost."""
        # The session's own key, and the same in each gateway that begins it.
        name = f"{self.key.tenant}\0{self.key.session_id}".encode()
        key = hashlib.blake2b(name, digest_size=16).digest()
        history = History.empty(self._model.fingerprint, key)
        record = self._start.source
        is_first = record is None or not record.num_prompt_tokens_total
        if is_first and self._start.is_read:
            return history
        return msgspec.structs.replace(history, num_exact_tokens=NEVER)


def _has_history(record: SessionRecord | None) -> bool:
    return record is not None and bool(record.history)
