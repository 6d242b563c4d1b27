"""The GPU benchmarks as far as a CPU can hold them to it: every line runs, the sums are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_models import ModelCost, model_cost, random_model


def test_the_whole_run_with_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--seed", "3", "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert (document["benchmark"], document["seed"]) == ("gpu", 3)
    assert document["environment"]["packages"]["torch"] == torch.__version__
    figures = document["results"]["models"]["tiny"]
    assert list(figures["decode"]) == ["1", "2", "3"]
    assert figures["promotion"]["blocks"] == 12
    for decode in figures["decode"].values():
        assert decode["share"] == pytest.approx(decode["floor_ms"] / decode["step_ms"], abs=0.01)
    assert "warm first token" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_what_a_step_has_to_read_and_to_compute() -> None:
    cost = ModelCost(
        decode_weight_bytes=1000, linear_weights=300, kv_bytes_per_token=8, attention_width=16
    )
    assert cost.decode_bytes(batch=3, context=10) == 1000 + 240
    assert cost.prefill_operations(5) == 2 * 300 * 5 + 2 * 16 * 25


def test_weights_are_counted_once_and_the_embeddings_of_an_untied_model_not_at_all() -> None:
    loaded = random_model(
        "tiny", torch.device("cpu"), torch.float32, max_model_len=64, block_size=8,
        kv_cache_dtype="auto", seed=0,
    )  # fmt: skip
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    cost = model_cost(loaded)
    assert cost.linear_weights == 2 * layer + 64
    assert cost.decode_weight_bytes == 4 * (2 * layer + 64 + 512 * 64)
    assert cost.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert cost.attention_width == 2 * 4 * 16
