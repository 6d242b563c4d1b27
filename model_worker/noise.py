"""The noise that sampling adds to logits: a pure function of (seed, output position, token).

Owns its keys and its numbers. Each token's number stands alone, so it is computed where the logits
are, with the same integers on every device. Knows nothing of requests or of filters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UINT32_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_MULTIPLIERS = tuple(m - 2**32 if m >= 2**31 else m for m in _UINT32_MULTIPLIERS)
_UNIT = 2.0**-31
# The largest float32 below one: a token whose draw rounds to one would be forbidden otherwise.
_MAX_UNIFORM = 1.0 - 2.0**-24


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int32]:
    """int32 (rows, 2), one 64-bit key for each seed and position (SplitMix64; Steele et al.,
    "Fast splittable pseudorandom number generators", 2014)."""
    with np.errstate(over="ignore"):
        keys = _split_mix(_split_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    return keys.view(np.int32).reshape(-1, 2)


def _split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) float32 (rows, tokens) for int32 ``keys`` (rows, 2) and ``token_ids``; adding
    it to log-probabilities and taking the largest draws from their distribution (Maddison et al.,
    "A* Sampling", 2014).

    Each token's number is hashed twice with half of the key (the 32-bit mixer with the least bias
    known: Wellons, "Prospecting for hash functions", 2018).
    """
    state = token_ids.to(torch.int32) + keys[:, :1]
    spare = torch.empty_like(state)
    _mix(state, spare)
    _mix(state.bitwise_xor_(keys[:, 1:]), spare)
    # 31 bits, so that the smallest draws, which are the largest noise, keep all of their digits.
    uniform = state.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(_UNIT).clamp_(max=_MAX_UNIFORM)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix(state: torch.Tensor, spare: torch.Tensor) -> None:
    """In place; int32 wraps around as uint32 does, and the masks make the shifts logical."""
    for shift, mask, multiplier in (
        (16, 0xFFFF, _MULTIPLIERS[0]),
        (15, 0x1FFFF, _MULTIPLIERS[1]),
        (16, 0xFFFF, 1),
    ):
        torch.bitwise_right_shift(state, shift, out=spare)
        state.bitwise_xor_(spare.bitwise_and_(mask))
        if multiplier != 1:
            state.mul_(multiplier)
