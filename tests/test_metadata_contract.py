"""What every metadata store does: in memory, in Redis, in Valkey, sealed, and with what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from cache_store.cipher import Cipher
from cache_store.events import AllBlocksCleared, CacheEvent, Tier
from cache_store.metadata.base import BlockLocation, MetadataStore, SessionRecord
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink
from cache_store.metadata.resilient import ResilientMetadataStore
from tests.metadata_kit import chunk, chunks, make_session, make_worker, removed, stored
from tests.redis_kit import PATIENCE_S, Server, running_server

MAX_CHUNKS = 400
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@pytest.fixture(scope="module", params=["memory", "redis", "valkey", "resilient", "sealed"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server | None]]:
    kind: str = request.param
    if kind == "memory":
        yield kind, None
        return
    program = "valkey" if kind in ("valkey", "sealed") else "redis"
    with running_server(program, tmp_path_factory.mktemp("redis")) as running:
        yield kind, running


@pytest.fixture
async def store(server: tuple[str, Server | None]) -> AsyncIterator[MetadataStore]:
    kind, running = server
    made: MetadataStore
    if running is None:
        made = MemoryMetadataStore(max_chunks=MAX_CHUNKS)
    else:
        with running.client() as client:
            client.flushall()
        cipher = Cipher(bytes(32)) if kind == "sealed" else None
        link = RedisLink(running.url, timeout_s=PATIENCE_S)
        made = RedisMetadataStore(link, cipher=cipher, max_chunks=MAX_CHUNKS)
        if kind == "resilient":
            made = ResilientMetadataStore(made)
    await made.start()
    assert not made.is_degraded
    yield made
    assert not made.is_degraded
    assert made.stats.failures_total == 0
    await made.close()


async def located(
    store: MetadataStore, *numbers: int, fingerprint: str = "model"
) -> dict[str, tuple[Tier, ...]]:
    found = await store.locate(fingerprint, chunks(*numbers))
    assert len({location.worker_id for location in found}) == len(found)
    return {location.worker_id: location.tiers for location in found}


# ---------------------------------------------------------------- workers


async def test_a_worker_is_known_until_its_lease_runs_out(store: MetadataStore) -> None:
    assert list(await store.workers("model")) == []
    await store.renew_worker(make_worker("w2"), 60.0)
    await store.renew_worker(make_worker("w1"), 0.15)
    await store.renew_worker(make_worker("w3", fingerprint="other"), 60.0)
    assert list(await store.workers("model")) == [make_worker("w1"), make_worker("w2")]
    await asyncio.sleep(0.25)
    assert list(await store.workers("model")) == [make_worker("w2")]
    assert list(await store.workers("other")) == [make_worker("w3", fingerprint="other")]
    everyone = [make_worker("w2"), make_worker("w3", fingerprint="other")]
    assert list(await store.all_workers()) == everyone
    await store.remove_worker("w3")
    assert list(await store.all_workers()) == everyone[:1]


async def test_a_renewed_lease_lasts_from_its_renewal(store: MetadataStore) -> None:
    for _ in range(4):
        await store.renew_worker(make_worker(), 0.25)
        await store.apply_events(make_worker(), [stored(1)], 0.25)
        await asyncio.sleep(0.1)
    assert list(await store.workers("model")) == [make_worker()]


async def test_a_renewal_keeps_the_locations_alive(store: MetadataStore) -> None:
    await store.renew_worker(make_worker(), 0.3)
    await store.apply_events(make_worker(), [stored(1, 2)], 0.3)
    for _ in range(4):
        await asyncio.sleep(0.12)
        await store.renew_worker(make_worker(), 0.3)
    assert await located(store, 1, 2) == {"w1": (DEVICE, DEVICE)}


async def test_a_removed_worker_is_gone_with_its_locations(store: MetadataStore) -> None:
    await store.renew_worker(make_worker(), 60.0)
    await store.apply_events(make_worker(), [stored(1)], 60.0)
    await store.remove_worker("w1")
    await store.remove_worker("never known")
    assert list(await store.workers("model")) == []
    await store.renew_worker(make_worker(), 60.0)
    assert await located(store, 1) == {}


async def test_a_worker_that_serves_another_model_leaves_the_first(store: MetadataStore) -> None:
    await store.renew_worker(make_worker(), 60.0)
    await store.apply_events(make_worker(), [stored(1)], 60.0)
    other = make_worker(epoch=8, fingerprint="other")
    await store.renew_worker(other, 60.0)
    assert list(await store.workers("model")) == []
    assert list(await store.workers("other")) == [other]
    assert list(await store.all_workers()) == [other]
    assert await located(store, 1) == {}


async def test_names_with_separators_do_not_meet(store: MetadataStore) -> None:
    names = ["a:b", "a", "a%3Ab", "a/b", "", "ü", "a b", "a\nb"]
    for number, name in enumerate(names):
        worker = make_worker(name, fingerprint="x:y")
        await store.renew_worker(worker, 60.0)
        await store.apply_events(worker, [stored(number)], 60.0)
    assert {w.worker_id for w in await store.workers("x:y")} == set(names)
    assert list(await store.workers("x")) == []
    for number, name in enumerate(names):
        assert await located(store, number, fingerprint="x:y") == {name: (DEVICE,)}


# ---------------------------------------------------------------- locations


async def test_the_first_gap_ends_a_workers_prefix(store: MetadataStore) -> None:
    for worker_id, numbers in (("w1", (1, 2, 4)), ("w2", (1, 2, 3, 4)), ("w3", (2, 3, 4))):
        await store.renew_worker(make_worker(worker_id), 60.0)
        await store.apply_events(make_worker(worker_id), [stored(*numbers)], 60.0)
    found = await store.locate("model", chunks(1, 2, 3, 4, 5))
    assert sorted(found, key=lambda location: location.worker_id) == [
        BlockLocation("w1", 7, (DEVICE, DEVICE)),
        BlockLocation("w2", 7, (DEVICE,) * 4),
    ]
    assert await located(store, fingerprint="model") == {}
    assert await located(store, 1, fingerprint="another model") == {}


async def test_a_later_event_replaces_an_earlier_one(store: MetadataStore) -> None:
    worker = make_worker()
    await store.renew_worker(worker, 60.0)
    events: list[CacheEvent] = [stored(1, 2, 3), stored(2, 3, tier=HOST), stored(3, tier=DISK)]
    await store.apply_events(worker, [*events, removed(9)], 60.0)
    assert await located(store, 1, 2, 3) == {"w1": (DEVICE, HOST, DISK)}
    await store.apply_events(worker, [removed(2), stored(3)], 60.0)
    assert await located(store, 1, 2, 3) == {"w1": (DEVICE,)}
    await store.apply_events(worker, [removed(1), stored(1, 2, tier=HOST)], 60.0)
    assert await located(store, 1, 2, 3) == {"w1": (HOST, HOST, DEVICE)}
    await store.apply_events(worker, [stored(7), AllBlocksCleared(), stored(1)], 60.0)
    assert await located(store, 1, 2) == {"w1": (DEVICE,)}
    assert await located(store, 7) == {}
    await store.apply_events(worker, [AllBlocksCleared()], 60.0)
    assert await located(store, 1) == {}


async def test_a_new_epoch_forgets_the_locations_of_the_old(store: MetadataStore) -> None:
    await store.renew_worker(make_worker(epoch=1), 60.0)
    await store.apply_events(make_worker(epoch=1), [stored(1)], 60.0)
    await store.renew_worker(make_worker(epoch=2), 60.0)
    assert await located(store, 1) == {}
    await store.apply_events(make_worker(epoch=1), [stored(2)], 60.0)  # late
    assert await located(store, 2) == {}
    await store.apply_events(make_worker(epoch=2), [stored(3)], 60.0)
    assert await store.locate("model", chunk(3)) == [BlockLocation("w1", 2, (DEVICE,))]


async def test_locations_end_with_their_lease(store: MetadataStore) -> None:
    await store.renew_worker(make_worker(), 60.0)
    await store.apply_events(make_worker(), [stored(1)], 0.15)
    assert await located(store, 1) == {"w1": (DEVICE,)}
    await asyncio.sleep(0.25)
    assert await located(store, 1) == {}


async def test_a_worker_that_was_not_announced_is_not_found(store: MetadataStore) -> None:
    await store.apply_events(make_worker(), [stored(1)], 60.0)
    assert await located(store, 1) == {}
    await store.renew_worker(make_worker(), 60.0)
    assert await located(store, 1) == {"w1": (DEVICE,)}


async def test_a_long_prompt_is_located_whole(store: MetadataStore) -> None:
    numbers = range(391)
    lengths = (1, 2, 4, 5, 6, 20, 21, 22, 84, 85, 86, 340, 341, 342, 390, 391)
    for held in lengths:
        worker_id = f"w{held}"
        await store.renew_worker(make_worker(worker_id), 60.0)
        await store.apply_events(make_worker(worker_id), [stored(*range(held))], 60.0)
    found = await located(store, *numbers)
    assert {name: len(tiers) for name, tiers in found.items()} == {f"w{n}": n for n in lengths}


async def test_chunks_of_a_worker_are_bounded(store: MetadataStore) -> None:
    worker = make_worker()
    await store.renew_worker(worker, 60.0)
    for start in range(0, MAX_CHUNKS + 200, 100):
        await store.apply_events(worker, [stored(*range(start, start + 100))], 60.0)
    held = [n for n in range(MAX_CHUNKS + 200) if await located(store, n)]
    assert len(held) == MAX_CHUNKS


# ---------------------------------------------------------------- sessions


async def test_a_session_comes_back_as_it_was_put(store: MetadataStore) -> None:
    record = make_session(
        priority=3,
        retention_s=1.5,
        cache_salt="sälz",
        worker_id="w1",
        num_prompt_tokens_total=12,
        num_cached_tokens_total=5,
        history=bytes(range(256)) * 4_000,
    )
    assert await store.put_session(record, 0)
    assert await store.get_session("t1", "s1") == msgspec.structs.replace(record, version=1)
    assert await store.get_session("t1", "s2") is None
    assert await store.get_session("t2", "s1") is None


async def test_a_session_is_put_only_over_the_version_expected(store: MetadataStore) -> None:
    first = make_session(history=b"first")
    assert not await store.put_session(first, 1)
    assert await store.put_session(first, 0)
    assert not await store.put_session(make_session(history=b"fork"), 0)
    assert await store.put_session(make_session(history=b"second"), 1)
    assert not await store.put_session(make_session(history=b"late"), 1)
    found = await store.get_session("t1", "s1")
    assert found is not None
    assert (found.version, found.history) == (2, b"second")


async def test_of_many_at_once_one_is_put(store: MetadataStore) -> None:
    records = [make_session(history=bytes([n])) for n in range(20)]
    results = await asyncio.gather(*(store.put_session(record, 0) for record in records))
    assert results.count(True) == 1
    found = await store.get_session("t1", "s1")
    assert found is not None
    assert found.history == bytes([results.index(True)])


async def test_a_session_ends_with_its_time(store: MetadataStore) -> None:
    assert await store.put_session(make_session("short", lifetime_s=0.2), 0)
    assert await store.put_session(make_session("long"), 0)
    assert await store.num_sessions() == 2
    await asyncio.sleep(0.3)
    assert await store.get_session("t1", "short") is None
    assert await ids(store) == ["long"]
    assert await store.num_sessions() == 1
    assert await store.put_session(make_session("short"), 0)
    assert await store.num_sessions() == 2


async def test_a_later_put_gives_a_session_more_time(store: MetadataStore) -> None:
    assert await store.put_session(make_session(lifetime_s=0.2), 0)
    assert await store.put_session(make_session(), 1)
    await asyncio.sleep(0.3)
    assert await store.put_session(make_session("other"), 0)  # drops what has run out
    assert await ids(store) == ["other", "s1"]
    assert await store.num_sessions() == 2


async def test_a_deleted_session_is_gone_and_is_given_back(store: MetadataStore) -> None:
    record = make_session(history=b"words")
    await store.put_session(record, 0)
    assert await store.delete_session("t1", "s1") == msgspec.structs.replace(record, version=1)
    assert await store.delete_session("t1", "s1") is None
    assert await store.get_session("t1", "s1") is None
    assert await ids(store) == []
    assert await store.num_sessions() == 0
    assert await store.put_session(record, 0)


async def test_sessions_are_listed_by_tenant_page_by_page(store: MetadataStore) -> None:
    names = [f"s{n:03}" for n in range(25)]
    for name in reversed(names):
        assert await store.put_session(make_session(name, history=b"words"), 0)
    await store.put_session(make_session("s000", tenant="t2"), 0)
    found: list[SessionRecord] = []
    cursor, sizes = "", []
    while True:
        page, cursor = await store.list_sessions("t1", cursor=cursor, limit=10)
        found += page
        sizes.append(len(page))
        if not cursor:
            break
    assert sizes == [10, 10, 5]
    assert sorted(record.session_id for record in found) == names
    assert {(record.tenant, record.version, record.history) for record in found} == {("t1", 1, b"")}
    assert await ids(store, "t2") == ["s000"]
    assert await ids(store, "t3") == []
    assert await store.num_sessions() == 26


async def test_a_cursor_outlives_the_session_it_names(store: MetadataStore) -> None:
    for name in ("a", "b", "c"):
        await store.put_session(make_session(name), 0)
    page, cursor = await store.list_sessions("t1", limit=2)
    await store.delete_session("t1", page[-1].session_id)
    rest, end = await store.list_sessions("t1", cursor=cursor, limit=2)
    assert len(rest) == 1
    assert end == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a:b", "c"), ("a", "b:c")),
        (("a", "b%3Ac"), ("a", "b:c")),
        (("", "a"), ("a", "")),
        (("ü", "x"), ("u\u0308", "x")),
        (("a", "\ud800"), ("a", "?")),
        (("a", "x\x00"), ("a", "x")),
    ],
)
async def test_no_two_sessions_collide(
    store: MetadataStore, one: tuple[str, str], other: tuple[str, str]
) -> None:
    for tenant, session_id in (one, other):
        record = make_session(session_id, tenant=tenant, worker_id=repr((tenant, session_id)))
        assert await store.put_session(record, 0)
    for tenant, session_id in (one, other):
        found = await store.get_session(tenant, session_id)
        assert found is not None
        assert found.worker_id == repr((tenant, session_id))
        assert session_id in await ids(store, tenant)


async def ids(store: MetadataStore, tenant: str = "t1") -> list[str]:
    page, cursor = await store.list_sessions(tenant)
    assert cursor == ""
    return sorted(record.session_id for record in page)
