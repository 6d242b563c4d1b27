"""Who listens to a worker's block events as vLLM's own subscribers do."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from model_worker.block_publisher import END_OF_REPLAY, replay_endpoint_of

# The structs that vLLM decodes with (vllm.distributed.kv_events), all their required fields.


class VllmEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(VllmEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | VllmCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Subscriber:
    """As vLLM's example is, without asking for what it missed."""

    def __init__(self, endpoint: str, topic: str, **options: int) -> None:
        self.topic = topic.encode()
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.replay = self.context.socket(zmq.DEALER)
        for name, value in options.items():
            self.events.setsockopt(getattr(zmq, name), value)
        for each in (self.events, self.replay):
            each.setsockopt(zmq.RCVTIMEO, 10_000)
        self.events.subscribe(b"kv@")
        self.events.connect(endpoint)
        self.replay.connect(replay_endpoint_of(endpoint))

    def replayed(self, first: int) -> list[tuple[int, KVEventBatch]]:
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            empty, topic, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == self.topic
            found.append((int.from_bytes(number, "big"), decode(payload)))

    def next(self) -> tuple[int, KVEventBatch]:
        topic, number, payload = self.events.recv_multipart()
        assert topic == self.topic
        assert len(number) == 8
        return int.from_bytes(number, "big"), decode(payload)

    def close(self) -> None:
        self.context.destroy(linger=0)
