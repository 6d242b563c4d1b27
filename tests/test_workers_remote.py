"""RemoteWorker against what a broken or hostile worker may do, and against time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import UnionType

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from cache_store.events import AllBlocksCleared, BlockStored, CacheEvent, Tier
from model_worker.protocol import (
    PROTOCOL_VERSION,
    AddRequest,
    CacheReset,
    Command,
    ErrorCode,
    FinishReason,
    GatewayMessage,
    Goodbye,
    Heartbeat,
    Hello,
    LinkError,
    LinkTiming,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    ProtocolVersion,
    Refusal,
    RequestOutput,
    SamplingParams,
    StepFrame,
    TenantPolicies,
    TenantPolicy,
    Welcome,
    WorkerMessage,
    WorkerStats,
    WorkerStatus,
    decode_gateway_message,
    encode,
)
from model_worker.server import LinkCommand, LinkLost, LinkOpened, WorkerServer
from service.workers.base import WorkerLostError, WorkerNotReadyError, WorkerState
from service.workers.cache_news import CacheNews
from service.workers.remote import RemoteWorker
from tests.scripted_worker import SLOW_STEP_S, TIMING, make_card
from tests.worker_rigs import (
    SECRET,
    RemoteRig,
    collect,
    finish_reasons,
    first_token,
    free_port,
    make_request,
    reach,
    send_signal,
    tokens_of,
)

ROOT = Path(__file__).resolve().parent.parent
EPOCH = 11
NO_TOKENS = np.empty(0, dtype=np.int32)
QUICK = LinkTiming(heartbeat_s=0.05, silence_s=0.5, answer_s=0.3, refused_retry_s=0.2)


class BareWorker:
    """A ROUTER socket that answers as it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(endpoint)
        self.peer = b""

    async def hear(
        self, kind: type[GatewayMessage] | UnionType, timeout_s: float = 5.0
    ) -> GatewayMessage:
        async with asyncio.timeout(timeout_s):
            while True:
                self.peer, frame = await self.socket.recv_multipart()
                message = decode_gateway_message(frame)
                if isinstance(message, kind):
                    return message

    async def say(self, message: WorkerMessage) -> None:
        await self.socket.send_multipart((self.peer, encode(message)))

    async def welcome(
        self, epoch: int = EPOCH, version: ProtocolVersion = PROTOCOL_VERSION
    ) -> None:
        await self.hear(Hello)
        await self.say(Welcome(version=version, worker_id="w", epoch=epoch, model=make_card()))

    async def frame(self, sequence: int, *tokens: int, epoch: int = EPOCH) -> None:
        output = RequestOutput(request_id="r", token_ids=tokens)
        await self.say(
            StepFrame(epoch=epoch, sequence=sequence, outputs=(output,), stats=WorkerStats())
        )


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture
async def bare(endpoint: str) -> AsyncIterator[BareWorker]:
    worker = BareWorker(endpoint)
    yield worker
    worker.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def connected(
    endpoint: str, secret: bytes | None = None, timing: LinkTiming = QUICK
) -> AsyncIterator[RemoteWorker]:
    worker = RemoteWorker(endpoint, secret, worker_id="w", timing=timing)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def test_status_and_card_are_taken_over(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.hear(Hello)
        await bare.say(WorkerStatus(worker_id="w", state="loading", detail="weights 40 %"))
        await reach(worker, WorkerState.LOADING)
        assert worker.detail == "weights 40 %"
        await bare.say(WorkerStatus(worker_id="w", state="failed", detail="out of memory"))
        with pytest.raises(WorkerNotReadyError, match="worker w: failed: out of memory"):
            await worker.wait_ready(5)


async def test_a_draining_worker_finishes_and_refuses(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        running = worker.submit(make_request("r"))
        await bare.hear(AddRequest)
        await bare.say(WorkerStatus(worker_id="w", state="draining", detail="stopping"))
        await reach(worker, WorkerState.DRAINING)
        refused = await collect(worker.submit(make_request("new")), timeout_s=1)
        assert refused[0].error is not None
        assert refused[0].error.code is ErrorCode.SHUTTING_DOWN
        await bare.frame(1, 5)
        assert (await first_token(running)).token_ids == (5,)


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [
        (lambda bare: bare.frame(3, 7), "frame 2 is missing, 3 came"),
        (lambda bare: bare.frame(1, 7), "frame 2 is missing, 1 came"),
        (lambda bare: bare.frame(2, 7, epoch=12), "the worker was started anew"),
        (lambda bare: bare.say(Heartbeat(epoch=EPOCH, sequence=2)), "frame 2 is missing"),
        (lambda bare: bare.say(Heartbeat(epoch=12, sequence=1)), "the worker was started anew"),
        (lambda bare: bare.say(Goodbye(reason="maintenance")), "maintenance"),
        (
            lambda bare: bare.socket.send_multipart((bare.peer, b"\xc1")),
            "not a message of this link protocol",
        ),
    ],
    ids=["gap", "repeat", "epoch", "heartbeat-gap", "heartbeat-epoch", "goodbye", "garbage"],
)
async def test_a_link_that_cannot_be_trusted_ends_its_requests(
    bare: BareWorker,
    endpoint: str,
    mishap: Callable[[BareWorker], asyncio.Future[None]],
    reason: str,
) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        stream = worker.submit(make_request("r"))
        await bare.hear(AddRequest)
        await bare.frame(1, 5)
        assert (await first_token(stream)).token_ids == (5,)
        await mishap(bare)
        outputs = await collect(stream, timeout_s=2)
        assert tokens_of(outputs) == []
        assert finish_reasons(outputs) == [FinishReason.ERROR]
        assert outputs[0].error is not None
        assert outputs[0].error.code is ErrorCode.WORKER_LOST
        assert outputs[0].error.message.startswith(f"worker w: lost: {reason}")
        # A new link, whose frames are numbered from 1 again.
        await bare.welcome(epoch=12)
        await worker.wait_ready(5)
        again = worker.submit(make_request("r"))
        await bare.hear(AddRequest)
        await bare.frame(1, 9, epoch=12)
        assert (await first_token(again)).token_ids == (9,)


async def test_a_frame_before_the_welcome_ends_the_link(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.hear(Hello)
        await bare.frame(1, 5)
        await reach(worker, WorkerState.LOST)
        assert worker.detail == "a frame came before the welcome"


async def test_silence_of_the_worker_is_noticed(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        stream = worker.submit(make_request("r"))
        started = time.monotonic()
        outputs = await collect(stream, timeout_s=5)
        assert QUICK.silence_s * 0.8 < time.monotonic() - started < QUICK.silence_s + 1.0
        assert outputs[0].error is not None
        assert outputs[0].error.code is ErrorCode.WORKER_LOST
        assert worker.detail.startswith("nothing was heard for")


async def test_a_refusal_is_a_failure_that_a_new_version_ends(
    bare: BareWorker, endpoint: str
) -> None:
    async with connected(endpoint) as worker:
        await bare.hear(Hello)
        await bare.say(Refusal(version=ProtocolVersion(9, 0), reason="this worker speaks 9.0"))
        with pytest.raises(WorkerNotReadyError, match=r"failed: this worker speaks 9\.0"):
            await worker.wait_ready(5)
        await bare.welcome()
        await reach(worker, WorkerState.READY)


async def test_a_welcome_of_another_version_is_a_failure(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.hear(Hello)
        await bare.say(
            Welcome(version=ProtocolVersion(9, 0), worker_id="w", epoch=1, model=make_card())
        )
        with pytest.raises(WorkerNotReadyError, match=r"the worker 9\.0"):
            await worker.wait_ready(5)


async def test_fields_of_a_newer_minor_version_are_ignored(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.hear(Hello)
        version = ProtocolVersion(PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor + 1)
        welcome = msgspec.to_builtins(
            Welcome(version=version, worker_id="w", epoch=1, model=make_card()),
            builtin_types=(bytes,),
        )
        welcome["model"]["num_experts"] = 8
        await bare.socket.send_multipart((bare.peer, msgspec.msgpack.encode(welcome)))
        assert await worker.wait_ready(5) == make_card()


async def test_a_prefix_command_says_all_that_was_asked(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        ids = np.array([1, 2, 3, 4], dtype=np.int32)[::3]
        call = asyncio.create_task(
            worker.act_on_prefix(PrefixAction.DROP, ids, cache_salt="tenant", keep_num_tokens=1)
        )
        command = await bare.hear(PrefixCommand)
        assert command == PrefixCommand(
            call_id="1",
            action=PrefixAction.DROP,
            prompt_token_ids=b"\x01\0\0\0\x04\0\0\0",
            cache_salt="tenant",
            keep_num_tokens=1,
        )
        reply = PrefixReply(call_id="1", num_device_tokens=32, num_disk_tokens=64)
        await bare.say(msgspec.structs.replace(reply, call_id="0"))  # nobody's: is dropped
        await bare.say(reply)
        assert await asyncio.wait_for(call, 5) == reply


async def test_policies_are_told_after_each_welcome_and_when_they_change(
    bare: BareWorker, endpoint: str
) -> None:
    policies = (TenantPolicy(tenant="a", weight=2.0, max_disk_bytes=2**40),)
    async with connected(endpoint) as worker:
        worker.set_tenant_policies(policies)
        for _ in range(2):
            await bare.welcome()
            await worker.wait_ready(5)
            assert await bare.hear(TenantPolicies) == TenantPolicies(policies=policies)
            await bare.say(Goodbye(reason="again"))
            await reach(worker, WorkerState.LOST)
        await bare.welcome()
        await worker.wait_ready(5)
        await bare.hear(TenantPolicies)
        worker.set_tenant_policies(policies)  # the same, which is no news
        worker.set_tenant_policies(())
        assert await bare.hear(TenantPolicies) == TenantPolicies(policies=())


async def test_a_worker_of_the_version_before_is_served(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome(version=ProtocolVersion(1, PROTOCOL_VERSION.minor - 1))
        await worker.wait_ready(5)
        worker.submit(make_request("r"))
        command = await bare.hear(Command)
        assert isinstance(command, AddRequest)
        # It would refuse parameters that it does not know; at their defaults they are not sent.
        assert msgspec.msgpack.decode(encode(command))["sampling_params"] == {"max_tokens": 5}


async def test_a_reply_of_another_kind_is_a_typed_error(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        call = asyncio.create_task(worker.act_on_prefix(PrefixAction.INSPECT, NO_TOKENS))
        await bare.hear(PrefixCommand)
        await bare.say(CacheReset(call_id="1", num_blocks_dropped=3))
        with pytest.raises(WorkerLostError, match="answered PrefixCommand with CacheReset"):
            await asyncio.wait_for(call, 5)


async def test_cache_news_come_in_order_and_begin_anew_with_each_link(
    bare: BareWorker, endpoint: str
) -> None:
    stored = [BlockStored(Tier.DEVICE, bytes([n]) * 16) for n in range(3)]

    def frame(sequence: int, *events: CacheEvent) -> StepFrame:
        stats = WorkerStats(steps_total=sequence)
        return StepFrame(epoch=EPOCH, sequence=sequence, outputs=(), stats=stats, events=events)

    def fail(news: CacheNews) -> None:
        raise RuntimeError("a listener that fails")

    async with connected(endpoint) as worker:
        heard: list[CacheNews] = []
        worker.add_event_listener(fail)
        worker.add_event_listener(heard.append)
        await bare.welcome()
        await worker.wait_ready(5)
        await bare.say(frame(1, stored[0], stored[1]))
        await bare.say(frame(2))
        await bare.say(frame(3, stored[2]))
        await bare.say(Goodbye(reason="maintenance"))
        await reach(worker, WorkerState.LOST)
        assert worker.epoch == EPOCH
        await bare.welcome()
        await reach(worker, WorkerState.READY)
        assert heard == [
            CacheNews("w", EPOCH, (AllBlocksCleared(),)),
            CacheNews("w", EPOCH, (stored[0], stored[1])),
            CacheNews("w", EPOCH, (stored[2],)),
            CacheNews("w", EPOCH, (AllBlocksCleared(),)),
        ]


async def test_a_link_that_began_while_draining_takes_no_commands(
    bare: BareWorker, endpoint: str
) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        await bare.say(Goodbye(reason="the connection was closed"))
        await reach(worker, WorkerState.LOST)
        await bare.hear(Hello)
        await bare.say(WorkerStatus(worker_id="w", state="draining", detail="stopping"))
        await reach(worker, WorkerState.DRAINING)
        with pytest.raises(WorkerNotReadyError, match="worker w: stopping"):
            await worker.act_on_prefix(PrefixAction.DEMOTE, NO_TOKENS)
        with pytest.raises(WorkerNotReadyError, match="worker w: stopping"):
            await worker.reset_cache()


async def test_nobody_at_the_endpoint_is_said_so() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with connected(endpoint, SECRET) as worker:
        with pytest.raises(WorkerNotReadyError, match="nothing answers at"):
            await worker.wait_ready(0.6)
        assert worker.state is WorkerState.CONNECTING
        assert worker.detail == f"nothing answers at {endpoint}"


async def test_a_wrong_secret_never_connects_and_is_said_so() -> None:
    server = WorkerServer("tcp://127.0.0.1:0", "w", EPOCH, SECRET, timing=QUICK)
    server.start()
    try:
        server.set_ready(make_card())
        async with connected(server.endpoint, b"quite another secret") as worker:
            with pytest.raises(WorkerNotReadyError, match="the same link secret"):
                await worker.wait_ready(1.0)
            assert worker.state is WorkerState.CONNECTING
            assert worker.card is None
        assert server.poll_commands(0) == []
        async with connected(server.endpoint, SECRET) as worker:
            assert await worker.wait_ready(5) == make_card()
    finally:
        server.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:7000", "inproc://x", "worker:7000"])
def test_illegal_endpoints_are_refused_at_construction(endpoint: str) -> None:
    with pytest.raises(LinkError):
        RemoteWorker(endpoint)


async def test_a_request_that_cannot_be_sent_ends_alone(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        bad = AddRequest(
            request_id="bad",
            prompt_token_ids=b"",
            sampling_params=SamplingParams(max_tokens=1),
            cache_salt="\ud800",
        )
        outputs = await collect(worker.submit(bad), timeout_s=1)
        assert outputs[0].error is not None
        assert outputs[0].error.code is ErrorCode.INVALID_REQUEST
        worker.submit(make_request("good"))
        assert await bare.hear(AddRequest) == make_request("good")


async def test_closing_says_goodbye(bare: BareWorker, endpoint: str) -> None:
    async with connected(endpoint):
        await bare.welcome()
    assert await bare.hear(Goodbye) == Goodbye(reason="the gateway closed the link")


async def test_a_busy_event_loop_is_not_a_dead_gateway(tmp_path: Path) -> None:
    rig = RemoteRig(tmp_path)
    try:
        await rig.open()
        stream = rig.worker.submit(make_request("r", max_tokens=400))
        await first_token(stream)
        time.sleep(SLOW_STEP_S)  # blocks the loop: that is what is tested
        outputs = await collect(stream)
        assert finish_reasons(outputs) == [FinishReason.LENGTH]
        assert len(tokens_of(outputs)) == 399
        assert rig.worker.state is WorkerState.READY
    finally:
        await rig.close()


async def test_a_stopped_process_is_noticed_and_taken_back(tmp_path: Path) -> None:
    rig = RemoteRig(tmp_path)
    try:
        await rig.open()
        stream = rig.worker.submit(make_request("r", max_tokens=100_000))
        await first_token(stream)
        send_signal(rig.pid, signal.SIGSTOP)
        try:
            stopped_at = time.monotonic()
            outputs = await collect(stream)
            assert time.monotonic() - stopped_at < TIMING.silence_s + 1.0
            assert outputs[-1].error is not None
            assert outputs[-1].error.code is ErrorCode.WORKER_LOST
            assert rig.worker.state is WorkerState.LOST
        finally:
            send_signal(rig.pid, signal.SIGCONT)
        await rig.worker.wait_ready(10)
        again = await collect(rig.worker.submit(make_request("r", first=8, max_tokens=2)))
        assert tokens_of(again) == [8, 9]
    finally:
        await rig.close()


async def test_two_gateways_share_a_worker_and_nothing_else(tmp_path: Path) -> None:
    rig = RemoteRig(tmp_path)
    other = rig.make_worker()
    try:
        await rig.open()
        await other.start()
        await other.wait_ready(10)
        mine = rig.worker.submit(make_request("same id", first=100, max_tokens=150))
        theirs = other.submit(make_request("same id", first=5000, max_tokens=100_000))
        await first_token(mine)
        await first_token(theirs)
        assert rig.worker.stats.num_running == 2
        await other.close()
        outputs = await collect(mine)
        assert tokens_of(outputs) == list(range(101, 250))
        assert finish_reasons(outputs) == [FinishReason.LENGTH]
        async with asyncio.timeout(5):  # the worker dropped what the closed gateway asked for
            while rig.worker.stats.num_running:
                await asyncio.sleep(0.01)
    finally:
        await other.close()
        await rig.close()


VANISHING_GATEWAY = """
import os, sys, zmq
from model_worker.protocol import PROTOCOL_VERSION, Hello, encode
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(encode(Hello(version=PROTOCOL_VERSION, gateway_id="vanishing")))
socket.recv()
os._exit(9)  # welcomed, and gone without a goodbye
"""


async def test_a_vanished_gateway_is_a_lost_link(endpoint: str) -> None:
    server = WorkerServer(endpoint, "w", EPOCH, timing=QUICK)
    server.start()
    try:
        server.set_ready(make_card())
        async with connected(endpoint) as staying:
            await staying.wait_ready(5)
            gateway = await asyncio.create_subprocess_exec(
                sys.executable, "-c", VANISHING_GATEWAY, endpoint, cwd=ROOT
            )
            assert await gateway.wait() == 9
            commands: list[LinkCommand] = []
            while len(commands) < 3:
                commands += await asyncio.to_thread(server.poll_commands, 5.0)
            assert [type(item.command) for item in commands] == [LinkOpened, LinkOpened, LinkLost]
            assert commands[-1].link_id == "vanishing/2"
            assert staying.state is WorkerState.READY
    finally:
        server.close()


async def test_a_failing_link_thread_is_a_failed_worker(
    bare: BareWorker, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(endpoint) as worker:
        await bare.welcome()
        await worker.wait_ready(5)
        stream = worker.submit(make_request("r"))

        def fail(frame: bytes) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr("service.workers.connection.decode_worker_message", fail)
        await bare.frame(1, 5)
        outputs = await collect(stream, timeout_s=5)
        assert outputs[0].error is not None
        assert outputs[0].error.code is ErrorCode.WORKER_LOST
        assert worker.state is WorkerState.FAILED
        assert worker.detail == "the link thread failed: MemoryError('no room')"
    assert not [t for t in threading.enumerate() if t.name == "headstart-gateway-link"]
