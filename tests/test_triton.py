"""The Triton kernels, run by Triton's interpreter: tests of their own process, see there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.triton import TritonBackend

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(900)
def test_the_kernels_in_the_interpreter() -> None:
    """Triton decides at a kernel's definition, for the whole process, whether to interpret it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [*command, "tests/triton_interpreted.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


def make_backend() -> TritonBackend:
    """As on a device with 132 multiprocessors; nothing is launched."""
    spec = KVCacheSpec(32, 1, 2, 16, "float32", 4)
    tier = DeviceTier(spec, 1, torch.device("cpu"))
    return TritonBackend(tier, 8, torch.float32, num_processors=132)


@pytest.mark.parametrize("new", [1, 2, 5, 8, 9, 17, 64, 200, 256])
@pytest.mark.parametrize("context", [0, 100, 4000, 7900])
def test_a_reserved_plan_holds_every_suffix_of_its_size(new: int, context: int) -> None:
    backend = make_backend()
    plan = backend.reserve(num_rows=256, max_spans=1, max_kv_len=8192)
    assert backend.refill(plan, (SequenceSpan(0, new, context, list(range(256))),))


@pytest.mark.parametrize("batch", [1, 2, 8, 64])
@pytest.mark.parametrize(("context", "shared"), [(100, 0), (8000, 0), (8000, 7936), (4000, 1024)])
def test_a_reserved_plan_holds_every_decode_step_of_its_size(
    batch: int, context: int, shared: int
) -> None:
    backend = make_backend()
    plan = backend.reserve(num_rows=batch, max_spans=batch, max_kv_len=8192)
    prefix = list(range(shared // 32))
    spans = tuple(
        SequenceSpan(i, 1, context, [*prefix, *range(1000 * i + 500, 1000 * i + 756)])
        for i in range(batch)
    )
    assert backend.refill(plan, spans)
    is_sharing = shared > 0 and batch > 1
    assert len(plan.buffer.query_rows) >= batch
    assert plan.buffer.num_rows.item() == batch
    assert (plan.buffer.num_large.item() > 0) == (is_sharing and batch > 4)
