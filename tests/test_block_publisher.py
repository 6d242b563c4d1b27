"""The stream of block events as a subscriber sees it, vLLM's or that of the documentation."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from cache_store.block_hash import Namespace, hash_blocks
from cache_store.events import AllBlocksCleared, CopyRemoved, CopyStored, Tier
from cache_store.eviction import make_eviction_policy
from cache_store.prefix_cache import PrefixCache
from model_worker.block_events import encode_batch, wire_hashes
from model_worker.block_publisher import (
    BlockPublisher,
    PublisherBounds,
    replay_endpoint_of,
)
from model_worker.process_start import ConfigError
from tests.docs_kit import example
from tests.event_kit import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    Subscriber,
    VllmCleared,
    decode,
)

TOPIC = "kv@worker-1@tiny"
BLOCK_SIZE = 16
EPOCH = 1_700_000_000_000_000_000


def a_hash(number: int) -> bytes:
    return bytes([255] * 8) + (2**63 + number).to_bytes(8, "big")


def stored(number: int) -> CopyStored:
    return CopyStored(Tier.DEVICE, b"", a_hash(number))


@contextlib.contextmanager
def publishing(
    folder: Path, bounds: PublisherBounds | None = None, *, epoch: int = EPOCH
) -> Iterator[BlockPublisher]:
    endpoint = f"ipc://{folder}/events"
    publisher = BlockPublisher(endpoint, TOPIC, BLOCK_SIZE, epoch, bounds=bounds, clock=lambda: 1.5)
    publisher.start()
    with contextlib.closing(publisher):
        yield publisher


def settled(found: Callable[[], Any], wanted: Any) -> None:
    until = time.monotonic() + 10.0
    while found() != wanted:
        assert time.monotonic() < until, found()
        time.sleep(0.01)


def subscribed(publisher: BlockPublisher, subscriber: Subscriber) -> None:
    """Tell until the first word arrives: a subscription takes a while."""
    number = 1_000_000
    while not subscriber.events.poll(20):
        publisher.tell(stored(number))
        number += 1
    while subscriber.events.poll(100):
        subscriber.next()


# ------------------------------------------------------------------ the form


def test_vllms_structs_decode_a_batch() -> None:
    parent, first, second = a_hash(1), a_hash(2), a_hash(3)
    payload = encode_batch(
        12.5,
        [
            AllBlocksCleared(),
            CopyStored(Tier.HOST, parent, first + second),
            CopyStored(Tier.DEVICE, b"", first),
            CopyRemoved(Tier.DISK, second),
        ],
        32,
    )
    batch = decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    assert batch.events == [
        VllmCleared(),
        BlockStored([2**63 + 2, 2**63 + 3], 2**63 + 1, [], 32, None, "CPU", None),
        BlockStored([2**63 + 2], None, [], 32, None, "GPU", None),
        BlockRemoved([2**63 + 3], "STORAGE"),
    ]
    plain = msgspec.msgpack.decode(payload)
    assert plain[1][0] == {"type": "AllBlocksCleared"}
    assert plain[1][3] == {
        "type": "BlockRemoved", "block_hashes": [2**63 + 3], "medium": "STORAGE"
    }  # fmt: skip


def test_hashes_are_the_last_eight_bytes() -> None:
    joined = hash_blocks(Namespace("f"), np.arange(64, dtype=np.int32), 16).joined
    each = [joined[i : i + 16] for i in range(0, 64, 16)]
    assert wire_hashes(joined) == [int.from_bytes(one[8:], "big") for one in each]


# ------------------------------------------------------------------ the sockets


def test_events_come_in_order_and_can_be_had_again(tmp_path: Path) -> None:
    with (
        publishing(tmp_path) as publisher,
        contextlib.closing(Subscriber(f"ipc://{tmp_path}/events", TOPIC)) as subscriber,
    ):
        settled(lambda: len(subscriber.replayed(0)), 1)
        assert subscriber.replayed(0) == [(EPOCH, KVEventBatch(1.5, [VllmCleared()], 0))]
        subscribed(publisher, subscriber)
        last = subscriber.replayed(0)[-1][0]
        for number in range(5):
            publisher.tell(stored(number))
        heard: list[int] = []
        numbers = []
        while len(heard) < 5:
            number, batch = subscriber.next()
            numbers.append(number)
            heard += [event.block_hashes[0] - 2**63 for event in batch.events]
        assert heard == [0, 1, 2, 3, 4]
        assert numbers == list(range(last + 1, last + 1 + len(numbers)))
        again = subscriber.replayed(last + 1)
        assert [number for number, _ in again] == numbers
        assert [number for number, _ in subscriber.replayed(numbers[-1] + 1)] == []
        assert (tmp_path / "events").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_questions_that_are_none_are_passed_over(tmp_path: Path) -> None:
    with (
        publishing(tmp_path),
        contextlib.closing(Subscriber(f"ipc://{tmp_path}/events", TOPIC)) as subscriber,
    ):
        for frames in ((b"hello",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"")):
            subscriber.replay.send_multipart(frames)
        settled(lambda: len(subscriber.replayed(0)), 1)


def test_who_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    bounds = PublisherBounds(max_unread=2, replay_batches=8, batch_events=10)
    with (
        publishing(tmp_path, bounds) as publisher,
        contextlib.closing(Subscriber(f"ipc://{tmp_path}/events", TOPIC, RCVHWM=1)) as subscriber,
    ):
        subscribed(publisher, subscriber)
        for number in range(20_000):
            publisher.tell(stored(number))
        settled(lambda: subscriber.replayed(0)[-1][1].events[-1].block_hashes, [2**63 + 19_999])
        assert len(subscriber.replayed(0)) == 8
        before = subscriber.next()[0]
        while subscriber.events.poll(100):
            number = subscriber.next()[0]
            if number != before + 1:
                break
            before = number
        else:
            assert before < subscriber.replayed(0)[-1][0]  # a gap at the end


def test_what_waits_is_bounded_and_what_is_lost_is_told(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = BlockPublisher(endpoint, TOPIC, 16, 0, bounds=PublisherBounds(max_pending=10))
    for number in range(14):
        publisher.tell(stored(number))  # nobody takes them yet
    publisher.start()
    with (
        contextlib.closing(publisher),
        contextlib.closing(Subscriber(endpoint, TOPIC)) as subscriber,
    ):
        settled(lambda: len(subscriber.replayed(0)), 1)
        ((_, batch),) = subscriber.replayed(0)
        assert batch.events[0] == VllmCleared()
        heard = [event.block_hashes for event in batch.events[1:]]
        assert heard == [[2**63 + number] for number in (9, 10, 11, 12, 13)]


def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        publisher = BlockPublisher(endpoint, TOPIC, 16, 0)
        with pytest.raises(
            ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: .* in use$"
        ):
            publisher.start()
        publisher.close()


def test_where_replays_are_asked_for() -> None:
    assert replay_endpoint_of("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5558"
    assert replay_endpoint_of("tcp://[::1]:5557") == "tcp://[::1]:5558"
    assert replay_endpoint_of("ipc:///run/events") == "ipc:///run/events.replay"


# ------------------------------------------------------------------ the documentation's example


def test_the_documented_follower_knows_what_a_cache_holds(tmp_path: Path) -> None:
    scope = run_example("Following a worker")
    endpoint = f"ipc://{tmp_path}/events"
    with publishing(tmp_path) as publisher:
        cache = small_cache(publisher)
        serve(cache, prompt(0))
        follower = scope["Follower"](endpoint, replay_endpoint_of(endpoint))
        with contextlib.closing(follower):
            settled_by(follower, held(prompt(0)))
            serve(cache, prompt(1))
            serve(cache, prompt(2))  # 12 blocks do not fit into 10: the tail of the first goes
            settled_by(follower, held(prompt(0)[:32], prompt(1), prompt(2)))
            publisher.close()
            with publishing(tmp_path, epoch=EPOCH + 1000) as reborn:
                cache = small_cache(reborn)
                number = 2
                while follower.next < EPOCH + 1000:  # a subscription takes a while to come back
                    number += 1
                    serve(cache, prompt(number)[:32])
                    with contextlib.suppress(zmq.Again):
                        follower.follow()
                serve(cache, prompt(2))
                serve(cache, prompt(1))
                settled_by(follower, held(prompt(number)[:32], prompt(1), prompt(2)))
    lookup = {"fingerprint": "f", "salt": "", "token_ids": prompt(0), "block_size": BLOCK_SIZE}
    assert set(run_example("Hashes", **lookup)["numbers"]) == held(prompt(0))


def run_example(section: str, **names: Any) -> dict[str, Any]:
    """What it defines. ``names`` are what it takes for given."""
    source = example("events.md", "python", section=section)
    scope: dict[str, Any] = {"__name__": "example", **names}
    exec(compile(source, section, "exec", dont_inherit=True), scope)
    return scope


def prompt(number: int) -> np.ndarray:
    return np.arange(number * 1000, number * 1000 + 64, dtype=np.int32)


def held(*prompts: np.ndarray) -> set[int]:
    each = (hash_blocks(Namespace("f"), ids, BLOCK_SIZE).joined for ids in prompts)
    return set(wire_hashes(b"".join(each)))


def small_cache(publisher: BlockPublisher) -> PrefixCache:
    return PrefixCache(10, BLOCK_SIZE, make_eviction_policy("lru"), on_copy=publisher.tell)


def serve(cache: PrefixCache, ids: np.ndarray) -> None:
    lease = cache.acquire(cache.match(Namespace("f"), ids))
    assert cache.allocate(lease, len(ids))
    cache.release(lease, ids, len(ids))


def settled_by(follower: Any, wanted: set[int]) -> None:
    follower.events.setsockopt(zmq.RCVTIMEO, 50)
    until = time.monotonic() + 10.0
    while {number for number, media in follower.blocks.items() if media} != wanted:
        assert time.monotonic() < until
        with contextlib.suppress(zmq.Again):
            follower.follow()
