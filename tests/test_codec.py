"""How blocks are coded below the device: exact bytes, and int8 within half a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.codec import BlockCodec, Payload, PayloadRows, make_codec
from cache_store.tiers.device_blocks import device_blocks
from tests.device_kit import DTYPES, make_spec, make_tier, raw, view_of


def draw(spec: KVCacheSpec, seed: int, scale: float = 1.0) -> torch.Tensor:
    """K and V: (2, layers, kv_heads, block_size, head_dim)."""
    shape = (2, spec.num_layers, spec.num_kv_heads, spec.block_size, spec.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(getattr(torch, spec.dtype))


def encoded(codec: BlockCodec, block: torch.Tensor) -> Payload:
    payload = np.full(codec.payload_bytes, 0xA5, dtype=np.uint8)
    codec.encode(view_of(block[0], block[1]), payload)
    return payload


def decoded(codec: BlockCodec, payload: Payload, like: torch.Tensor) -> torch.Tensor:
    target = torch.full_like(like, 77.0)
    codec.decode(payload, view_of(target[0], target[1]))
    return target


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_bytes_come_back(dtype: str) -> None:
    spec = make_spec(dtype)
    codec = make_codec("exact", spec)
    block = draw(spec, seed=1)
    block[0, 0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    payload = encoded(codec, block)
    assert codec.name == f"exact:{dtype}"
    assert codec.payload_bytes == spec.bytes_per_block
    assert payload.tobytes() == raw(block).tobytes()
    assert raw(decoded(codec, payload, block)).tobytes() == raw(block).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_int8_is_within_half_a_step(dtype: str, scale: float) -> None:
    spec = make_spec(dtype)
    codec = make_codec("int8", spec)
    block = draw(spec, seed=2, scale=scale)
    back = decoded(codec, encoded(codec, block), block).float()
    wanted = block.float()
    step = wanted.abs().amax(-1, keepdim=True) / 127
    # The type that the numbers come back in rounds once more.
    rounding = torch.finfo(block.dtype).eps * wanted.abs() + torch.finfo(block.dtype).tiny
    assert bool(((back - wanted).abs() <= 0.5001 * step + rounding).all())
    assert float((back - wanted).abs().max()) > 0


def test_int8_takes_one_byte_a_number_and_four_a_vector() -> None:
    spec = make_spec("float32")
    codec = make_codec("int8", spec)
    num_vectors = 2 * 3 * 2 * 4
    assert codec.payload_bytes == num_vectors * (8 + 4)
    assert codec.name == "int8"


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_keeps_zeros_and_the_largest_number_of_a_vector(dtype: str) -> None:
    spec = make_spec(dtype)
    codec = make_codec("int8", spec)
    block = draw(spec, seed=3)
    block[0, 1, 1, 2] = 0.0
    block[1, 0, 0, 0] = 0.0
    block[1, 0, 0, 0, 5] = -64.0
    back = decoded(codec, encoded(codec, block), block)
    assert not back[0, 1, 1, 2].any()
    assert back[1, 0, 0, 0].tolist() == block[1, 0, 0, 0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_what_was_int8_loses_nothing_more(dtype: str) -> None:
    spec = make_spec(dtype)
    codec = make_codec("int8", spec)
    block = draw(spec, seed=7)
    payload = encoded(codec, block)
    num_numbers = 2 * 3 * 2 * 4 * 8
    back = block
    for _ in range(5):
        back = decoded(codec, payload, block)
        again = encoded(codec, back)
        assert np.array_equal(again[:num_numbers], payload[:num_numbers])
        payload = again
    first = decoded(codec, encoded(codec, block), block)
    torch.testing.assert_close(back, first, rtol=1e-6, atol=0)


def test_int8_vectors_do_not_share_a_scale() -> None:
    spec = make_spec("float32")
    codec = make_codec("int8", spec)
    block = torch.zeros(2, 3, 2, 4, 8)
    block[0, 0, 0, 0] = 1e6
    block[0, 0, 0, 1] = 1e-6  # the next token of the same head
    block[0, 0, 1, 0] = 2.0  # the next head of the same token
    back = decoded(codec, encoded(codec, block), block)
    torch.testing.assert_close(back, block, rtol=1e-6, atol=0)


def test_bfloat16_is_rounded_to_nearest_even_as_torch_does() -> None:
    """One vector per number n: (127, n) has the step 1, or (127 * s, n * s) the step s."""
    spec = KVCacheSpec(64, 1, 1, 2, "bfloat16", 2)
    codec = make_codec("int8", spec)
    block = torch.zeros(2, 1, 1, 64, 2, dtype=torch.bfloat16)
    steps = torch.linspace(0.7, 1.3, 64)
    block[0, 0, 0, :, 0] = 127 * steps
    block[0, 0, 0, :, 1] = 100.4 * steps
    payload = encoded(codec, block)
    back = decoded(codec, payload, block)
    numbers = torch.from_numpy(payload[:256].view(np.int8).reshape(2, 1, 1, 64, 2).copy())
    scales = torch.from_numpy(payload[256:].view(np.float32).reshape(2, 1, 1, 64).copy())
    assert torch.equal(back, (numbers.float() * scales[..., None]).to(torch.bfloat16))
    assert set(numbers[0, 0, 0, :, 0].tolist()) == {127}


@pytest.mark.parametrize("name", ["exact", "int8"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_cleared_rows_leave_nothing_of_an_earlier_owner(name: str, num_rows: int) -> None:
    spec = make_spec("float32")
    codec = make_codec(name, spec)
    block, other = draw(spec, seed=4), draw(spec, seed=5)
    other[:, :, :, :num_rows] = block[:, :, :, :num_rows]
    payloads = [encoded(codec, block), encoded(codec, other)]
    assert payloads[0].tobytes() != payloads[1].tobytes()
    for payload in payloads:
        codec.clear_rows(payload, num_rows)
    assert payloads[0].tobytes() == payloads[1].tobytes()
    back = decoded(codec, payloads[0], block)
    assert not back[:, :, :, num_rows:].any()
    kept = decoded(codec, encoded(codec, block), block)[:, :, :, :num_rows]
    assert torch.equal(back[:, :, :, :num_rows], kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_never_written_do_not_disturb_the_others(dtype: str) -> None:
    """Fresh memory may hold anything: no warning comes of it, and good rows are as good."""
    spec = make_spec(dtype)
    codec = make_codec("int8", spec)
    block = draw(spec, seed=6)
    dirty = block.clone()
    dirty[:, :, :, 2:] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 2)
    back = decoded(codec, encoded(codec, dirty), block)
    clean = decoded(codec, encoded(codec, block), block)
    assert torch.equal(back[:, :, :, :2], clean[:, :, :, :2])


@pytest.mark.parametrize("name", ["exact", "int8"])
def test_what_the_device_holds_as_int8_is_not_coded_again(name: str) -> None:
    """Numbers of K, of V, scales of K, of V, each heads first; a cleared row has no scale."""
    spec = make_spec("int8")
    codec = make_codec(name, spec)
    assert codec.name == "exact:int8/float32"
    assert codec.payload_bytes == spec.bytes_per_block == 2 * 3 * 2 * 4 * (8 + 4)
    tier = make_tier(spec)
    blocks = device_blocks(tier, codec)
    rows = PayloadRows(np.full((1, codec.payload_bytes), 0xA5, dtype=np.uint8), [0])
    payload = rows.memory[0]
    blocks.store([4], rows)
    parts = [raw(tensor[:, 4].transpose(1, 2)).tobytes() for tensor in tier.tensors]
    assert payload.tobytes() == b"".join(parts)
    blocks.load(rows, [1])
    for tensor in tier.tensors:
        assert torch.equal(tensor[:, 1], tensor[:, 4])
    codec.clear_rows(payload, 3)
    blocks.load(rows, [2])
    for tensor in tier.tensors:
        assert torch.equal(tensor[:, 2, :3], tensor[:, 4, :3])
        assert not tensor[:, 2, 3:].any()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp4' is none of exact, int8"):
        make_codec("fp4", make_spec())
