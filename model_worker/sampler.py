"""From logits to one token per request.

Owns penalties, filters and the noise. The noise of an output token is a pure function of the
request's seed and the token's position, so neither the batch nor a preemption changes an answer.
Knows nothing of the model or of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model_worker.request import Request

# Nucleus filtering looks at this many best tokens first; the whole vocabulary is sorted only when
# they do not hold the wanted mass.
NUCLEUS_CANDIDATES = 1024


class Sampler:
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """``logits`` (len(requests), vocab), of the token after each request's last one."""
        logits = logits.float()
        if all(_is_plain_greedy(request) for request in requests):
            return _as_ints(logits.argmax(dim=-1))
        return [_sample_row(row, request) for row, request in zip(logits, requests, strict=True)]


def _is_plain_greedy(request: Request) -> bool:
    params = request.sampling_params
    return (
        params.is_greedy
        and not params.logit_bias
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )


def _as_ints(token_ids: torch.Tensor) -> list[int]:
    return [int(token_id) for token_id in token_ids.tolist()]


def _sample_row(row: torch.Tensor, request: Request) -> int:
    params = request.sampling_params
    row = _penalise(row, request)
    if params.is_greedy:
        return int(row.argmax())
    row = row / params.temperature
    row = _keep_top_k(row, params.top_k)
    row = _keep_min_p(row, params.min_p)
    row = _keep_top_p(row, params.top_p)
    noise = gumbel_noise(request.seed, request.num_output_tokens, row.shape[0])
    return int((row + noise.to(row.device)).argmax())


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) float32 (vocab,); adding it to log-probabilities and taking the largest draws
    from their distribution (Maddison et al., "A* Sampling", 2014).

    Counter-based (Philox; Salmon et al., 2011): keyed by ``seed`` at counter ``position``.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, position])
    exponential = np.random.Generator(bits).standard_exponential(vocab_size, dtype=np.float32)
    return torch.from_numpy(-np.log(exponential + np.float32(1e-30)))


def _penalise(row: torch.Tensor, request: Request) -> torch.Tensor:
    """Repetition (prompt and output), then presence and frequency (output only), then bias."""
    params = request.sampling_params
    row = row.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(request.token_ids)).long().to(row.device)
        values = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(request.output_token_ids, return_counts=True)
        index = torch.from_numpy(ids).long().to(row.device)
        times = torch.from_numpy(counts).to(row.device, row.dtype)
        row[index] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        index = torch.tensor(list(params.logit_bias), device=row.device)
        row[index] += torch.tensor(list(params.logit_bias.values()), device=row.device)
    return row


def _keep_top_k(row: torch.Tensor, top_k: int) -> torch.Tensor:
    if top_k == 0 or top_k >= row.shape[0]:
        return row
    values, ids = row.topk(top_k)
    return torch.full_like(row, -torch.inf).scatter_(0, ids, values)


def _keep_min_p(row: torch.Tensor, min_p: float) -> torch.Tensor:
    """Drop tokens less likely than ``min_p`` times the likeliest."""
    if min_p == 0.0:
        return row
    return row.masked_fill(row < row.max() + np.log(min_p), -torch.inf)


def _keep_top_p(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least ``top_p``."""
    if top_p >= 1.0:
        return row
    probabilities = row.softmax(dim=0)
    count = min(NUCLEUS_CANDIDATES, row.shape[0])
    values, ids = probabilities.topk(count)
    mass = values.cumsum(dim=0)
    if mass[-1] < top_p and count < row.shape[0]:
        values, ids = probabilities.sort(descending=True)
        mass = values.cumsum(dim=0)
    num_kept = int((mass - values < top_p).sum())
    kept = ids[: max(num_kept, 1)]
    return torch.full_like(row, -torch.inf).scatter_(0, kept, row[kept])
