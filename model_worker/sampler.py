"""From logits to the next tokens of each request, for all rows at once, where the logits are.

Owns penalties, filters, the choice, and whether a draft is right. The noise of an output token is a
pure function of the request's seed and the token's position, no row's result depends on the rows
beside it, and a draft stands only if it is what is drawn in its place: so neither the batch nor a
preemption nor speculation changes an answer. Knows nothing of the model, of the cache, or of where
drafts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.answer_end import Endings
from model_worker.batch import ScheduledRequest
from model_worker.host_copy import to_device
from model_worker.logit_row import LogitRow
from model_worker.noise import gumbel_noise, noise_keys
from model_worker.token_masks import masked

# On a CPU nucleus filtering looks at this many best tokens first; the whole vocabulary is sorted
# only for rows whose wanted mass they do not hold.
NUCLEUS_CANDIDATES = 1024
# Rows are taken together up to so many logits: a GPU wants all at once, a CPU what stays in its
# caches.
CPU_CHUNK_LOGITS = 2**16
CUDA_CHUNK_LOGITS = 2**26
_PROBABILITY_BITS = 30  # of a float32's, those that a number up to one may have set


class Sampler:
    def __init__(self, eos_token_ids: Iterable[int] = ()) -> None:
        """``eos_token_ids`` are what ends an answer, which ``min_tokens`` may put off."""
        self._endings = Endings(eos_token_ids)

    def sample(self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]) -> torch.Tensor:
        """The token drawn from each row, int64 (rows,), where ``logits`` are.

        ``logits`` (sum of the items' num_logit_rows, vocab): each item's are those of the token
        after its request's last one, then those after each of its drafts.
        """
        rows = [
            LogitRow(item.request, item.own_stop, item.draft_token_ids[:position])
            for item in ending
            for position in range(item.num_logit_rows)
        ]
        return self.draw(logits, rows)

    def draw(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> torch.Tensor:
        """The next token of each row, int64 (len(rows),), on the device of ``logits`` (len(rows),
        vocab). Waits for no other device than a CPU."""
        logits = _penalise(masked(logits, rows, self._endings), rows)
        is_random = [not row.request.sampling_params.is_greedy for row in rows]
        if not any(is_random):
            return logits.argmax(dim=-1)
        if all(is_random):
            return _draw_random(logits, rows)
        numbers = to_device(np.flatnonzero(is_random), logits.device)
        chosen = [row for row, is_chosen in zip(rows, is_random, strict=True) if is_chosen]
        drawn = _draw_random(logits[numbers], chosen)
        return logits.argmax(dim=-1).index_copy_(0, numbers, drawn)


def accepted_runs(
    ending: Sequence[ScheduledRequest], drawn: Sequence[int]
) -> list[tuple[int, ...]]:
    """The right drafts of each item, and the token drawn after them. ``drawn``: of each row.

    A draft is a guess and no distribution, so it is right exactly if it is what is drawn in its
    place: the simplest case of Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding", 2023.
    """
    tokens = iter(drawn)
    runs = [(item, [next(tokens) for _ in range(item.num_logit_rows)]) for item in ending]
    return [tuple(run[: _num_right(item, run) + 1]) for item, run in runs]


def _num_right(item: ScheduledRequest, drawn: Sequence[int]) -> int:
    """How many drafts stand: what follows the first wrong one was drawn after a wrong token."""
    for position, draft in enumerate(item.draft_token_ids):
        if drawn[position] != draft:
            return position
    return len(item.draft_token_ids)


@dataclass(frozen=True, slots=True)
class _Knobs:
    """What the rows ask for, float64 (rows, fields) on the host: it moves as one small copy."""

    table: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[LogitRow], vocab_size: int) -> _Knobs:
        table = np.empty((len(rows), 6))
        for knobs, row in zip(table, rows, strict=True):
            params = row.request.sampling_params
            knobs[:4] = params.temperature, params.top_k or vocab_size, params.top_p, params.min_p
        with np.errstate(divide="ignore"):
            table[:, 3] = np.log(table[:, 3])
        np.minimum(table[:, 1], vocab_size, out=table[:, 1])
        seeds = np.array([row.request.seed % 2**64 for row in rows], dtype=np.uint64)
        positions = np.array([row.position for row in rows], dtype=np.uint64)
        table[:, 4:] = noise_keys(seeds, positions)
        return cls(table)


def _draw_random(logits: torch.Tensor, rows: Sequence[LogitRow]) -> torch.Tensor:
    vocab_size = logits.shape[1]
    knobs = _Knobs.of(rows, vocab_size)
    on_device = to_device(knobs.table, logits.device)
    most = CPU_CHUNK_LOGITS if logits.device.type == "cpu" else CUDA_CHUNK_LOGITS
    size = max(1, most // vocab_size)
    chunks = [slice(start, start + size) for start in range(0, len(rows), size)]
    parts = [_draw_chunk(logits[part], knobs.table[part], on_device[part]) for part in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_chunk(
    logits: torch.Tensor, host: NDArray[np.float64], knobs: torch.Tensor
) -> torch.Tensor:
    """``host`` and ``knobs`` are the same table, on the host and beside the logits."""
    temperature, top_k, top_p, log_min_p = knobs[:, :4].float().T.unsqueeze(-1)
    scores = logits.float() / temperature
    vocab_size = logits.shape[1]
    has_top_k, has_top_p, has_min_p = (host[:, 1:4] != (vocab_size, 1.0, -np.inf)).any(axis=0)
    if has_top_k:
        _drop_below_top_k(scores, top_k.long(), int(host[host[:, 1] < vocab_size, 1].max()))
    if has_min_p:
        # Less likely than so many times the likeliest.
        scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + log_min_p, -torch.inf)
    if has_top_p:
        _drop_outside_nucleus(scores, top_p)
    keys = knobs[:, 4:].to(torch.int32)
    if scores.device.type == "cpu" and (has_top_k or has_top_p or has_min_p):
        # Noise is what costs most, and what was dropped needs none. How much that is a GPU would
        # have to be waited for.
        chosen = _candidates(scores)
        drawn = gumbel_noise(keys, chosen).add_(scores[:, chosen]).argmax(dim=-1)
        return chosen[drawn]
    tokens = torch.arange(vocab_size, device=scores.device)
    return gumbel_noise(keys, tokens).add_(scores).argmax(dim=-1)


def _candidates(scores: torch.Tensor) -> torch.Tensor:
    """The tokens that at least one row has kept."""
    return (scores > -torch.inf).any(dim=0).nonzero().flatten()


def _drop_below_top_k(scores: torch.Tensor, top_k: torch.Tensor, largest: int) -> None:
    """Keep ``top_k`` (rows, 1) best, with all that equal the last of them; the whole row where it
    is more than ``largest``. In place."""
    best = scores.topk(largest, dim=-1).values
    least = best.gather(1, (top_k - 1).clamp_(max=largest - 1))
    least.masked_fill_(top_k > largest, -torch.inf)
    scores.masked_fill_(scores < least, -torch.inf)


def _drop_outside_nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least ``top_p``
    (rows, 1), with all that equal the last of them; the whole row where it is 1. In place."""
    probabilities = scores.softmax(dim=-1)
    if scores.device.type != "cpu":
        scores.masked_fill_(probabilities < _least_of_nucleus(probabilities, top_p), -torch.inf)
        return
    count = min(NUCLEUS_CANDIDATES, scores.shape[1])
    least, mass = _nucleus_edge(probabilities.topk(count, dim=-1).values, top_p)
    if count < scores.shape[1]:
        rows = ((mass < top_p) & (top_p < 1.0)).flatten().nonzero().flatten()
        if len(rows):
            ordered = probabilities[rows].sort(dim=-1, descending=True).values
            least[rows] = _nucleus_edge(ordered, top_p[rows])[0]
    least.masked_fill_(top_p >= 1.0, 0.0)
    scores.masked_fill_(probabilities < least, -torch.inf)


def _least_of_nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least probability that belongs to the nucleus, (rows, 1); 0 where all do.

    It is the largest that those not below it sum to ``top_p`` with, found bit by bit: floats that
    are not negative are ordered as their bits are. A sort takes longer, and the best few would not
    always do, so that somebody would have to wait and look.
    """
    bits = probabilities.view(torch.int32)
    least = torch.zeros_like(top_p, dtype=torch.int32)
    for bit in reversed(range(_PROBABILITY_BITS)):
        larger = least | (1 << bit)
        mass = torch.where(bits >= larger, probabilities, 0.0).sum(dim=-1, keepdim=True)
        least = torch.where(mass >= top_p, larger, least)
    return least.view(torch.float32).masked_fill_(top_p >= 1.0, 0.0)


def _nucleus_edge(ordered: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least probability that belongs to the nucleus, and the mass of all that are given, each
    (rows, 1)."""
    mass = ordered.cumsum(dim=-1)
    num_kept = (mass - ordered < top_p).sum(dim=-1, keepdim=True)
    return ordered.gather(1, (num_kept - 1).clamp_(min=0)), mass[:, -1:]


def _penalise(logits: torch.Tensor, rows: Sequence[LogitRow]) -> torch.Tensor:
    """Repetition (prompt and output), then presence and frequency (output only), then bias. The
    very tensor where nobody asks for any."""
    repeated = _Edits()
    counted = _Edits()
    biased = _Edits()
    for number, row in enumerate(rows):
        params = row.request.sampling_params
        if params.repetition_penalty != 1.0:
            repeated.add(number, row.token_ids, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(row.output_token_ids, return_counts=True)
            counted.add(number, ids, params.presence_penalty + params.frequency_penalty * counts)
        if params.logit_bias:
            amounts = np.array(list(params.logit_bias.values()))
            biased.add(number, np.array(list(params.logit_bias)), amounts)
    if not (repeated.rows or counted.rows or biased.rows):
        return logits
    logits = logits.to(torch.float32, copy=True)
    if repeated.rows:
        # A token that stands there twice is written twice, with the same value.
        where, factors = repeated.on(logits.device)
        values = logits[where]
        logits[where] = torch.where(values > 0, values / factors, values * factors)
    if counted.rows:
        where, change = counted.on(logits.device)
        logits[where] -= change
    if biased.rows:
        where, change = biased.on(logits.device)
        logits[where] += change
    return logits


class _Edits:
    """Some tokens of some rows, and a number for each."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: NDArray[Any], numbers: float | NDArray[Any]) -> None:
        self.rows.append(np.full(len(ids), row))
        self._ids.append(ids.astype(np.int64))
        self._numbers.append(np.broadcast_to(np.asarray(numbers, dtype=np.float32), len(ids)))

    def on(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """An index of (row, token), and the numbers."""
        where = to_device(np.stack([np.concatenate(self.rows), np.concatenate(self._ids)]), device)
        return (where[0], where[1]), to_device(np.concatenate(self._numbers), device)
