"""The embedded store alone: its bounds, and the file that sessions survive a restart in."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from cache_store.cipher import Cipher
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.metadata.session_file import SessionFile
from tests.metadata_kit import chunk, make_session, make_worker, stored


def make_store(folder: Path, cipher: Cipher | None = None) -> MemoryMetadataStore:
    return MemoryMetadataStore(file=SessionFile(folder, cipher), save_s=0.05)


async def put(store: MemoryMetadataStore, *names: str, history: bytes = b"words") -> None:
    for name in names:
        assert await store.put_session(make_session(name, history=history), 0)


async def ids(store: MemoryMetadataStore) -> list[str]:
    return [record.session_id for record in (await store.list_sessions("t1"))[0]]


async def test_the_session_stored_longest_ago_is_forgotten_first() -> None:
    store = MemoryMetadataStore(max_sessions=3)
    await put(store, "a", "b", "c")
    assert await store.put_session(make_session("a"), 1)
    await put(store, "d")
    assert await ids(store) == ["a", "c", "d"]
    assert store.stats.dropped_total == 1


async def test_histories_are_bounded_in_bytes() -> None:
    store = MemoryMetadataStore(max_session_bytes=10_000)
    await put(store, "a", "b", "c", history=bytes(2_000))
    assert await ids(store) == ["a", "b", "c"]
    await put(store, "d", history=bytes(2_000))
    assert await ids(store) == ["b", "c", "d"]
    await put(store, "large", history=bytes(9_001))
    assert await ids(store) == []


async def test_sessions_that_nobody_closes_stay_bounded() -> None:
    store = MemoryMetadataStore(max_sessions=1_000)
    for n in range(20_000):
        await store.put_session(make_session(f"{n}", lifetime_s=1_000 - n % 7), 0)
        await store.put_session(make_session(f"{n}", lifetime_s=2_000), 1)
    assert await store.num_sessions() == 1_000
    assert len(store._expiries) <= 2 * 1_000 + 1_001


async def test_the_chunk_told_longest_ago_is_forgotten_first() -> None:
    store = MemoryMetadataStore(max_chunks=2)
    await store.renew_worker(make_worker(), 60.0)
    for number in (1, 2, 1, 3):
        await store.apply_events(make_worker(), [stored(number)], 60.0)
    held = [n for n in (1, 2, 3) if await store.locate("model", chunk(n))]
    assert held == [1, 3]


async def test_leases_that_ran_out_leave_nothing_behind() -> None:
    now = 1_000.0
    store = MemoryMetadataStore(clock=lambda: now)
    for number in range(10):
        worker = make_worker(f"w{number}")
        await store.renew_worker(worker, 5.0)
        await store.apply_events(worker, [stored(1)], 5.0)
        now += 10.0
    assert len(store._workers) == 1
    assert len(store._chunks) == 1


# ---------------------------------------------------------------- the file


async def test_sessions_survive_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "if need be"
    first = make_store(folder)
    await first.start()
    await put(first, "b", "a", "\ud800:", history=bytes(100_000))
    before = [await first.get_session("t1", name) for name in ("a", "b", "\ud800:")]
    await first.close()
    file = folder / "sessions"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["sessions"]

    second = make_store(folder)
    await second.start()
    assert [await second.get_session("t1", name) for name in ("a", "b", "\ud800:")] == before
    assert await second.put_session(make_session("a"), 1)
    await second.close()


async def test_changes_are_saved_while_it_runs_and_deletions_too(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.start()
    await put(store, "a", history=b"a needle")
    await until(lambda: b"a needle" in read(tmp_path))
    await store.delete_session("t1", "a")
    await until(lambda: b"a needle" not in read(tmp_path))
    saved_at = (tmp_path / "sessions").stat().st_mtime_ns
    await asyncio.sleep(0.2)
    await store.close()
    assert (tmp_path / "sessions").stat().st_mtime_ns == saved_at  # nothing had changed


def read(folder: Path) -> bytes:
    file = folder / "sessions"
    return file.read_bytes() if file.exists() else b""


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_has_run_out_is_not_loaded(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.start()
    assert await store.put_session(make_session("short", lifetime_s=0.3), 0)
    await put(store, "long")
    await store.close()
    await asyncio.sleep(0.35)
    again = make_store(tmp_path)
    await again.start()
    assert await ids(again) == ["long"]
    assert await again.num_sessions() == 1
    await again.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "grow", "empty", "magic", "length"])
async def test_a_damaged_file_is_one_without_sessions(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path)
    await store.start()
    await put(store, "a", "b")
    await store.close()
    file = tmp_path / "sessions"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "grow":
        content += b"x"
    elif damage == "empty":
        content.clear()
    elif damage == "magic":
        content[19:20] = b"2"
    else:
        content[21:25] = b"\xff" * 4
    file.write_bytes(content)
    again = make_store(tmp_path)
    await again.start()
    assert await ids(again) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"sessions in {file} are left out: it is damaged or of another version"
    ]
    await put(again, "c")
    await again.close()
    third = make_store(tmp_path)
    await third.start()
    assert await ids(third) == ["c"]
    await third.close()


async def test_a_sealed_file_shows_nothing_and_needs_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cipher = Cipher(bytes(32))
    store = make_store(tmp_path, cipher)
    await store.start()
    await put(store, "a", history=b"a needle in a record")
    await store.close()
    assert b"needle" not in read(tmp_path)
    for other in (None, Cipher(bytes([1]) * 32)):
        assert SessionFile(tmp_path, other).load() == []
    assert {record.getMessage() for record in caplog.records} == {
        f"sessions in {tmp_path / 'sessions'} are left out: "
        "it was written with another encryption key, or with none"
    }
    (found,) = SessionFile(tmp_path, cipher).load()
    assert found.history == b"a needle in a record"


async def test_a_folder_that_cannot_be_written_costs_no_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = make_store(tmp_path / "file")
    await store.start()
    await put(store, "a")
    assert await ids(store) == ["a"]
    await store.close()
    assert "sessions cannot be saved" in caplog.text


async def test_a_write_that_was_cut_off_leaves_the_old_file(tmp_path: Path) -> None:
    file = SessionFile(tmp_path)
    file.save([make_session("a")])

    def records() -> object:
        yield make_session("b")
        raise OSError(28, "No space left on device")

    file.save(records())  # type: ignore[arg-type]
    assert [record.session_id for record in file.load()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
