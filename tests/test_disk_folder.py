"""Several processes and several models in one folder, and what the dead left there."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache_store.cipher import Cipher
from cache_store.tiers import disk_folder
from cache_store.tiers.disk_format import SEGMENT_MAGIC, DiskStoreError
from cache_store.tiers.disk_store import DiskStore
from tests.disk_kit import (
    CIPHERS,
    FORMAT,
    adopt_all,
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

OTHER_FORMAT = dataclasses.replace(FORMAT, fingerprint="model-b")
KEYS = chain(1, 4)
ROOT_FOLDER = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about power cuts, and a busy disk takes long over each."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_a_second_process_reads_what_the_first_has_stored(tmp_path: Path) -> None:
    one, _ = open_store(tmp_path)
    put(one, KEYS)
    two, slots = open_store(tmp_path)
    assert set(slots) == set(KEYS)
    assert all(get(two, slot, key) == payload(key) for key, slot in slots.items())
    assert two.usage_bytes == 0  # the bytes are the first one's
    put(two, chain(2, 2), 10)
    assert {path.parent.name for path in files_in(tmp_path)} == {"0", "1"}
    two.delete(slots.values())
    assert get(one, 0, KEYS[0]) == payload(KEYS[0])
    one.close()
    two.close()


def test_what_the_first_erases_is_a_miss_for_the_second(tmp_path: Path) -> None:
    one, _ = open_store(tmp_path, 5)
    put(one, KEYS)
    two, slots = open_store(tmp_path)
    one.delete([1])
    one.delete([3])
    for slot in range(5):  # the hole is closed: the records lie elsewhere now
        put(one, [first_block(50 + slot)], slot)
    one.delete([0])
    for key, slot in slots.items():
        with pytest.raises(DiskStoreError):
            get(two, slot, key)
    two.discard([])
    two.delete(slots.values())
    one.close()
    two.close()


def test_blocks_of_two_processes_are_one_index_afterwards(tmp_path: Path) -> None:
    """Both have stored the same blocks; one of them also their continuation."""
    one, _ = open_store(tmp_path)
    two, _ = open_store(tmp_path)
    put(one, KEYS)
    put(two, KEYS[:2])
    put(two, KEYS[2:], 10)
    put(two, chain(7, 3), 20)
    one.close()
    two.close()
    store, slots = open_store(tmp_path)
    assert set(slots) == {*KEYS, *chain(7, 3)}
    assert all(get(store, slot, key) == payload(key) for key, slot in slots.items())
    assert [path.name for path in (tmp_path / FORMAT.digest.hex()).iterdir()] == ["0"]
    store.close()
    raw = raw_content(tmp_path)
    assert [raw.count(key.tokens) for key in KEYS] == [1, 1, 1, 1]


def test_a_child_hangs_on_a_parent_of_a_live_process(tmp_path: Path) -> None:
    one, _ = open_store(tmp_path)
    two, _ = open_store(tmp_path)
    put(one, KEYS[:2])
    put(two, KEYS[2:])
    two.close()
    two, slots = open_store(tmp_path)
    assert list(slots) == KEYS
    two.close()
    one.close()


HOLDER = """
import sys
from pathlib import Path
from tests.disk_kit import chain, open_store, put

store, _ = open_store(Path(sys.argv[1]))
put(store, chain(1, 4))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_taken_over_once_its_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT_FOLDER) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        second, slots = open_store(tmp_path)
        assert second._folder.path.name == "1"
        assert set(slots) == set(KEYS)
        second.close()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    store, slots = open_store(tmp_path)
    assert store._folder.path.name == "0"
    assert set(slots) == set(KEYS)
    assert store.usage_bytes == file_bytes(tmp_path) > 0
    store.close()


