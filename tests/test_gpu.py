"""The release gate on a CUDA device: the same engine, with each backend that computes float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.loader.rope import pin_rope
from tests.models import FAMILIES, VOCAB_SIZE, build_model
from tests.rig import EngineRig, RigOptions, reference_answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cold_warm_batched_and_preempted(family: str, backend: str, runs_ahead: bool) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    model = build_model(family).to("cuda")
    pin_rope(model, FAMILIES[family].max_model_len)
    rng = np.random.default_rng(7)
    shared = rng.integers(10, VOCAB_SIZE, 40).tolist()
    prompts = [[*shared, *rng.integers(10, VOCAB_SIZE, 5 + 3 * i).tolist()] for i in range(5)]
    references = {f"p{i}": reference_answer(model, ids, 16) for i, ids in enumerate(prompts)}
    for num_blocks in (128, 14):
        options = RigOptions(
            block_size=8,
            num_blocks=num_blocks,
            chunk=24,
            max_model_len=100,
            backend=backend,
            device="cuda",
            runs_ahead=runs_ahead,
        )
        rig = EngineRig(model, options)
        rig.check(references)
        rig.check({f"{name} again": reference for name, reference in references.items()})
        rig.sampler.report.assert_passes()
