"""The servers that conformance is asked of.

Owns how the fake worker draws its tokens, and which servers there are. Knows no row.
"""

from __future__ import annotations

import contextlib
import os
import random
import zlib
from collections.abc import Iterator

import pytest

from model_worker.protocol import AddRequest
from tests.gateway_kit import MODEL_NAME, byte_ids_of
from tests.http_kit import serving
from tests.target import Target, target_at

LETTERS = byte_ids_of("abcdefghijklmnopqrstuvwxyz      ")


def drawn(request: AddRequest) -> Iterator[int]:
    """Tokens that depend on prompt, seed, bias and ignore_eos as an engine's would."""
    params = request.sampling_params
    is_random = params.temperature > 0
    seed = zlib.crc32(request.prompt_token_ids) + (params.seed or 0) * 1009 * is_random
    choices = [letter for letter in LETTERS if params.logit_bias.get(letter, 0) > -100]
    source = random.Random(seed)
    while True:
        yield source.choice(choices)


@contextlib.contextmanager
def conformance_target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Each row is held by the gateway alone, and by the gateway with an engine behind it."""
    url = os.environ.get("CONFORMANCE_URL")
    if url:
        if request.param == "fake":
            pytest.skip("CONFORMANCE_URL names the server to ask")
        with target_at(url.rstrip("/"), os.environ.get("CONFORMANCE_MODEL", "demo")) as found:
            yield found
    elif request.param == "real":
        yield request.getfixturevalue("tiny_target")
    else:
        with serving(drawn) as served, target_at(served.base_url, MODEL_NAME) as found:
            yield found
