"""Which tokens may be drawn at all: what grammars allow, and no end before ``min_tokens``.

Owns the masks of a step's rows and how they are applied. What is not allowed is minus infinity from
here on, so that penalties, filters, the greedy choice and the drawn one need not know. Whoever asks
for neither is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.answer_end import Endings
from model_worker.grammar import MaskWords, num_mask_words
from model_worker.host_copy import to_device
from model_worker.logit_row import LogitRow

_ALL = np.uint32(0xFFFFFFFF)


def masked(logits: torch.Tensor, rows: Sequence[LogitRow], endings: Endings) -> torch.Tensor:
    """``logits`` (len(rows), vocab) with minus infinity where a row's request may not go on; the
    very tensor where none is bounded. The rows of a request follow each other."""
    numbers = [number for number, row in enumerate(rows) if row.is_bounded]
    if not numbers:
        return logits
    bounded = [rows[number] for number in numbers]
    words = np.full((len(numbers), num_mask_words(logits.shape[1])), _ALL)
    _follow_grammars(words, bounded)
    for mask, row in zip(words, bounded, strict=True):
        params = row.request.sampling_params
        if row.position < params.min_tokens:
            _forbid(mask, endings.token_ids(params))
    blocked = _blocked(words, logits.device, logits.shape[1])
    if len(numbers) == len(rows):
        return logits.masked_fill(blocked, -torch.inf)
    where = to_device(np.array(numbers), logits.device)
    return logits.index_copy(0, where, logits[where].masked_fill_(blocked, -torch.inf))


def _follow_grammars(words: NDArray[np.uint32], rows: Sequence[LogitRow]) -> None:
    """A request's first row has nothing ahead, and each next one a draft more."""
    starts = [start for start, row in enumerate(rows) if not row.ahead]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        matcher = rows[start].request.matcher
        if matcher is not None:
            matcher.fill(words[start:stop], rows[stop - 1].ahead)


def _forbid(mask: MaskWords, token_ids: Sequence[int]) -> None:
    """Unless nothing would be left: a grammar that can only end does so."""
    before = mask.copy()
    for token_id in token_ids:
        mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not mask.any():
        mask[:] = before


def _blocked(words: NDArray[np.uint32], device: torch.device, vocab_size: int) -> torch.Tensor:
    """bool (rows, vocab) from the bits, which alone travel to the device."""
    packed = to_device(words.view(np.uint8), device)
    bits = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed[:, :, None] >> bits & 1).flatten(1)[:, :vocab_size] == 0
