"""What FlashInfer is told of a step: exact page lists, by wrappers that record the calls.

The recording wrappers have the parameters of flashinfer 0.7's; on a GPU the library itself is held
to the reference backend (test_attention_gpu.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.flashinfer import FlashInferBackend
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan

BLOCK = 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


class RecordingLibrary:
    """The module, as far as the backend uses it; every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _wrapper(self, name: str, plan: Any) -> Any:
        library = self

        class Wrapper:
            def run(
                self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
            ) -> torch.Tensor:
                library.calls.append((f"{name}.run", {"q": q, "kv": paged_kv_cache}))
                return q + 1

        wrapper = Wrapper()
        wrapper.plan = plan  # type: ignore[attr-defined]
        return wrapper

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> Any:
        def plan(
            indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
            *, q_data_type: Any = None, kv_data_type: Any = None, sm_scale: float | None = None,
        ) -> None:  # fmt: skip
            self.calls.append(("decode.plan", dict(locals())))

        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")
        assert use_tensor_cores
        return self._wrapper("decode", plan)

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"
    ) -> Any:
        def plan(
            qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
            *, causal: bool = False, sm_scale: float | None = None,
            q_data_type: Any = "float16", kv_data_type: Any = None,
        ) -> None:  # fmt: skip
            self.calls.append(("prefill.plan", dict(locals())))

        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")
        return self._wrapper("prefill", plan)

    def MultiLevelCascadeAttentionWrapper(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"
    ) -> Any:
        def plan(
            qo_indptr_arr: list[torch.Tensor], paged_kv_indptr_arr: list[torch.Tensor],
            paged_kv_indices_arr: list[torch.Tensor], paged_kv_last_page_len: list[torch.Tensor],
            num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
            causal: bool = False, *, sm_scale: float | None = None,
            q_data_type: Any = "float16", kv_data_type: Any = None,
        ) -> None:  # fmt: skip
            self.calls.append(("cascade.plan", dict(locals())))

        assert (num_levels, kv_layout) == (2, "NHD")
        return self._wrapper("cascade", plan)


def make_tier(dtype: str = "bfloat16") -> DeviceTier:
    spec = KVCacheSpec(BLOCK, 2, KV_HEADS, HEAD_DIM, dtype, 2)
    tier = DeviceTier(spec, 40, torch.device("cpu"))
    # In memory as on CUDA, rows of all heads together.
    tier.keys, tier.values = tier.keys.contiguous(), tier.values.contiguous()
    return tier


def make_backend(
    tier: DeviceTier, min_shared: int | None = 16
) -> tuple[FlashInferBackend, RecordingLibrary]:
    library = RecordingLibrary()
    backend = FlashInferBackend(tier, HEADS, torch.bfloat16, min_shared, library)
    return backend, library


def run(
    backend: FlashInferBackend, spans: tuple[SequenceSpan, ...], scalings: Sequence[float] = (0.5,)
) -> torch.Tensor:
    """One forward of layer 1 for each scaling; the last output."""
    num_tokens = spans[-1].query_stop
    query = torch.zeros(1, HEADS, num_tokens, HEAD_DIM, dtype=torch.bfloat16)
    rows = torch.full((1, KV_HEADS, num_tokens, HEAD_DIM), 3.0, dtype=torch.bfloat16)
    slots = torch.tensor(
        [
            span.block_ids[p // BLOCK] * BLOCK + p % BLOCK
            for span in spans
            for p in range(span.context_len, span.kv_len)
        ]
    )
    metadata = AttentionMetadata(backend, slots, spans, backend.prepare(spans))
    for scaling in scalings:
        output = backend.forward(1, query, rows, 2 * rows, scaling, metadata)
    return output


def lists(call: dict[str, Any], *names: str) -> list[list[int]]:
    for name in names:
        assert call[name].dtype is torch.int32
    return [call[name].tolist() for name in names]


def test_a_decode_step() -> None:
    tier = make_tier()
    backend, library = make_backend(tier)
    spans = (
        SequenceSpan(0, 1, 15, [4, 9, 30]),
        SequenceSpan(1, 1, 16, [7, 6, 5]),
        SequenceSpan(2, 1, 0, [20]),
    )
    output = run(backend, spans)
    (plan_name, plan), (run_name, call) = library.calls
    assert (plan_name, run_name) == ("decode.plan", "decode.run")
    assert lists(plan, "indptr", "indices", "last_page_len") == [
        [0, 2, 5, 6],
        [4, 9, 7, 6, 5, 20],
        [8, 1, 1],
    ]
    sizes = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "sm_scale")
    assert [plan[name] for name in sizes] == [4, 2, 64, 8, 0.5]
    assert plan["q_data_type"] is plan["kv_data_type"] is torch.bfloat16
    assert call["q"].shape == (3, HEADS, HEAD_DIM)
    assert call["q"].is_contiguous()
    assert call["kv"][0].data_ptr() == tier.keys[1].data_ptr()
    assert call["kv"][1].data_ptr() == tier.values[1].data_ptr()
    assert output.shape == (1, 3, HEADS, HEAD_DIM)
    assert (output == 1).all()
    # What the step computed was stored first.
    assert (tier.keys[1, 9, 7] == 3).all()
    assert (tier.values[1, 20, 0] == 6).all()


