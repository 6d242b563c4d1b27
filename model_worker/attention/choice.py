"""Which attention backend a worker takes: a pure choice, and the building of what was chosen.

Owns the limits of each backend and their order. Triton comes first: it alone can be captured in
CUDA graphs, reads int8 and float32 without rounding them on the way, and reads a shared prefix
once. Knows nothing of requests.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass

import torch

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.attention.sdpa import SdpaBackend

HALF = ("float16", "bfloat16")
FLASHINFER_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a backend is asked to serve. ``capability``: of the CUDA device, (0, 0) elsewhere."""

    device_type: str
    capability: tuple[int, int]
    dtype: str  # of the model, as torch names it
    kv_dtype: str  # of the pool
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    name: str
    reason: str


def choose_attention(needs: AttentionNeeds, available: frozenset[str]) -> AttentionChoice:
    """The first backend that can serve ``needs``. ``available``: of "triton", "flashinfer" and
    "varlen", those that are installed."""
    if needs.device_type == "cpu":
        if needs.dtype == "float32":
            return AttentionChoice("cpu", "the device is a CPU")
        return AttentionChoice("sdpa", f"no {needs.dtype} in the kernels for CPUs")
    refusals: list[str] = []
    for name, refuse in (
        ("triton", _refuse_triton),
        ("flashinfer", _refuse_flashinfer),
        ("varlen", _refuse_varlen),
    ):
        refusal = "not installed" if name not in available else refuse(needs)
        if refusal is None:
            return AttentionChoice(name, "; ".join(refusals) or "the first choice on this device")
        refusals.append(f"{name}: {refusal}")
    return AttentionChoice("sdpa", "; ".join(refusals))


def _refuse_triton(needs: AttentionNeeds) -> str | None:
    if needs.device_type != "cuda":
        return f"not on {needs.device_type}"
    if needs.capability < ((8, 0) if needs.dtype == "bfloat16" else (7, 0)):
        return f"no {needs.dtype} on compute capability {_dotted(needs.capability)}"
    if needs.head_dim > 256:
        return f"heads of {needs.head_dim} elements, the limit is 256"
    if needs.num_heads // needs.num_kv_heads > 128:
        return "more than 128 query heads to a kv head"
    if needs.block_size & (needs.block_size - 1):
        return f"--block-size {needs.block_size} is no power of two"
    return None


def _refuse_flashinfer(needs: AttentionNeeds) -> str | None:
    if needs.capability < (8, 0):
        return f"compute capability {_dotted(needs.capability)}, 8.0 is needed"
    if needs.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"heads of {needs.head_dim} elements"
    return _refuse_unless_half(needs)


def _refuse_varlen(needs: AttentionNeeds) -> str | None:
    if needs.capability < (8, 0):
        return f"compute capability {_dotted(needs.capability)}, 8.0 is needed"
    if needs.head_dim > 256 or needs.head_dim % 8:
        return f"heads of {needs.head_dim} elements"
    if needs.block_size % 256:
        return f"--block-size {needs.block_size} is no multiple of 256"
    return _refuse_unless_half(needs)


def _refuse_unless_half(needs: AttentionNeeds) -> str | None:
    if needs.dtype not in HALF:
        return f"no {needs.dtype}"
    return None if needs.kv_dtype == needs.dtype else f"no {needs.kv_dtype} KV"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def available_libraries() -> frozenset[str]:
    """What is installed, found without importing it."""
    found = {name for name in ("triton", "flashinfer") if importlib.util.find_spec(name)}
    if has_paged_varlen():
        found.add("varlen")
    return frozenset(found)


def has_paged_varlen() -> bool:
    """Whether this torch's varlen_attn reads a paged pool without splitting it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "seqused_k", "num_splits"} <= set(
        inspect.signature(varlen_attn).parameters
    )


def needs_of(tier: DeviceTier, num_heads: int, dtype: torch.dtype) -> AttentionNeeds:
    device = tier.keys.device
    is_cuda = device.type == "cuda"
    return AttentionNeeds(
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if is_cuda else (0, 0),
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=tier.spec.dtype,
        head_dim=tier.spec.head_dim,
        num_heads=num_heads,
        num_kv_heads=tier.spec.num_kv_heads,
        block_size=tier.spec.block_size,
    )


def build_attention(
    name: str, tier: DeviceTier, num_heads: int, dtype: torch.dtype
) -> AttentionBackend:
    """The backend of that name over the tier; libraries are imported here.

    Raises ImportError where one cannot be, ValueError beyond a backend's limits.
    """
    if name == "cpu":
        from model_worker.attention.cpu import CpuBackend

        return CpuBackend(tier)
    if name == "triton":
        from model_worker.attention.triton import TritonBackend

        return TritonBackend(tier, num_heads, dtype)
    if name == "flashinfer":
        from model_worker.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(tier, num_heads, dtype)
    if name == "varlen":
        from model_worker.attention.varlen import VarlenBackend

        return VarlenBackend(tier)
    assert name == "sdpa", name
    return SdpaBackend(tier)
