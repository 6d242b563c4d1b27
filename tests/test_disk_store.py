"""What the disk store promises its caller: what was written is read, what was erased is gone, the
folder stays within its limit, and a failed write leaves nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

from cache_store.cipher import Cipher
from cache_store.tiers import disk_io
from cache_store.tiers.disk_format import CorruptBlock, DiskFormat, DiskStoreError
from cache_store.tiers.disk_store import DiskStore
from tests.disk_kit import (
    CIPHERS,
    FORMAT,
    chain,
    file_bytes,
    files_in,
    first_block,
    folder_bytes,
    get,
    max_bytes_for,
    num_descriptors,
    open_store,
    payload,
    put,
    raw_content,
    the_file,
)


@pytest.fixture(params=CIPHERS, ids=("plain", "sealed"))
def cipher(request: pytest.FixtureRequest) -> Cipher | None:
    param: Cipher | None = request.param
    return param


@pytest.fixture(params=(True, False), ids=("holes", "zeros"))
def can_punch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    param: bool = request.param
    if not param:
        monkeypatch.setattr(disk_io, "punch_hole", lambda *_: False)
    return param


def test_round_trip_and_restart(tmp_path: Path, cipher: Cipher | None) -> None:
    store, _ = open_store(tmp_path, cipher=cipher)
    keys = [*chain(1, 5, num_last=3), *chain(2, 2)]
    slots = put(store, keys, first_slot=7)
    assert [get(store, slots[key], key) for key in keys] == [payload(key) for key in keys]
    assert store.usage_bytes == file_bytes(tmp_path)
    store.close()
    store, slots = open_store(tmp_path, cipher=cipher)
    assert set(slots) == set(keys)
    assert [get(store, slots[key], key) for key in keys] == [payload(key) for key in keys]
    assert store.usage_bytes == file_bytes(tmp_path)
    store.close()


def test_buffers_of_numpy(tmp_path: Path) -> None:
    format = DiskFormat("f", "h", 4, 4000, "exact:float32")
    store = DiskStore(tmp_path, format, 1 << 20)
    store.scan()
    values = np.arange(1000, dtype=np.float32).reshape(10, 100)
    key = first_block(1)
    store.write([(0, key, values.data)])
    into = np.zeros((10, 100), dtype=np.float32)
    store.read(0, key, into.data)
    assert (into == values).all()
    store.close()


def test_a_payload_of_another_size_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    key = first_block(1)
    with pytest.raises(AssertionError, match="a payload of 3 bytes"):
        store.write([(0, first_block(2), payload(first_block(2))), (1, key, b"abc")])
    with pytest.raises(AssertionError, match="3 bytes for a payload of 5000"):
        store.read(0, key, bytearray(3))
    assert files_in(tmp_path) == []
    assert store.usage_bytes == 0
    store.close()


def test_one_batch_is_one_private_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    store, _ = open_store(folder)
    put(store, chain(1, 6))
    path = the_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for parent in (path.parent, path.parent.parent, folder):
        assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    store.write([])
    assert files_in(folder) == [path]
    store.close()


def test_folders_that_others_can_read_are_closed_to_them(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    put(store, chain(1, 1))
    store.close()
    folder = the_file(tmp_path).parent
    folder.chmod(0o755)
    open_store(tmp_path)[0].close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("wrong", ["root_hash", "parent_hash", "block_hash", "tokens"])
def test_another_key_is_not_served(tmp_path: Path, cipher: Cipher | None, wrong: str) -> None:
    store, _ = open_store(tmp_path, cipher=cipher)
    key = first_block(1)
    put(store, [key])
    value = bytearray(getattr(key, wrong))
    value[-1] ^= 1
    with pytest.raises(CorruptBlock):
        get(store, 0, dataclasses.replace(key, **{wrong: bytes(value)}))
    with pytest.raises(CorruptBlock):
        get(store, 0, dataclasses.replace(key, tokens=key.tokens[:-4]))
    assert get(store, 0, key) == payload(key)
    store.close()


def test_an_empty_slot_and_a_vanished_file_are_errors(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    key = first_block(1)
    with pytest.raises(CorruptBlock, match="slot 3 of the disk cache holds no block"):
        get(store, 3, key)
    put(store, [key])
    the_file(tmp_path).unlink()
    with pytest.raises(DiskStoreError, match="No such file"):
        get(store, 0, key)
    store.delete([0])
    assert store.usage_bytes == 0
    store.close()


def test_deleted_bytes_are_gone_at_once(
    tmp_path: Path, cipher: Cipher | None, can_punch: bool
) -> None:
    store, _ = open_store(tmp_path, cipher=cipher)
    keys = chain(1, 6)
    slots = put(store, keys)
    needles = [(key.tokens, payload(key)[100:300]) for key in keys]
    for deleted in ([1, 2], [5], [3], [0], [4]):  # in the middle, the end, ...
        before_this = store.usage_bytes
        store.delete(deleted)
        raw = raw_content(tmp_path)
        for slot in deleted:
            assert not any(needle in raw for needle in needles[slot])
            del slots[keys[slot]]
        for key, slot in slots.items():
            assert get(store, slot, key) == payload(key)
            assert (key.tokens in raw) is (cipher is None)
            assert (payload(key)[100:300] in raw) is (cipher is None)
        assert store.usage_bytes == file_bytes(tmp_path) <= before_this
        if can_punch:
            assert store.usage_bytes < before_this
    assert files_in(tmp_path) == []
    assert store.usage_bytes == 0
    store.close()


def test_a_deleted_block_does_not_come_back(tmp_path: Path, can_punch: bool) -> None:
    store, _ = open_store(tmp_path)
    keys = [first_block(seed) for seed in range(5)]
    put(store, keys)
    store.delete([1, 4])
    store.delete([1, 4, 60])  # empty already
    store.close()
    store, slots = open_store(tmp_path)
    assert set(slots) == {keys[0], keys[2], keys[3]}
    store.close()


def test_where_erasing_fails_the_whole_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store(tmp_path)
    keys = chain(1, 3)
    put(store, keys)

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_io, "punch_hole", fail)
    store.delete([1])
    assert files_in(tmp_path) == []
    assert store.usage_bytes == 0
    with pytest.raises(CorruptBlock):
        get(store, 0, keys[0])
    store.delete([0, 2])
    store.close()


def test_a_file_that_cannot_be_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store(tmp_path)
    put(store, chain(1, 1))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(DiskStoreError, match=r"cannot delete .*: Read-only file system"):
            store.delete([0])
    assert store.usage_bytes == file_bytes(tmp_path) > 0
    store.close()


def test_the_limit_holds_in_the_worst_order(tmp_path: Path, can_punch: bool) -> None:
    """Batches of four of which the last block alone stays: the files are nearly all holes."""
    num_slots = 12
    store, _ = open_store(tmp_path, num_slots)
    held: dict[int, int] = {}  # slots by number of the block
    for number in range(0, 160, 4):
        if len(held) > num_slots - 4:
            store.delete([held.pop(min(held))])
        free = sorted(set(range(num_slots)) - set(held.values()))[:4]
        batch = dict(zip(range(number, number + 4), free, strict=True))
        store.write(
            [(s, first_block(seed), payload(first_block(seed))) for seed, s in batch.items()]
        )
        held |= batch
        assert folder_bytes(tmp_path) <= max_bytes_for(num_slots)
        assert store.usage_bytes == file_bytes(tmp_path)
        store.delete([held.pop(number + i) for i in range(3)])
        for seed, slot in held.items():
            assert get(store, slot, first_block(seed)) == payload(first_block(seed))
    assert len(held) == 9
    store.close()


def test_a_file_has_its_name_only_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = open_store(tmp_path)
    seen: list[list[tuple[str, int]]] = []

    def fsync(_: int) -> None:
        seen.append([(path.suffix, path.stat().st_size) for path in files_in(tmp_path)])

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, chain(1, 3))
    size = 4096 + 3 * 8192
    assert seen == [[(".tmp", size)], [(".kv", size)]]
    store.close()


def test_all_slots_one_by_one_and_one_more(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, 5)
    for slot in range(5):
        put(store, [first_block(slot)], slot)
    assert folder_bytes(tmp_path) <= max_bytes_for(5)
    with pytest.raises(AssertionError, match="slot 5 of 5"):
        put(store, [first_block(9)], 5)
    put(store, [first_block(9)], 2)  # takes the place of what was there
    assert len(files_in(tmp_path)) == 5
    assert get(store, 2, first_block(9)) == payload(first_block(9))
    store.close()


def test_five_restarts_do_not_grow(tmp_path: Path, cipher: Cipher | None) -> None:
    prompts = [chain(seed, 4, num_last=1 + seed % 4) for seed in range(20)]
    keys = [key for prompt in prompts for key in prompt]
    sizes = []
    for _ in range(6):
        store, slots = open_store(tmp_path, 100, cipher)
        missing = [key for key in keys if key not in slots]
        for start in range(0, len(missing), 16):
            slots |= put(store, missing[start : start + 16], len(slots))
        assert len(slots) == 80
        assert all(get(store, slot, key) == payload(key) for key, slot in slots.items())
        sizes.append(folder_bytes(tmp_path))
        store.close()
    assert len(set(sizes)) == 1


def test_a_smaller_limit_keeps_what_was_stored_last(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, 20)
    old, new = chain(1, 5), chain(2, 4)
    put(store, old)
    put(store, new, 5)
    store.close()
    store, slots = open_store(tmp_path, 6)
    assert list(slots) == [old[0], new[0], old[1], *new[1:]]
    assert folder_bytes(tmp_path) <= max_bytes_for(6)
    assert all(get(store, slot, key) == payload(key) for key, slot in slots.items())
    store.close()


def failing_write(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The device takes ``num_bytes`` more, the last call only in part, and is full then."""
    left = [num_bytes]
    real = os.pwritev

    def pwritev(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        joined = b"".join(parts)[: left[0]]
        left[0] -= len(joined)
        return real(descriptor, [joined], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("num_bytes", [0, 10, 4096, 4100, 9000, 4096 + 2 * 8192 + 100])
def test_a_full_device_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    store, _ = open_store(tmp_path)
    put(store, [first_block(9)], 10)
    before = store.usage_bytes, files_in(tmp_path), num_descriptors()
    keys = chain(1, 4)
    with monkeypatch.context() as patch:
        failing_write(patch, num_bytes)
        with pytest.raises(DiskStoreError, match="cannot write: No space left on device"):
            put(store, keys)
    assert (store.usage_bytes, files_in(tmp_path), num_descriptors()) == before
    with pytest.raises(CorruptBlock):
        get(store, 0, keys[0])
    put(store, keys)
    assert get(store, 3, keys[3]) == payload(keys[3])
    store.close()


def test_a_file_larger_than_the_process_may_write(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DiskStoreError, match="cannot write: File too large"):
            put(store, chain(1, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(tmp_path) == []
    assert store.usage_bytes == 0
    store.close()


@pytest.mark.parametrize("failing_call", [1, 2], ids=("file", "folder"))
def test_what_is_not_durable_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    store, _ = open_store(tmp_path)
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing_call:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskStoreError, match="cannot write: Input/output error"):
        put(store, chain(1, 2))
    assert len(calls) == failing_call
    assert files_in(tmp_path) == []
    assert store.usage_bytes == 0
    store.close()


def test_calls_that_are_cut_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda d, parts, o: pwritev(d, [bytes(parts[0])[:999]], o))
    monkeypatch.setattr(os, "preadv", lambda d, parts, o: preadv(d, [parts[0][:777]], o))
    store, _ = open_store(tmp_path)
    keys = chain(1, 3)
    put(store, keys)
    assert [get(store, slot, key) for slot, key in enumerate(keys)] == [payload(k) for k in keys]
    store.close()


def test_a_limit_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskStoreError, match="28735 bytes holds no block: one takes 28736 bytes"):
        DiskStore(tmp_path, FORMAT, max_bytes_for(1) - 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(DiskStoreError, match=r"the disk cache folder .*/file cannot be used: "):
        DiskStore(path, FORMAT, 1 << 20)
    assert path.read_text() == "mine"


def test_a_store_is_scanned_first_and_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FORMAT, 1 << 20)
    with pytest.raises(AssertionError, match="scan first"):
        put(store, chain(1, 1))
    assert store.scan() == []
    with pytest.raises(AssertionError, match="scanned once"):
        store.scan()
    store.close()
    store.close()


def test_no_descriptor_leaks(tmp_path: Path, cipher: Cipher | None) -> None:
    before = num_descriptors()
    for seed in range(5):
        store, slots = open_store(tmp_path, cipher=cipher)
        for key, slot in put(store, chain(seed, 4), len(slots)).items():
            get(store, slot, key)
            with pytest.raises(CorruptBlock):
                get(store, slot, first_block(99))
        store.delete([len(slots) + 1])
        store.close()
        assert num_descriptors() == before