def test_a_lock_file_that_was_just_removed_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process tidies up between the opening of the file and its locking."""
    flock = fcntl.flock
    calls: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / FORMAT.digest.hex() / "0" / "lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    store, _ = open_store(tmp_path)
    assert store._folder.path.name == "1"
    put(store, KEYS)
    store.close()


def test_too_many_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "MAX_PROCESSES", 2)
    stores = [open_store(tmp_path)[0] for _ in range(2)]
    before = num_descriptors()
    with pytest.raises(DiskStoreError, match="is in use by 2 processes"):
        open_store(tmp_path)
    assert num_descriptors() == before
    for store in stores:
        store.close()


def test_temporary_files_of_the_dead_are_removed_and_those_of_others_are_not(
    tmp_path: Path,
) -> None:
    store, _ = open_store(tmp_path)
    put(store, KEYS)
    whole = the_file(tmp_path)
    content = whole.read_bytes()
    store.close()
    name = "0" * 24 + ".kv.tmp"
    dead = [whole.with_name(name), whole.with_name(name.replace("0", "1"))]
    dead[0].write_bytes(content[:9000])
    dead[1].write_bytes(b"")
    sibling = whole.parent.with_name("5")
    sibling.mkdir()
    dead.append(sibling / name)
    dead[-1].write_bytes(content[:4])
    kept = [whole.with_name("2" * 24 + ".kv.tmp"), whole.with_name("mine.tmp")]
    for path in kept:
        path.write_bytes(b"not ours")
    live, _ = open_store(tmp_path)
    assert not any(path.exists() for path in dead)
    assert all(path.read_bytes() == b"not ours" for path in kept)
    live_temporary = whole.with_name(name)
    live_temporary.write_bytes(content[:9000])
    open_store(tmp_path)[0].close()
    assert live_temporary.exists()
    live.close()


def test_foreign_files_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, 3)
    put(store, KEYS[:1])
    folder = the_file(tmp_path).parent
    store.close()
    segment_name = "f" * 24 + ".kv"
    (tmp_path / "sessions.db").write_bytes(b"sessions")
    (folder / segment_name).write_bytes(b"x" * 50_000)  # our name alone
    (folder / "notes.kv").write_bytes(SEGMENT_MAGIC + b"x" * 50_000)  # our bytes alone
    (folder / ("e" * 24 + ".kv")).symlink_to(tmp_path / "sessions.db")
    (folder / ("d" * 24 + ".kv")).mkdir()
    (folder / ("c" * 24 + ".kv")).write_bytes(b"")
    os.mkfifo(folder / ("b" * 24 + ".kv"))
    (tmp_path / ("a" * 32)).write_bytes(b"a file with a model's name")
    (tmp_path / ("b" * 32)).symlink_to(folder.parent)
    before = sorted(tmp_path.rglob("*"))
    store, slots = open_store(tmp_path, 3)
    assert set(slots) == {KEYS[0]}
    put(store, [first_block(8), first_block(9)], 1)
    assert set(before) <= set(tmp_path.rglob("*"))
    assert get(store, 0, KEYS[0]) == payload(KEYS[0])
    store.close()


def test_other_models_count_and_leave_oldest_first_when_room_is_needed(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, OTHER_FORMAT, max_bytes_for(4))
    adopt_all(other, other.scan())
    for seed in range(4):
        put(other, [first_block(seed)], seed)
        os.utime(files_in(tmp_path)[-1], (1000 + seed, 1000 + seed))
    other.close()
    others = files_in(tmp_path)
    store, slots = open_store(tmp_path, 6)
    assert slots == {}
    assert store.usage_bytes == file_bytes(tmp_path) > 0
    put(store, [first_block(1), first_block(2)], 0)
    assert all(path.exists() for path in others)
    for slot in range(2, 6):
        put(store, [first_block(slot)], slot)
        assert folder_bytes(tmp_path) <= max_bytes_for(6) + 2 * 4096  # the other model's folders
    assert not any(path.exists() for path in others[:3])
    store.purge_stale()
    assert not any(path.exists() for path in others)
    assert [path.name for path in tmp_path.iterdir()] == [FORMAT.digest.hex()]
    assert store.usage_bytes == file_bytes(tmp_path)
    assert all(get(store, slot, first_block(slot)) for slot in range(2, 6))
    store.close()


def test_a_model_that_is_served_again_keeps_its_files(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, OTHER_FORMAT, max_bytes_for(4))
    other.scan()
    put(other, KEYS)
    other.close()
    store, _ = open_store(tmp_path, 6)
    other = DiskStore(tmp_path, OTHER_FORMAT, max_bytes_for(4))
    slots = adopt_all(other, other.scan())
    for slot in range(6):
        put(store, [first_block(slot)], slot)
    store.purge_stale()
    assert all(get(other, slot, key) == payload(key) for key, slot in slots.items())
    assert len(slots) == 4
    store.close()
    other.close()


def test_a_live_model_is_not_counted(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, OTHER_FORMAT, max_bytes_for(4))
    other.scan()
    put(other, KEYS)
    store, _ = open_store(tmp_path, 6)
    assert store.usage_bytes == 0
    store.purge_stale()
    assert get(other, 0, KEYS[0]) == payload(KEYS[0])
    store.close()
    other.close()


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_format_version_is_left_until_room_is_needed(
    tmp_path: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_store(tmp_path, 4)
    put(store, KEYS)
    store.close()
    path = the_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:8] + version.to_bytes(2, "big") + content[10:])
    with caplog.at_level(logging.WARNING):
        store, slots = open_store(tmp_path, 4)
    assert slots == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 files in " in caplog.text
    assert path.exists()
    assert store.usage_bytes == file_bytes(tmp_path) > 0
    put(store, KEYS)
    assert files_in(tmp_path) != [path]
    assert folder_bytes(tmp_path) <= max_bytes_for(4)
    store.close()


@pytest.mark.parametrize("reader", [Cipher(b"other key".ljust(32)), None], ids=("wrong", "none"))
def test_without_the_key_files_are_stale(
    tmp_path: Path, reader: Cipher | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_store(tmp_path, cipher=CIPHERS[1])
    put(store, KEYS[:2])
    put(store, KEYS[2:], 2)
    store.close()
    with caplog.at_level(logging.WARNING):
        store, slots = open_store(tmp_path, cipher=reader)
    assert slots == {}
    assert len(caplog.records) == 1
    assert "2 files in" in caplog.text
    put(store, KEYS)
    assert get(store, 0, KEYS[0]) == payload(KEYS[0])
    store.close()
    store, slots = open_store(tmp_path, cipher=CIPHERS[1])
    assert set(slots) == set(KEYS)  # the key is back, its files were still there
    assert get(store, 0, KEYS[0]) == payload(KEYS[0])
    store.close()


def test_what_was_stored_in_clear_goes_once_there_is_a_key(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    put(store, KEYS)
    store.close()
    assert KEYS[0].tokens in raw_content(tmp_path)
    store, slots = open_store(tmp_path, cipher=CIPHERS[1])
    assert (slots, files_in(tmp_path), store.usage_bytes) == ({}, [], 0)
    store.close()


def test_names_sort_by_time(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    names = []
    for _ in range(5):
        names.append(store._folder.new_segment().name)
        time.sleep(0.001)
    assert names == sorted(set(names))
    store.close()
