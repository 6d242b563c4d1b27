"""The attention backends against plain softmax attention over each sequence's own rows."""

from __future__ import annotations

import pytest
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend, paged_attention_forward
from model_worker.attention.cpu import CpuBackend
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan
from model_worker.attention.sdpa import SdpaBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4
SCALE = 0.3


def make_tier(num_blocks: int = 400) -> DeviceTier:
    spec = KVCacheSpec(
        block_size=BLOCK,
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        bytes_per_element=4,
    )
    tier = DeviceTier(spec, num_blocks, torch.device("cpu"))
    # A row that was never written must not reach any result, not even multiplied by zero.
    tier.keys.fill_(torch.nan)
    tier.values.fill_(torch.nan)
    return tier


def make_backend(name: str, tier: DeviceTier) -> AttentionBackend:
    return CpuBackend(tier) if name == "cpu" else SdpaBackend(tier)


def attend_naively(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """query (heads, new, dim) over key/value (kv_heads, all, dim), causal, new rows last."""
    key = key.repeat_interleave(HEADS // KV_HEADS, dim=0)
    value = value.repeat_interleave(HEADS // KV_HEADS, dim=0)
    scores = query @ key.transpose(1, 2) * SCALE
    new, total = scores.shape[1:]
    mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


class Sequence:
    """Random q, k, v of one sequence and the blocks its rows live in."""

    def __init__(self, num_tokens: int, block_ids: list[int], generator: torch.Generator) -> None:
        self.block_ids = block_ids
        self.query = torch.randn(HEADS, num_tokens, HEAD_DIM, generator=generator)
        self.key = torch.randn(KV_HEADS, num_tokens, HEAD_DIM, generator=generator)
        self.value = torch.randn(KV_HEADS, num_tokens, HEAD_DIM, generator=generator)

    def slots(self, start: int, stop: int) -> list[int]:
        return [self.block_ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, stop)]


def run_step(
    backend: AttentionBackend, sequences: list[Sequence], shares: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Attend rows start..stop of each sequence in one step; outputs (heads, new, dim) each."""
    spans = []
    row = 0
    for sequence, (start, stop) in zip(sequences, shares, strict=True):
        spans.append(SequenceSpan(row, stop - start, start, sequence.block_ids))
        row += stop - start
    slots = [
        slot
        for sequence, (start, stop) in zip(sequences, shares, strict=True)
        for slot in sequence.slots(start, stop)
    ]
    parts = [
        torch.cat(
            [
                getattr(sequence, name)[:, start:stop]
                for sequence, (start, stop) in zip(sequences, shares, strict=True)
            ],
            dim=1,
        )[None]
        for name in ("query", "key", "value")
    ]
    metadata = AttentionMetadata(
        backend, torch.tensor(slots), tuple(spans), backend.prepare(tuple(spans))
    )
    output = backend.forward(1, *parts, SCALE, metadata)
    assert output.shape == (1, row, HEADS, HEAD_DIM)
    return [output[0, span.query_start : span.query_stop].transpose(0, 1) for span in spans]


def assert_right(output: torch.Tensor, sequence: Sequence, start: int, stop: int) -> None:
    wanted = attend_naively(
        sequence.query[:, start:stop], sequence.key[:, :stop], sequence.value[:, :stop]
    )
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["cpu", "sdpa"])
def test_chunks_of_a_scattered_sequence(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tier = make_tier()
    backend = make_backend(name, tier)
    sequence = Sequence(41, [7, 8, 9, 30, 2, 3, 90, 91, 92, 93, 5], generator)
    for start, stop in [(0, 13), (13, 14), (14, 30), (30, 40), (40, 41)]:
        (output,) = run_step(backend, [sequence], [(start, stop)])
        assert_right(output, sequence, start, stop)


@pytest.mark.parametrize("name", ["cpu", "sdpa"])
def test_mixed_batch_of_prefill_and_decode(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    tier = make_tier()
    backend = make_backend(name, tier)
    sequences = [
        Sequence(9, [1, 2, 3], generator),
        Sequence(20, [50, 40, 30, 20, 10], generator),
        Sequence(5, [60, 61], generator),
    ]
    run_step(backend, sequences[:2], [(0, 8), (0, 7)])
    outputs = run_step(backend, sequences, [(8, 9), (7, 20), (0, 5)])
    for output, sequence, share in zip(outputs, sequences, [(8, 9), (7, 20), (0, 5)], strict=True):
        assert_right(output, sequence, *share)


def test_a_wrong_row_changes_the_result() -> None:
    generator = torch.Generator().manual_seed(4)
    tier = make_tier()
    backend = CpuBackend(tier)
    sequence = Sequence(12, [1, 2, 3], generator)
    run_step(backend, [sequence], [(0, 11)])
    tier.keys[1, 2, 1] += 1.0
    (output,) = run_step(backend, [sequence], [(11, 12)])
    wanted = attend_naively(sequence.query[:, 11:], sequence.key, sequence.value)
    assert not torch.allclose(output, wanted, atol=1e-3)


def test_what_no_backend_computes_is_refused() -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    tensor = torch.zeros(1, HEADS, 1, HEAD_DIM)
    backend = SdpaBackend(make_tier())
    metadata = AttentionMetadata(backend, torch.tensor([0]), (), ())
    with pytest.raises(TypeError, match="'softcap'"):
        paged_attention_forward(
            module, tensor, tensor, tensor, None, attention_metadata=metadata, softcap=50.0
        )
    with pytest.raises(TypeError, match="without attention_metadata"):
        paged_attention_forward(module, tensor, tensor, tensor, None)
