"""Damage to a segment at every place: a read gives the right bytes or CorruptBlock, and a start
finds what is whole and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cache_store.cipher import Cipher
from cache_store.tiers.disk_format import (
    HEAD_BYTES,
    CorruptBlock,
    DiskFormat,
    DiskStoreError,
    HeadKind,
    RecordCodec,
)
from cache_store.tiers.disk_store import DiskStore
from cache_store.transfer import BlockKey
from tests.disk_kit import (
    CIPHERS,
    FORMAT,
    STRIDE,
    chain,
    first_block,
    folder_bytes,
    get,
    max_bytes_for,
    open_store,
    payload,
    put,
    the_file,
)

KEYS = [first_block(seed) for seed in range(3)]
# In a head, at its end, and in a record: header, meta, payload, padding and the borders of each.
RECORD_CUTS = (0, 1, 8, 15, 16, 17, 60, 123, 124, 125, 150, 2000, 5123, 5124, 5200, 8191)
CUTS = (0, 1, 7, 8, 100, 4095, *(4096 + i * STRIDE + cut for i in range(3) for cut in RECORD_CUTS))


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and a busy disk takes long over each."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=CIPHERS, ids=("plain", "sealed"))
def cipher(request: pytest.FixtureRequest) -> Cipher | None:
    param: Cipher | None = request.param
    return param


@pytest.fixture
def original(tmp_path: Path, cipher: Cipher | None) -> Path:
    """A folder with one file of three blocks."""
    folder = tmp_path / "original"
    store, _ = open_store(folder, cipher=cipher)
    put(store, KEYS)
    store.close()
    return folder


def readable(store: DiskStore, slots: dict[BlockKey, int]) -> set[BlockKey]:
    """The keys that can be read; fails if one gives wrong bytes."""
    found = set()
    for key, slot in slots.items():
        try:
            content = get(store, slot, key)
        except CorruptBlock:
            continue
        assert content == payload(key)
        found.add(key)
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_cut_short_at_start(original: Path, cipher: Cipher | None, cut: int) -> None:
    with the_file(original).open("r+b") as file:
        file.truncate(cut)
    store, slots = open_store(original, cipher=cipher)
    num_whole = max(0, cut - HEAD_BYTES) // STRIDE
    assert set(slots) == readable(store, slots) == set(KEYS[:num_whole])
    assert folder_bytes(original) <= max_bytes_for(3)
    put(store, KEYS, 10)
    assert readable(store, {key: slot for slot, key in enumerate(KEYS, 10)}) == set(KEYS)
    store.close()


@pytest.mark.parametrize("cut", CUTS[3::4])
def test_a_file_cut_short_under_a_live_store(
    original: Path, cipher: Cipher | None, cut: int
) -> None:
    store, slots = open_store(original, cipher=cipher)
    with the_file(original).open("r+b") as file:
        file.truncate(cut)
    codec = RecordCodec(FORMAT, cipher)
    used = codec.lead_bytes + codec.stored_payload_bytes
    whole = {key for i, key in enumerate(KEYS) if cut >= HEAD_BYTES + i * STRIDE + used}
    assert readable(store, slots) == whole
    store.delete(range(2))
    store.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0x41]))


def test_a_flipped_byte_anywhere_in_a_record(original: Path, cipher: Cipher | None) -> None:
    """Each byte of header and meta, and some of the payload, under a live store."""
    codec = RecordCodec(FORMAT, cipher)
    used = codec.lead_bytes + codec.stored_payload_bytes
    assert codec.lead_bytes == (137 if cipher else 124) == 16 + 76 + 16 + (29 if cipher else 16)
    store, slots = open_store(original, cipher=cipher)
    path = the_file(original)
    for offset in (*range(codec.lead_bytes), *range(codec.lead_bytes, used, 331), used - 1):
        flip(path, HEAD_BYTES + STRIDE + offset)
        assert readable(store, slots) == {KEYS[0], KEYS[2]}, f"byte {offset}"
        flip(path, HEAD_BYTES + STRIDE + offset)
    flip(path, HEAD_BYTES + STRIDE + used)  # padding holds nothing
    assert readable(store, slots) == set(KEYS)
    store.close()


@pytest.mark.parametrize("offset", [0, 7, 8, 12, 16, 24, 50, 70, 85, 95, 107, 120])
def test_a_flipped_byte_in_a_lead_at_start(
    original: Path, cipher: Cipher | None, offset: int
) -> None:
    flip(the_file(original), HEAD_BYTES + STRIDE + offset)
    store, slots = open_store(original, cipher=cipher)
    assert set(slots) == readable(store, slots) == {KEYS[0], KEYS[2]}
    store.close()
    content = the_file(original).read_bytes()
    assert not any(content[HEAD_BYTES + STRIDE : HEAD_BYTES + 2 * STRIDE])  # erased


def test_a_flipped_byte_in_a_payload_at_start(original: Path, cipher: Cipher | None) -> None:
    flip(the_file(original), HEAD_BYTES + STRIDE + 1000)
    store, slots = open_store(original, cipher=cipher)
    assert set(slots) == set(KEYS)  # a start reads no payloads
    assert readable(store, slots) == {KEYS[0], KEYS[2]}
    store.close()


def test_a_flipped_byte_anywhere_in_a_head(original: Path, cipher: Cipher | None) -> None:
    codec = RecordCodec(FORMAT, cipher)
    head = the_file(original).read_bytes()[:HEAD_BYTES]
    num_used = len(head.rstrip(b"\0"))
    assert codec.head_kind(head) is HeadKind.SAME
    for offset in range(num_used):
        damaged = bytearray(head)
        damaged[offset] ^= 0x41
        expected = HeadKind.NOT_OURS if offset < 8 else HeadKind.OTHER
        assert codec.head_kind(bytes(damaged)) is expected, f"byte {offset}"
    for cut in range(num_used):
        expected = HeadKind.NOT_OURS if cut < 8 else HeadKind.OTHER
        assert codec.head_kind(head[:cut]) is expected, f"cut at {cut}"


@pytest.mark.parametrize("offset", [0, 8, 60])
def test_a_damaged_head_at_start(original: Path, cipher: Cipher | None, offset: int) -> None:
    flip(the_file(original), offset)
    store, slots = open_store(original, cipher=cipher)
    assert slots == {}
    store.close()


@pytest.mark.parametrize("part", ["lead", "payload"])
def test_records_in_each_others_place(original: Path, cipher: Cipher | None, part: str) -> None:
    """A whole record is itself wherever it lies; a payload beside another's key is nobody's."""
    codec = RecordCodec(FORMAT, cipher)
    start, end = (0, codec.lead_bytes) if part == "lead" else (codec.lead_bytes, STRIDE)
    content = bytearray(the_file(original).read_bytes())
    first, second = HEAD_BYTES, HEAD_BYTES + STRIDE
    one, other = content[first + start : first + end], content[second + start : second + end]
    content[first + start : first + end], content[second + start : second + end] = other, one
    the_file(original).write_bytes(content)
    store, slots = open_store(original, cipher=cipher)
    assert readable(store, slots) == {KEYS[2]}
    store.close()


def test_a_record_of_another_format_with_the_same_key_does_not_open(cipher: Cipher | None) -> None:
    other = DiskFormat("model-b", FORMAT.hash_version, 4, 5000, FORMAT.codec)
    assert other.digest != FORMAT.digest
    parts = RecordCodec(other, cipher).encode(KEYS[0], 1.0, payload(KEYS[0]))
    codec = RecordCodec(FORMAT, cipher)
    lead = b"".join(parts)[: codec.lead_bytes]
    if cipher is None:  # the heads tell plain files apart
        assert codec.head_kind(RecordCodec(other, None).head) is HeadKind.OTHER
    else:
        with pytest.raises(CorruptBlock):
            codec.decode_lead(lead)


def test_nothing_is_in_clear_under_a_key(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, cipher=CIPHERS[1])
    keys = chain(1, 3, num_last=2)
    put(store, keys)
    content = the_file(tmp_path).read_bytes()
    for key in keys:
        for secret in (key.tokens, key.tokens[:4], key.block_hash, key.root_hash, payload(key)[:8]):
            assert secret not in content
    store.close()


def test_errors_and_reprs_hold_no_tokens(tmp_path: Path) -> None:
    key = first_block(1)
    assert "tokens" not in repr(key)
    store, slots = open_store(tmp_path)
    slots = put(store, [key])
    flip(the_file(tmp_path), HEAD_BYTES + 100)
    with pytest.raises(CorruptBlock, match=r"^a record on disk does not match its checksum$"):
        get(store, slots[key], key)
    store.close()


@pytest.mark.parametrize("field", ["block_size", "payload_bytes"])
def test_sizes_are_positive(field: str) -> None:
    sizes = {"block_size": 4, "payload_bytes": 4, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        DiskFormat("f", "h", codec="int8", **sizes)


def test_a_fingerprint_too_long_for_a_head_is_refused(tmp_path: Path) -> None:
    format = DiskFormat("f" * 5000, "h", 4, 4, "int8")
    with pytest.raises(DiskStoreError, match="fingerprint is too long"):
        DiskStore(tmp_path, format, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_in_a_copied_folder(original: Path, cipher: Cipher | None) -> None:
    copy = original.parent / "copy"
    shutil.copytree(original, copy)
    store, slots = open_store(copy, cipher=cipher)
    assert readable(store, slots) == set(KEYS)
    store.close()
