"""Whole blocks out of the device's tensors and into them: every way of copying gives the same
bytes, the CPU's in place and the staged one, here with streams that write down their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cache_store.tiers import staged_blocks
from cache_store.tiers.codec import BlockView, PayloadRows, make_codec
from cache_store.tiers.device import DeviceTier
from cache_store.tiers.device_blocks import CpuBlocks, DeviceBlocks, device_blocks
from cache_store.tiers.payload_coder import payload_coder
from cache_store.tiers.staged_blocks import StagedBlocks
from tests.device_kit import STORED_DTYPES, make_spec, make_tier

CASES = [
    (dtype, name) for dtype in STORED_DTYPES for name in ("exact", "int8") if dtype != "int8"
] + [("int8", "exact")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
WAYS = ["cpu", "staged", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


class ScriptedStream:
    """Work is done at once; ``log`` tells what was marked and waited for, and by whom."""

    def __init__(self, name: str, log: list[tuple[str, object]]) -> None:
        self.name = name
        self.log = log
        self.num_marks = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        self.log.append((self.name, "work"))
        yield

    def mark(self) -> str:
        self.num_marks += 1
        return f"{self.name}{self.num_marks}"

    def wait(self, mark: str) -> None:
        self.log.append((self.name, mark))

    def synchronize(self) -> None:
        self.log.append((self.name, "end"))


def staged(tier: DeviceTier, codec_name: str, log: list[tuple[str, object]]) -> DeviceBlocks:
    return StagedBlocks(
        tier,
        make_codec(codec_name, tier.spec),
        copying=ScriptedStream("copy", log),
        coding=ScriptedStream("code", log),
    )


def tier_and_blocks(way: str, dtype: str, codec: str, seed: int) -> tuple[DeviceTier, DeviceBlocks]:
    tier = make_tier(make_spec(dtype), num_blocks=9, seed=seed)
    if way == "staged":
        return tier, staged(tier, codec, [])
    if way == "cuda":
        there = DeviceTier(tier.spec, 9, torch.device("cuda"))
        for source, target in zip(tier.tensors, there.tensors, strict=True):
            target.copy_(source)
        tier = there
    return tier, device_blocks(tier, make_codec(codec, tier.spec))


def contents(tier: DeviceTier) -> list[torch.Tensor]:
    return [tensor.cpu().clone() for tensor in tier.tensors]


def encoded(tier: DeviceTier, codec_name: str, block_id: int) -> bytes:
    """A payload as the format says: parts heads first, in C order."""
    parts = [tensor[:, block_id].cpu().transpose(1, 2).contiguous() for tensor in tier.tensors]
    raw = [part.view(torch.uint8).numpy() for part in parts]
    raw = [part if part.ndim == 4 else part.reshape(*part.shape[:2], 4, 4) for part in raw]
    codec = make_codec(codec_name, tier.spec)
    payload = np.zeros(codec.payload_bytes, np.uint8)
    codec.encode(BlockView(*raw), payload)
    return payload.tobytes()


@pytest.mark.parametrize("step_blocks", [1, 2, 100])
@pytest.mark.parametrize(("dtype", "codec"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_stored_in_their_rows(
    way: str, dtype: str, codec: str, step_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload_bytes = make_codec(codec, make_spec(dtype)).payload_bytes
    monkeypatch.setattr(staged_blocks, "STEP_BYTES", step_blocks * payload_bytes)
    tier, blocks = tier_and_blocks(way, dtype, codec, seed=1)
    before = contents(tier)
    memory = blocks.new_rows(8)
    assert memory.shape == (8, payload_bytes)
    memory[:] = 77
    ids, row_ids = [5, 0, 8, 3, 4, 7], [2, 3, 0, 7, 6, 1]
    blocks.store(ids, PayloadRows(memory, row_ids))
    for block_id, row_id in zip(ids, row_ids, strict=True):
        assert memory[row_id].tobytes() == encoded(tier, codec, block_id)
    assert (memory[[4, 5]] == 77).all()
    assert all(map(torch.equal, contents(tier), before))


@pytest.mark.parametrize("step_blocks", [1, 2, 100])
@pytest.mark.parametrize(("dtype", "codec"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_loaded_into_their_blocks_and_no_other_changes(
    way: str, dtype: str, codec: str, step_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload_bytes = make_codec(codec, make_spec(dtype)).payload_bytes
    monkeypatch.setattr(staged_blocks, "STEP_BYTES", step_blocks * payload_bytes)
    source, from_source = tier_and_blocks(way, dtype, codec, seed=1)
    memory = from_source.new_rows(9)
    from_source.store(range(9), PayloadRows(memory, range(9)))
    tier, blocks = tier_and_blocks(way, dtype, codec, seed=2)
    wanted = contents(tier)
    rows, ids = [4, 5, 6, 0, 8], [1, 0, 7, 8, 3]
    for row_id, block_id in zip(rows, ids, strict=True):
        for target, theirs in zip(wanted, decoded(source, codec, row_id), strict=True):
            target[:, block_id] = theirs
    blocks.load(PayloadRows(memory, rows), ids)
    assert all(map(torch.equal, contents(tier), wanted))


def decoded(source: DeviceTier, codec_name: str, block_id: int) -> list[torch.Tensor]:
    """What a block is after it went down and up again, by the CPU's in-place copy."""
    tier = DeviceTier(source.spec, 1, torch.device("cpu"))
    codec = make_codec(codec_name, source.spec)
    payload = np.frombuffer(encoded(source, codec_name, block_id), np.uint8).reshape(1, -1)
    CpuBlocks(tier, codec).load(PayloadRows(payload, [0]), [0])
    return [tensor[:, 0] for tensor in tier.tensors]


