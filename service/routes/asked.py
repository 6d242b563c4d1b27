"""What an endpoint asks for: its prompts, how many choices of each, and how they are written.

Owns the limits on choices. Knows nothing of how any of it is carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import SamplingParams
from service.answers import BeforeEnd
from service.deltas import MakeReader, PlainReader
from service.errors import InvalidRequest
from service.schemas.sampling import CommonFields
from service.sessions.identity import SessionKey
from service.sessions.turn import SessionBranch, Turn
from service.shapes.base import MakeShape

__all__ = ["MAX_CHOICES", "Generation", "MakePrompts", "Prompt"]

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for a worker. ``prefix`` is text to put before its answer; ``reader``
    makes what reads one; ``decode`` takes the place of the tokenizer's."""

    token_ids: NDArray[np.int32]
    sampling_params: SamplingParams
    prefix: str = ""
    is_continuation: bool = False
    reader: MakeReader = PlainReader
    decode: Callable[[Sequence[int]], str] | None = None


MakePrompts = Callable[[Turn | None], Awaitable[Sequence[Prompt]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an endpoint asks for: ``body.n`` choices of each prompt. ``prompts`` makes them, with
    what a turn of ``session`` knows of them already; ``worker_id`` is a worker to prefer where no
    session says. Raises InvalidRequest for choices that cannot be."""

    body: CommonFields
    session: SessionKey | None
    num_prompts: int
    prompts: MakePrompts
    received_at: float
    shape: MakeShape
    id_prefix: str
    worker_id: str = ""
    branch: SessionBranch | None = None  # what ``session``, which is new then, begins with
    before_end: BeforeEnd | None = None

    def __post_init__(self) -> None:
        if self.num_choices > MAX_CHOICES:
            raise InvalidRequest(
                f"n: at most {MAX_CHOICES} choices in one request, asked for {self.num_choices}.",
                param="n",
            )
        if self.session is not None and self.num_choices > 1:
            raise InvalidRequest(
                "session_id: a session goes on with one prompt and one choice at a time.",
                param="session_id",
            )

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.body.n
