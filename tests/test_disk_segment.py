"""Closing the holes of a segment, also by a process that is killed in the middle of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cache_store.tiers.disk_format import HEAD_BYTES, CorruptBlock, RecordCodec
from cache_store.tiers.disk_segment import ENTRY_BYTES, Segment, Space
from tests.disk_kit import CIPHERS, FORMAT, STRIDE, first_block, open_store, payload

KEYS = [first_block(seed) for seed in range(6)]


def new_segment(folder: Path, space: Space) -> Segment:
    codec = RecordCodec(FORMAT, CIPHERS[1])
    blocks = [(key, payload(key)) for key in KEYS]
    return Segment.create(folder / ("0" * 24 + ".kv"), codec, space, blocks, 5.0)


def erase(segment: Segment, indices: Sequence[int]) -> None:
    segment.erase([record for i in indices if (record := segment.records[i]) is not None])


@pytest.mark.parametrize("dead", [(0,), (0, 1, 2), (1, 3), (4, 5), (0, 2, 4), (5, 0), (1, 2, 3, 4)])
def test_the_live_records_stay_and_the_file_is_dense(tmp_path: Path, dead: tuple[int, ...]) -> None:
    space = Space()
    segment = new_segment(tmp_path, space)
    kept = {key: segment.records[i] for i, key in enumerate(KEYS) if i not in dead}
    erase(segment, dead)
    segment.close_holes()
    assert segment.num_holes == 0
    size = HEAD_BYTES + len(kept) * STRIDE
    assert segment.path.stat().st_size == size
    assert (space.charged_bytes, space.real_bytes) == (size + ENTRY_BYTES, size)
    into = bytearray(FORMAT.payload_bytes)
    for key, record in kept.items():
        assert record is not None
        segment.read(record.index, key, memoryview(into))
        assert into == payload(key)


def test_a_dead_file_is_removed(tmp_path: Path) -> None:
    space = Space()
    segment = new_segment(tmp_path, space)
    records = list(segment.records)
    erase(segment, range(6))
    assert list(tmp_path.iterdir()) == []
    assert (space.charged_bytes, space.real_bytes) == (0, 0)
    assert [record.segment for record in records if record] == [None] * 6


class Killed(Exception):
    pass


@pytest.mark.parametrize("num_calls", range(9))
def test_killed_while_holes_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    """Whatever call is the last one, the next start has each live block once and right."""
    store, _ = open_store(tmp_path, cipher=CIPHERS[1])
    store.write([(slot, key, payload(key)) for slot, key in enumerate(KEYS)])
    store.delete([0, 2, 3])
    (segment,) = store._segments.values()
    left = [num_calls]

    def counted(call: str) -> None:
        real = getattr(os, call)

        def last(*arguments: object) -> object:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return real(*arguments)

        monkeypatch.setattr(os, call, last)

    with monkeypatch.context():
        counted("pwritev")
        counted("ftruncate")
        try:
            segment.close_holes()
        except Killed:
            assert num_calls < 9
    monkeypatch.undo()
    store.close()
    store, slots = open_store(tmp_path, cipher=CIPHERS[1])
    assert set(slots) == {KEYS[1], KEYS[4], KEYS[5]}
    into = bytearray(FORMAT.payload_bytes)
    for key, slot in slots.items():
        store.read(slot, key, into)
        assert into == payload(key)
    store.close()


def test_a_half_copied_record_is_no_record(tmp_path: Path) -> None:
    """After a power cut the header of a moved record may be there and the rest not."""
    space = Space()
    segment = new_segment(tmp_path, space)
    erase(segment, [0])
    content = segment.path.read_bytes()
    record = content[HEAD_BYTES + 5 * STRIDE :]
    lead = RecordCodec(FORMAT, CIPHERS[1]).lead_bytes
    with segment.path.open("r+b") as file:
        file.seek(HEAD_BYTES)
        file.write(record[:lead])
    with pytest.raises(CorruptBlock):
        segment.read(0, KEYS[5], memoryview(bytearray(FORMAT.payload_bytes)))