def test_rows_that_were_never_written_may_hold_anything() -> None:
    """NaN and infinity, in what int8 has no number for."""
    tier, blocks = tier_and_blocks("staged", "float32", "int8", seed=1)
    tier.keys[:, 2, 3:] = torch.nan
    tier.values[:, 2, 3:] = torch.inf
    memory = blocks.new_rows(1)
    blocks.store([2], PayloadRows(memory, [0]))
    wanted = np.frombuffer(encoded(tier, "int8", 2), np.uint8).copy()
    codec = make_codec("int8", tier.spec)
    for payload in (memory[0], wanted):
        codec.clear_rows(payload, 3)
    assert memory[0].tobytes() == wanted.tobytes()


def test_what_the_engine_writes_is_what_is_read() -> None:
    """A view is not a copy made at the start."""
    for way in ("cpu", "staged"):
        tier, blocks = tier_and_blocks(way, "float32", "exact", seed=1)
        tier.keys[1, 3, 2, 1] = 5.0
        memory = blocks.new_rows(1)
        blocks.store([3], PayloadRows(memory, [0]))
        assert memory[0].tobytes() == encoded(tier, "exact", 3)


@pytest.mark.parametrize("is_load", [True, False])
def test_a_buffer_is_not_used_again_before_the_other_stream_is_done_with_it(
    is_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams work at once, each a buffer apart, and the host waits at the end only."""
    tier = make_tier(make_spec(), num_blocks=9)
    monkeypatch.setattr(staged_blocks, "STEP_BYTES", make_codec("exact", tier.spec).payload_bytes)
    log: list[tuple[str, object]] = []
    blocks = staged(tier, "exact", log)
    assert blocks.batch_blocks == 1
    memory = np.zeros((4, make_codec("exact", tier.spec).payload_bytes), np.uint8)
    first, second = ("copy", "code") if is_load else ("code", "copy")
    if is_load:
        blocks.load(PayloadRows(memory, range(4)), range(4))
    else:
        blocks.store(range(4), PayloadRows(memory, range(4)))
    wanted: list[tuple[str, object]] = []
    for number in range(1, 5):
        wanted.append((first, "work"))
        if number > 2:  # the buffer's last user, two steps ago
            wanted.append((first, f"{second}{number - 2}"))
        wanted += [(second, "work"), (second, f"{first}{number}")]
    assert log == [*wanted, ("copy", "end"), ("code", "end")]


def test_both_streams_are_waited_for_when_a_copy_fails() -> None:
    log: list[tuple[str, object]] = []
    blocks = staged(make_tier(make_spec()), "exact", log)
    with pytest.raises(RuntimeError, match="bounds"):
        blocks.store([99], PayloadRows(blocks.new_rows(1), [0]))
    assert log[-2:] == [("copy", "end"), ("code", "end")]


def test_the_cpu_copies_in_place() -> None:
    tier = make_tier(make_spec())
    assert isinstance(device_blocks(tier, make_codec("exact", tier.spec)), CpuBlocks)


def test_a_codec_without_a_form_on_the_device_is_refused() -> None:
    tier = make_tier(make_spec())
    with pytest.raises(TypeError, match="no form of odd"):
        payload_coder(tier, OddCodec())


class OddCodec:
    name = "odd"
    payload_bytes = 1

    def encode(self, block: object, payload: object) -> None: ...
    def decode(self, payload: object, block: object) -> None: ...
    def clear_rows(self, payload: object, num_rows: int) -> None: ...