def test_a_mixed_step_goes_through_the_prefill_kernels() -> None:
    backend, library = make_backend(make_tier())
    spans = (SequenceSpan(0, 5, 6, [4, 9]), SequenceSpan(5, 1, 7, [3]), SequenceSpan(6, 8, 0, [2]))
    run(backend, spans)
    (name, plan), (run_name, _) = library.calls
    assert (name, run_name) == ("prefill.plan", "prefill.run")
    assert lists(
        plan, "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
    ) == [[0, 5, 6, 14], [0, 2, 3, 4], [4, 9, 3, 2], [3, 8, 8]]
    sizes = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "sm_scale", "causal")
    assert [plan[name] for name in sizes] == [4, 2, 64, 8, 0.5, True]


def test_a_prefix_shared_by_the_whole_step_is_a_level_of_its_own() -> None:
    backend, library = make_backend(make_tier())
    spans = (
        SequenceSpan(0, 1, 17, [4, 5, 6]),
        SequenceSpan(1, 1, 30, [4, 5, 8, 9]),
        SequenceSpan(2, 2, 16, [4, 5, 10]),
    )
    run(backend, spans)
    (name, plan), (run_name, _) = library.calls
    assert (name, run_name) == ("cascade.plan", "cascade.run")
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr")
    assert [[t.tolist() for t in plan[name]] for name in (*names, "paged_kv_last_page_len")] == [
        [[0, 4], [0, 1, 2, 4]],
        [[0, 2], [0, 1, 3, 4]],
        [[4, 5], [6, 8, 9, 10]],
        [[8], [2, 7, 2]],
    ]
    assert plan["causal"] is True
    assert plan["sm_scale"] == 0.5


@pytest.mark.parametrize("min_shared", [17, None])
def test_a_prefix_too_short_is_not_shared(min_shared: int | None) -> None:
    backend, library = make_backend(make_tier(), min_shared)
    run(backend, (SequenceSpan(0, 1, 17, [4, 5, 6]), SequenceSpan(1, 1, 30, [4, 5, 8, 9])))
    assert [name for name, _ in library.calls] == ["decode.plan", "decode.run"]


def test_a_prefix_of_some_sequences_is_not_shared() -> None:
    backend, library = make_backend(make_tier())
    spans = (
        SequenceSpan(0, 1, 17, [4, 5, 6]),
        SequenceSpan(1, 1, 30, [4, 5, 8, 9]),
        SequenceSpan(2, 1, 3, [10]),
    )
    run(backend, spans)
    assert [name for name, _ in library.calls] == ["decode.plan", "decode.run"]


def test_a_step_is_planned_once_for_each_scaling() -> None:
    backend, library = make_backend(make_tier())
    run(backend, (SequenceSpan(0, 1, 3, [4]),), scalings=(0.5, 0.5, 0.25))
    assert [name for name, _ in library.calls] == [
        "decode.plan", "decode.run", "decode.run", "decode.plan", "decode.run",
    ]  # fmt: skip
    assert library.calls[3][1]["sm_scale"] == 0.25


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float16", torch.bfloat16), ("float32", torch.float32)]
)
def test_one_half_precision_type_is_needed(stored: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="half-precision"):
        FlashInferBackend(make_tier(stored), HEADS, dtype, library=RecordingLibrary())
