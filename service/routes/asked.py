"""What an endpoint asks for: its prompts, how many choices of each, and how they are written.

Owns the limits on choices. Knows nothing of how any of it is carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import SamplingParams
from service.answers import BeforeEnd
from service.deltas import MakeReader, PlainReader
from service.diagnostics.prompt_comparison import PromptComparison
from service.diagnostics.trace import PromptSource
from service.dialects.retelling import Retelling
from service.errors import InvalidRequest
from service.schemas.sampling import CommonFields
from service.sessions.identity import SessionKey
from service.sessions.turn import SessionBranch, Turn
from service.shapes.base import MakeShape

__all__ = ["MAX_CHOICES", "Comparison", "Generation", "MakePrompts", "Prompt", "told_as"]

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for a worker. ``prefix`` is text to put before its answer; ``reader``
    makes what reads one; ``decode`` takes the place of the tokenizer's; ``source`` is what it was
    written from."""

    token_ids: NDArray[np.int32]
    sampling_params: SamplingParams
    prefix: str = ""
    is_continuation: bool = False
    reader: MakeReader = PlainReader
    decode: Callable[[Sequence[int]], str] | None = None
    source: PromptSource = field(default_factory=PromptSource)


MakePrompts = Callable[[Turn | None], Awaitable[Sequence[Prompt]]]


@dataclass(slots=True)
class Comparison:
    """An earlier request whose prompt the first one of this is to be compared with; ``found`` is
    there before an answer is written."""

    request_id: str
    found: PromptComparison | None = None


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
    comparison: Comparison | None = None
    previous_id: str = ""  # of the request that it says to go on from, where that is no session's

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


def told_as(prompts: Sequence[Prompt], retelling: Retelling) -> list[Prompt]:
    """``prompts`` of a chat that a client has asked for in other words."""
    return [
        replace(prompt, source=replace(prompt.source, path_of=retelling.path_of))
        for prompt in prompts
    ]
