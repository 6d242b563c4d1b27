"""Requests as the worker's parts see them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_store.block_hash import Namespace, hash_blocks
from model_worker.request import Request, RequestKey
from model_worker.sampling_params import SamplingParams

NAMESPACE = Namespace("model")


def make_request(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    *,
    name: str = "r",
    order: int = 0,
    seed: int = 7,
    block_size: int = 4,
    max_model_len: int = 4096,
    **params: object,
) -> Request:
    ids = np.asarray(prompt, dtype=np.int32)
    sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params})  # type: ignore[arg-type]
    request = Request.create(
        RequestKey("link", name),
        NAMESPACE,
        ids,
        sampling,
        seed=seed,
        arrival_s=0.0,
        order=order,
        max_model_len=max_model_len,
    )
    request.prompt_block_hashes = hash_blocks(NAMESPACE, ids, block_size)
    for token in output:
        request.append(token)
    return request
