"""How likely the model held tokens: those that a step draws, and those of prompts.

Owns the arithmetic, and which rows of a step's logits it is about. Nothing is computed where nobody
asks. Knows nothing of how tokens are drawn: the probabilities are the model's own, before anything
that a request asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_worker.batch import RequestScores, ScheduledBatch, ScheduledRequest
from model_worker.host_copy import ToHost, to_device
from model_worker.protocol import TokenLogprobs

# What JSON can say in place of minus infinity, as OpenAI's API does.
MIN_LOGPROB = -9999.0
# Rows are taken together up to so many logits, which bounds the memory of their float32 copies.
CHUNK_LOGITS = 2**22


def score_rows(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> torch.Tensor:
    """Of the token ``token_ids[i]`` under the logits (rows, vocab) of row i: float64 (rows, 2 + 2 *
    most), its logprob, its rank, the ids of the ``most`` likeliest tokens there, their logprobs.

    ``token_ids`` int64 (rows,) on the device of ``logits``, and there the result is.
    """
    size = max(1, CHUNK_LOGITS // logits.shape[1])
    parts = [
        _score_chunk(logits[start : start + size], token_ids[start : start + size], most)
        for start in range(0, len(logits), size)
    ]
    return torch.cat(parts)


def _score_chunk(logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> torch.Tensor:
    rows = logits.float()
    total = rows.logsumexp(dim=-1, keepdim=True)
    own = rows.gather(1, token_ids[:, None])
    rank = (rows > own).sum(dim=-1, keepdim=True) + 1
    best = rows.topk(min(most, rows.shape[1]), dim=-1)
    columns = (_finite(own - total), rank, best.indices, _finite(best.values - total))
    return torch.cat([column.double() for column in columns], dim=1)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num_(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB)


def entries_of(table: torch.Tensor, num_top: int) -> tuple[TokenLogprobs, ...]:
    """One per row of what :func:`score_rows` gave, with ``num_top`` of the likeliest tokens."""
    most = (table.shape[1] - 2) // 2
    count = min(num_top, most)
    return tuple(
        TokenLogprobs(logprob, int(rank), tuple(map(int, top[:count])), tuple(top[most:][:count]))
        for logprob, rank, *top in table.tolist()
    )


def sampled_rows(batch: ScheduledBatch, logits: torch.Tensor) -> torch.Tensor:
    """Of a step's logits those that tokens are drawn from: the very tensor where no prompt's
    tokens are scored. Each item's rows are those for its ``scored`` tokens, then these."""
    if not any(item.scored for item in batch.scheduled):
        return logits
    numbers = [
        np.arange(start, start + item.num_logit_rows)
        for start, item in zip(_drawn_starts(batch), batch.scheduled, strict=True)
    ]
    return logits[to_device(np.concatenate(numbers), logits.device)]


def _drawn_starts(batch: ScheduledBatch) -> list[int]:
    """Of each item the first row of the step's logits that a token is drawn from."""
    counts = [item.num_logit_rows for item in batch.scheduled]
    ends = np.cumsum([len(item.scored) + item.num_logit_rows for item in batch.scheduled])
    starts: list[int] = (ends - counts).tolist()
    return starts


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows ``first`` and on of a table belong to item ``index`` of the batch."""

    index: int
    first: int
    num_top: int


@dataclass(frozen=True, slots=True)
class StepScores:
    """Of one step, on their way to the host."""

    drawn: tuple[_Share, ...]
    drawn_table: ToHost | None
    prompts: dict[int, tuple[ToHost | None, int]]  # and how many of the likeliest
    begins: frozenset[int]  # whose prompts are told of from their first token on

    def read(self, runs: Sequence[tuple[int, ...]]) -> dict[int, RequestScores]:
        """By index in the batch, of those who ask; ``runs`` are the tokens of each item that
        stand. Waits for the device."""
        drawn = {}
        if self.drawn_table is not None:
            table = self.drawn_table.wait()
            for share in self.drawn:
                rows = table[share.first : share.first + len(runs[share.index])]
                drawn[share.index] = entries_of(rows, share.num_top)
        return {
            index: RequestScores(drawn.get(index, ()), self._prompt(index))
            for index in {*drawn, *self.prompts}
        }

    def _prompt(self, index: int) -> tuple[TokenLogprobs | None, ...]:
        # Nothing precedes the first token.
        head = (None,) if index in self.begins else ()
        table, num_top = self.prompts.get(index, (None, 0))
        return head if table is None else (*head, *entries_of(table.wait(), num_top))


def score_step(
    batch: ScheduledBatch, logits: torch.Tensor, sampled: torch.Tensor, drawn: torch.Tensor
) -> StepScores | None:
    """What those who ask are to be told: of ``drawn`` int64 (rows,), the tokens drawn from the
    logits ``sampled`` (rows, vocab), and of the prompts' tokens that all ``logits`` of the step
    score. None where nobody asks. Waits for nothing."""
    prompts = [(index, item) for index, item in enumerate(batch.scheduled) if item.scored.start > 0]
    shares = _drawn_shares(batch)
    if not prompts and not shares:
        return None
    starts = _drawn_starts(batch) if prompts else []
    return StepScores(
        tuple(shares),
        _drawn_table(batch, shares, sampled, drawn),
        {index: _score_prompt(item, logits, starts[index]) for index, item in prompts},
        frozenset(index for index, item in prompts if item.scored.start == 1),
    )


def _drawn_shares(batch: ScheduledBatch) -> list[_Share]:
    shares, first = [], 0
    for index, item in enumerate(batch.scheduled):
        num_top = item.request.sampling_params.num_logprobs
        if num_top is not None and item.reaches_end:
            shares.append(_Share(index, first, num_top))
            first += item.num_logit_rows
    return shares


def _drawn_table(
    batch: ScheduledBatch, shares: Sequence[_Share], sampled: torch.Tensor, drawn: torch.Tensor
) -> ToHost | None:
    if not shares:
        return None
    asking = {share.index for share in shares}
    counts = [item.num_logit_rows for item in batch.scheduled]
    is_asking = [index in asking for index in range(len(counts))]
    numbers = to_device(np.flatnonzero(np.repeat(is_asking, counts)), sampled.device)
    most = max(share.num_top for share in shares)
    return ToHost(score_rows(sampled[numbers], drawn[numbers], most))


def _score_prompt(
    item: ScheduledRequest, logits: torch.Tensor, stop: int
) -> tuple[ToHost | None, int]:
    """Of the item's ``scored`` tokens, whose rows are those before ``stop``."""
    num_top = item.request.sampling_params.num_prompt_logprobs or 0
    if not item.scored:
        return None, num_top
    token_ids = item.request.token_ids[item.scored.start : item.scored.stop].astype(np.int64)
    rows = logits[stop - len(token_ids) : stop]
    return ToHost(score_rows(rows, to_device(token_ids, logits.device), num_top)), num_top
