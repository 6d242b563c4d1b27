"""One step ahead on a CUDA device: nothing in a launch waits, and the answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import CapturableBackend
from model_worker.attention.choice import build_attention
from model_worker.batch import ScheduledBatch
from model_worker.cuda_graphs import graph_shapes, record_cuda_graphs
from model_worker.forward import Forward
from model_worker.host_copy import ToHost
from model_worker.model_runner import PendingStep, Runner
from model_worker.protocol import SamplingParams
from model_worker.sampler import Sampler
from tests.models import VOCAB_SIZE, build_model
from tests.rig import EngineRig, RigOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

NUM_TOKENS = 40
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    "biased": {"temperature": 1.3, "seed": 7, "top_p": 0.95, "logit_bias": {17: 3.0, 40: -9.0}},
}


def with_graphs(model: PreTrainedModel, tier: DeviceTier) -> Forward:
    backend = build_attention("triton", tier, model.config.num_attention_heads, torch.float32)
    assert isinstance(backend, CapturableBackend)
    shapes = graph_shapes(8, 4096)
    return record_cuda_graphs(model, backend, shapes, 256, torch.device("cuda"), lambda line: None)


class WatchedRunner:
    """Raises where a launch waits for the device, once it is told to watch; notes whether the step
    before was still being computed when it returned."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.is_watching = False
        self.num_overlapped = 0
        self._done: torch.cuda.Event | None = None

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        with no_waiting() if self.is_watching else _anything():
            step = self._inner.launch(batch)
        if self._done is not None and not self._done.query():
            self.num_overlapped += 1
        self._done = torch.cuda.current_stream().record_event()
        return step


@contextmanager
def _anything() -> Iterator[None]:
    yield


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def serve(
    runs_ahead: bool, make_forward: Callable[[PreTrainedModel, DeviceTier], Forward] | None
) -> tuple[EngineRig, WatchedRunner]:
    """All kinds of sampling that need no token on the host, in one batch, twice: what is compiled
    or set up at first may wait."""
    options = RigOptions(
        block_size=16, max_model_len=256, backend="triton", device="cuda", runs_ahead=runs_ahead
    )
    rig = EngineRig(build_model("llama").to("cuda"), options, Sampler(), None, make_forward)
    runner = WatchedRunner(rig.runner)
    rig.engine._steps._runner = runner
    for turn in ("first", "second"):
        for number, (name, params) in enumerate(SAMPLINGS.items()):
            ids = np.random.default_rng(number).integers(10, VOCAB_SIZE, 20 + 7 * number).tolist()
            rig.submit(f"{turn} {name}", ids, SamplingParams(max_tokens=NUM_TOKENS, **params))
        rig.run()
        runner.is_watching = True
    return rig, runner


@pytest.mark.parametrize("has_graphs", [False, True])
def test_answers_are_the_same_and_no_launch_waits(has_graphs: bool) -> None:
    pytest.importorskip("triton")
    make_forward = with_graphs if has_graphs else None
    plain, _ = serve(False, make_forward)
    ahead, runner = serve(True, make_forward)
    for turn in ("first", "second"):
        for name in SAMPLINGS:
            assert ahead.tokens(f"{turn} {name}") == plain.tokens(f"{turn} {name}")
            assert len(ahead.tokens(f"{turn} {name}")) == NUM_TOKENS
    assert runner.num_overlapped > 0


def test_what_comes_to_the_host_is_what_was_queued_before() -> None:
    matrix = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        matrix = matrix @ matrix / 45.0
    wanted = (matrix.abs().amax(dim=1) * 1000).long()
    with no_waiting():
        on_its_way = ToHost(wanted)
    arrived = on_its_way.wait()
    assert arrived.device.type == "cpu"
    assert torch.equal(arrived, wanted.cpu())
