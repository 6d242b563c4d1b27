"""Which backend is chosen, and why; each limit on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_worker.attention.choice import (
    AttentionNeeds,
    available_libraries,
    build_attention,
    choose_attention,
    has_paged_varlen,
    needs_of,
)
from model_worker.attention.cpu import CpuBackend
from model_worker.attention.sdpa import SdpaBackend
from tests.device_kit import make_spec, make_tier

LLAMA = AttentionNeeds("cuda", (9, 0), "bfloat16", "bfloat16", 128, 32, 8, 32)
ALL = frozenset({"triton", "flashinfer", "varlen"})


def test_the_cpu_has_a_backend_of_its_own() -> None:
    on_cpu = replace(LLAMA, device_type="cpu", capability=(0, 0))
    choice = choose_attention(replace(on_cpu, dtype="float32"), ALL)
    assert (choice.name, choice.reason) == ("cpu", "the device is a CPU")
    choice = choose_attention(replace(on_cpu, dtype="bfloat16"), ALL)
    assert (choice.name, choice.reason) == ("sdpa", "no bfloat16 in the kernels for CPUs")


def test_triton_comes_first() -> None:
    choice = choose_attention(LLAMA, ALL)
    assert (choice.name, choice.reason) == ("triton", "the first choice on this device")
    for needs in (
        replace(LLAMA, dtype="float32", kv_dtype="float32"),
        replace(LLAMA, kv_dtype="int8"),
        replace(LLAMA, head_dim=80),
        replace(LLAMA, dtype="float16", kv_dtype="float16", capability=(7, 5)),
    ):
        assert choose_attention(needs, ALL).name == "triton"


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (replace(LLAMA, block_size=48), "triton: --block-size 48 is no power of two"),
        (replace(LLAMA, num_heads=1032), "triton: more than 128 query heads to a kv head"),
    ],
)
def test_flashinfer_where_triton_cannot(needs: AttentionNeeds, reason: str) -> None:
    choice = choose_attention(needs, ALL)
    assert (choice.name, choice.reason) == ("flashinfer", reason)


def test_flashinfer_where_triton_is_missing() -> None:
    choice = choose_attention(LLAMA, ALL - {"triton"})
    assert (choice.name, choice.reason) == ("flashinfer", "triton: not installed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 80}, "heads of 80 elements"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "no float32"),
        ({"kv_dtype": "int8"}, "no int8 KV"),
        ({"capability": (7, 5)}, "compute capability 7.5, 8.0 is needed"),
    ],
)
def test_what_flashinfer_cannot_goes_to_the_reference(
    change: dict[str, object], reason: str
) -> None:
    choice = choose_attention(replace(LLAMA, **change), frozenset({"flashinfer"}))  # type: ignore[arg-type]
    assert choice.name == "sdpa"
    assert choice.reason == (f"triton: not installed; flashinfer: {reason}; varlen: not installed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"head_dim": 80}, None),
        ({"block_size": 128}, "--block-size 128 is no multiple of 256"),
        ({"head_dim": 264}, "heads of 264 elements"),
        ({"head_dim": 100}, "heads of 100 elements"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "no float32"),
        ({"kv_dtype": "int8"}, "no int8 KV"),
        ({"capability": (7, 5)}, "compute capability 7.5, 8.0 is needed"),
    ],
)
def test_varlen_within_its_limits(change: dict[str, object], reason: str | None) -> None:
    needs = replace(LLAMA, **{"block_size": 512, **change})  # type: ignore[arg-type]
    choice = choose_attention(needs, frozenset({"varlen"}))
    if reason is None:
        assert choice.name == "varlen"
    else:
        assert choice.name == "sdpa"
        assert choice.reason.endswith(f"varlen: {reason}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "xpu"}, "triton: not on xpu"),
        ({"capability": (7, 5)}, "triton: no bfloat16 on compute capability 7.5"),
        ({"head_dim": 320}, "triton: heads of 320 elements, the limit is 256"),
    ],
)
def test_what_triton_cannot(change: dict[str, object], reason: str) -> None:
    choice = choose_attention(replace(LLAMA, **change), frozenset({"triton"}))  # type: ignore[arg-type]
    assert choice.name == "sdpa"
    assert choice.reason.startswith(reason)


def test_the_needs_of_a_pool() -> None:
    tier = make_tier(make_spec("int8"))
    needs = needs_of(tier, 6, torch.float32)
    assert needs == AttentionNeeds("cpu", (0, 0), "float32", "int8", 8, 6, 2, 4)


def test_backends_are_built_by_name() -> None:
    tier = make_tier(make_spec())
    assert isinstance(build_attention("cpu", tier, 2, torch.float32), CpuBackend)
    assert isinstance(build_attention("sdpa", tier, 2, torch.float32), SdpaBackend)
    with pytest.raises(ValueError, match="no multiple of 256"):
        build_attention("varlen", tier, 2, torch.float32)
    with pytest.raises(ValueError, match="half-precision"):
        build_attention("flashinfer", tier, 2, torch.float32)


def test_features_are_found_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    found = available_libraries()
    assert found <= ALL
    assert ("varlen" in found) == has_paged_varlen()
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def without_tables(query: object, key: object, num_splits: int | None = None) -> None:
        """As older versions have it."""

    monkeypatch.setattr(varlen, "varlen_attn", without_tables)
    assert not has_paged_varlen()
    assert "varlen" not in available_libraries()
