"""What torch's varlen_attn is told of a step, by a function that records the call.

On a GPU it is held to the reference backend (test_attention_gpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan

varlen = pytest.importorskip("torch.nn.attention.varlen")


def make_tier(block_size: int = 256, dtype: str = "bfloat16") -> DeviceTier:
    element = 4 if dtype == "float32" else 2
    tier = DeviceTier(KVCacheSpec(block_size, 2, 2, 16, dtype, element), 9, torch.device("cpu"))
    tier.keys, tier.values = tier.keys.contiguous(), tier.values.contiguous()
    return tier


def test_a_step_in_varlen_s_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    from model_worker.attention.varlen import VarlenBackend

    calls: list[dict[str, Any]] = []

    def varlen_attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        calls.append(dict(locals()))
        return query + 1

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    tier = make_tier()
    backend = VarlenBackend(tier)
    spans = (SequenceSpan(0, 1, 256, [4, 7]), SequenceSpan(1, 3, 2, [5]))
    slots = torch.tensor([7 * 256, 5 * 256 + 2, 5 * 256 + 3, 5 * 256 + 4])
    metadata = AttentionMetadata(backend, slots, spans, backend.prepare(spans))
    query = torch.zeros(1, 4, 4, 16, dtype=torch.bfloat16)
    rows = torch.full((1, 2, 4, 16), 3.0, dtype=torch.bfloat16)
    output = backend.forward(1, query, rows, rows, 0.5, metadata)
    assert output.shape == (1, 4, 4, 16)
    assert (output == 1).all()
    (call,) = calls
    assert call["query"].shape == (4, 4, 16)
    assert call["key"].data_ptr() == tier.keys[1].data_ptr()
    assert call["value"].data_ptr() == tier.values[1].data_ptr()
    for name, wanted in (
        ("cu_seq_q", [0, 1, 4]), ("seqused_k", [257, 5]), ("block_table", [[4, 7], [5, 0]]),
    ):  # fmt: skip
        assert call[name].dtype is torch.int32
        assert call[name].tolist() == wanted
    assert (call["cu_seq_k"], call["max_q"], call["max_k"]) == (None, 3, 257)
    assert (call["scale"], call["window_size"], call["num_splits"]) == (0.5, (-1, 0), 1)
    assert call["enable_gqa"] is True
    assert (tier.keys[1, 5, 4] == 3).all()


def test_its_limits() -> None:
    from model_worker.attention.varlen import VarlenBackend

    with pytest.raises(ValueError, match="no multiple of 256"):
        VarlenBackend(make_tier(128))
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        VarlenBackend(make_tier(dtype="float32"))
