"""What one session was served: its token ids, and where in its text they may be taken up again.

Owns the encoding of a history and the comparison of a new text with it. No text is kept: a
checkpoint holds a keyed digest of the text up to it. Knows nothing of stores, HTTP or templates.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.sessions.branches import Branch, num_common_tokens, rebase, whole
from service.sessions.splicer import Splicer

__all__ = [
    "NEVER",
    "Checkpoint",
    "History",
    "Prompt",
    "ServedAnswer",
    "is_extended_by",
    "prepare_ids",
    "prepare_text",
]

DIGEST_SIZE = 16
_MAX_RELATIVES = 16  # looked at when a session is deleted
NEVER = -1  # num_exact_tokens of a history whose last answer could not be kept
_CHECKPOINT = struct.Struct(f"<II{DIGEST_SIZE}s")

TokenIds = NDArray[np.int32]  # 1-D


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Up to here the text has ``num_chars`` characters, and ``num_tokens`` ids stand for them."""

    num_chars: int
    num_tokens: int
    digest: bytes


class History(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``num_exact_tokens`` of the ids must be taken over for the next turn to be exact."""

    model: str  # fingerprint: other tokenizers have other ids
    key: bytes  # of the digests; each session's own
    ids: bytes  # little-endian int32: prompt and answer of the last turn that was kept
    packed_checkpoints: bytes = b""
    num_exact_tokens: int = 0
    branches: tuple[Branch, ...] = ()
    relatives: tuple[str, ...] = ()  # session ids of its forks and of what it was forked from
    attachment: bytes = b""  # what else is kept with it (service.sessions.stored_responses)

    @classmethod
    def empty(cls, model: str, key: bytes) -> History:
        """``key`` has at most 64 bytes."""
        return cls(model=model, key=key, ids=b"")

    @classmethod
    def decode(cls, content: bytes, model: str | None) -> History | None:
        """None for a history that is absent, damaged, or of another than ``model`` (None takes
        any): it counts as lost."""
        if not content:
            return None
        try:
            history = msgspec.msgpack.decode(content, type=History)
        except msgspec.DecodeError:
            return None
        is_whole = not (len(history.ids) % 4 or len(history.packed_checkpoints) % _CHECKPOINT.size)
        return history if is_whole and model in (None, history.model) else None

    def forked(self, session_id: str) -> History:
        """What a fork of the session of that id begins with."""
        return msgspec.structs.replace(self.with_relative(session_id), branches=(), attachment=b"")

    def with_relative(self, session_id: str) -> History:
        relatives = (*self.relatives, session_id)[-_MAX_RELATIVES:]
        return msgspec.structs.replace(self, relatives=relatives)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def token_ids(self) -> TokenIds:
        return np.frombuffer(self.ids, dtype="<i4")

    def checkpoints(self) -> Iterator[Checkpoint]:
        """In the order of the text."""
        for fields in _CHECKPOINT.iter_unpack(self.packed_checkpoints):
            yield Checkpoint(*fields)

    def sequences(self) -> list[TokenIds]:
        """Every token sequence that is known to have been served, the present one first."""
        present = self.token_ids
        return [present, *(whole(branch, present) for branch in self.branches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """``text`` is what the client was given for ``token_ids``, without the token that stopped it.

    ``stop_token_id`` is that token, if one did. ``text`` may say less than the ids: a stop string
    has cut it, or the client left.
    """

    token_ids: Sequence[int]
    text: str
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt's ids, of which the first ``num_reused_tokens`` were taken from the history."""

    token_ids: TokenIds
    base: History
    num_reused_tokens: int
    is_exact: bool
    checkpoints: tuple[Checkpoint, ...] = ()
    num_chars: int = 0
    hasher: hashlib.blake2b | None = field(default=None, repr=False)  # of the whole text

    def answered(
        self,
        answer: ServedAnswer,
        decode_exactly: Callable[[Sequence[int]], str],
        stop_text: str | None,
    ) -> tuple[History, tuple[TokenIds, ...]]:
        """The history after ``answer``, and sequences that it could no longer hold.

        ``stop_text`` is how the stop token is written if it is an added token.
        """
        stop = () if answer.stop_token_id is None else (answer.stop_token_id,)
        tail = np.asarray([*answer.token_ids, *stop], dtype=np.int32)
        served = np.concatenate((self.token_ids, tail))
        num_answered = len(self.token_ids) + len(answer.token_ids)
        added: list[Checkpoint] = []
        num_exact = NEVER
        if not len(tail):  # there is no answer that the next turn could lack
            num_exact = self.base.num_exact_tokens if self.is_exact else 0
        elif self._stands_for(answer, decode_exactly):
            num_exact = num_answered
            added = self._after(answer.text, num_answered, stop_text)
        old = self.base
        rebased = rebase(old.branches, old.token_ids, served)
        history = msgspec.structs.replace(
            old,
            ids=served.astype("<i4", copy=False).tobytes(),
            packed_checkpoints=_pack((*self.checkpoints, *added)),
            num_exact_tokens=num_exact,
            branches=rebased.branches,
        )
        return history, rebased.given_up

    def _stands_for(
        self, answer: ServedAnswer, decode_exactly: Callable[[Sequence[int]], str]
    ) -> bool:
        """Whether the ids decode to the very text that was given, where they stand."""
        context = self.token_ids[-4:].tolist()
        before = decode_exactly(context)
        return decode_exactly([*context, *answer.token_ids]) == before + answer.text

    def _after(self, text: str, num_tokens: int, stop_text: str | None) -> list[Checkpoint]:
        if self.hasher is None:
            return []
        hasher = self.hasher.copy()
        hasher.update(text.encode())
        num_chars = self.num_chars + len(text)
        added = [Checkpoint(num_chars, num_tokens, hasher.digest())]
        if stop_text is not None:
            hasher.update(stop_text.encode())
            num_chars += len(stop_text)
            added.append(Checkpoint(num_chars, num_tokens + 1, hasher.digest()))
        return added


def prepare_ids(token_ids: TokenIds, history: History) -> Prompt:
    """A prompt that came as ids, which are taken as they are."""
    num_common = num_common_tokens(history.token_ids, token_ids)
    return Prompt(
        token_ids=token_ids,
        base=history,
        num_reused_tokens=num_common,
        is_exact=0 <= history.num_exact_tokens <= num_common,
    )


def prepare_text(
    text: str,
    history: History,
    splicer: Splicer,
    encode: Callable[[str], TokenIds],
    *,
    first_ids: Sequence[int] = (),
) -> Prompt:
    """``text`` as ids: those of the history for the part it has in common, the rest encoded.

    ``first_ids`` stand before the text's own; texts after different ones have nothing in common.
    Takes time linear in the text, and encodes only what is new.
    """
    head = np.asarray(first_ids, dtype="<i4")
    hasher = _hasher(history, head)
    state, reused = hasher.copy(), Checkpoint(0, 0, b"")
    known: list[Checkpoint] = []
    num_known, num_hashed = 0, 0
    for checkpoint in history.checkpoints() if splicer.is_on else ():
        if checkpoint.num_chars > len(text):
            break
        hasher.update(text[num_hashed : checkpoint.num_chars].encode())
        num_hashed = checkpoint.num_chars
        if hasher.digest() != checkpoint.digest:
            break
        known.append(checkpoint)
        # What was served may also be the whole of it: nothing follows that could be joined to it.
        if len(text) == checkpoint.num_chars or splicer.is_boundary(text, checkpoint.num_chars):
            state, reused, num_known = hasher.copy(), checkpoint, len(known)
    rest = text[reused.num_chars :]
    new_ids = encode(rest)
    kept_ids = history.token_ids[: reused.num_tokens] if known[:num_known] else head
    added, state = _checkpoints(rest, new_ids, splicer, state, reused.num_chars, len(kept_ids))
    return Prompt(
        token_ids=np.concatenate((kept_ids, new_ids)),
        base=history,
        num_reused_tokens=reused.num_tokens,
        is_exact=0 <= history.num_exact_tokens <= reused.num_tokens,
        checkpoints=(*known[:num_known], *added),
        num_chars=len(text),
        hasher=state,
    )


def is_extended_by(
    history: History, text: str | None, first_ids: Sequence[int], token_ids: TokenIds
) -> bool:
    """Whether a conversation, as text (if it was one) and as ids, begins with ``history``."""
    if num_common_tokens(history.token_ids, token_ids) == len(history.token_ids):
        return True
    if text is None or history.num_exact_tokens == NEVER:
        return False
    needed = history.num_exact_tokens or len(history.token_ids)
    ends = [item for item in history.checkpoints() if item.num_tokens >= needed]
    if not ends or len(text) < ends[0].num_chars:
        return False
    hasher = _hasher(history, np.asarray(first_ids, dtype="<i4"))
    hasher.update(text[: ends[0].num_chars].encode())
    return hasher.digest() == ends[0].digest


def _hasher(history: History, head: TokenIds) -> hashlib.blake2b:
    return hashlib.blake2b(head.tobytes(), key=history.key, digest_size=DIGEST_SIZE)


def _checkpoints(
    text: str,
    token_ids: TokenIds,
    splicer: Splicer,
    hasher: hashlib.blake2b,
    num_chars: int,
    num_tokens: int,
) -> tuple[list[Checkpoint], hashlib.blake2b]:
    """The checkpoints in ``text``, before which so much stands, and the hasher at its end."""
    found = []
    at = 0
    for boundary in splicer.boundaries(text, token_ids):
        if boundary.num_chars == at:  # the beginning, or where the last one is
            continue
        hasher.update(text[at : boundary.num_chars].encode())
        at = boundary.num_chars
        found.append(Checkpoint(num_chars + at, num_tokens + boundary.num_tokens, hasher.digest()))
    hasher.update(text[at:].encode())
    return found, hasher


def _pack(checkpoints: Sequence[Checkpoint]) -> bytes:
    return b"".join(
        _CHECKPOINT.pack(item.num_chars, item.num_tokens, item.digest) for item in checkpoints
    )
