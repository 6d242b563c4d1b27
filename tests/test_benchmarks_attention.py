"""The arithmetic of the attention benchmark, its workloads, and its refusal without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_backends
from benchmarks.attention_backends import Case, Shape, Workload, bytes_read, difference, operations
from model_worker.attention.sdpa import SdpaBackend

SHAPE = Shape("small", 4, 2, 16)


def test_the_least_bytes_and_the_operations_of_a_layer() -> None:
    # K and V of 2 heads of 16 numbers of 2 bytes: 128 bytes a token.
    assert bytes_read(SHAPE, Case("decode", 3, 99), 2) == 3 * 100 * 128
    assert bytes_read(SHAPE, Case("shared prefix", 3, 99, 1, 64), 2) == (64 + 3 * 36) * 128
    # Two products of 16 multiplications and additions for 4 heads: 256 a pair of tokens.
    assert operations(SHAPE, Case("decode", 3, 99)) == 3 * 100 * 256
    assert operations(SHAPE, Case("prefill", 1, 0, 4)) == (1 + 2 + 3 + 4) * 256


@pytest.mark.parametrize(
    "case",
    [Case("decode", 3, 100), Case("shared prefix", 3, 300, 1, 256), Case("suffix", 1, 90, 20)],
)
def test_a_workload_is_a_step_over_scattered_blocks(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_backends, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(attention_backends, "ROTATED_BYTES", 2**18)
    work = Workload(SHAPE, case, 32, torch.bfloat16, seed=1)
    assert work.tier.spec.num_layers > 1
    tables = [list(span.block_ids) for span in work.spans]
    own = [block for table in tables for block in table[case.shared // 32 :]]
    assert len(own) == len(set(own))
    assert all(table[: case.shared // 32] == tables[0][: case.shared // 32] for table in tables)
    backend = SdpaBackend(work.tier)
    assert difference(backend, work) == 0.0
    work.forward_all(backend, backend.prepare(work.spans))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["attention_backends"])
    assert attention_backends.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
