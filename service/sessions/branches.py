"""Token sequences that a session was served with and has left behind.

Owns how they are kept beside the present one, so that deleting the session can name every block it
gave rise to. Knows nothing of texts, stores or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_BRANCHES", "Branch", "Rebased", "add", "num_common_tokens", "rebase", "whole"]

MAX_BRANCHES = 16  # per session; the oldest beyond them are given up

TokenIds = NDArray[np.int32]  # 1-D


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that has its first tokens in common with the present one."""

    num_common_tokens: int
    tail: bytes  # little-endian int32


@dataclass(frozen=True, slots=True)
class Rebased:
    """``given_up`` are whole sequences that are remembered no longer."""

    branches: tuple[Branch, ...]
    given_up: tuple[TokenIds, ...]


def num_common_tokens(left: TokenIds, right: TokenIds) -> int:
    """Length of the longest common prefix."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


def whole(branch: Branch, present: TokenIds) -> TokenIds:
    tail = np.frombuffer(branch.tail, dtype="<i4")
    return np.concatenate((present[: branch.num_common_tokens], tail))


def rebase(branches: Sequence[Branch], old: TokenIds, new: TokenIds) -> Rebased:
    """The branches of ``old``, and ``old`` itself, as branches of ``new``, the oldest first.

    One that ``new`` begins with is none any more.
    """
    common = num_common_tokens(old, new)
    if common == len(old):  # the usual turn goes on where the last one ended
        return Rebased(tuple(branches), ())
    return _beside(new, [*(whole(branch, old) for branch in branches), old])


def add(branches: Sequence[Branch], present: TokenIds, other: TokenIds) -> Rebased:
    """``other`` as one more branch of ``present``."""
    return _beside(present, [*(whole(branch, present) for branch in branches), other])


def _beside(present: TokenIds, sequences: Sequence[TokenIds]) -> Rebased:
    kept = []
    for sequence in sequences[-MAX_BRANCHES:]:
        common = num_common_tokens(sequence, present)
        if common < len(sequence):
            kept.append(Branch(common, sequence[common:].astype("<i4").tobytes()))
    return Rebased(tuple(kept), tuple(sequences[:-MAX_BRANCHES]))
