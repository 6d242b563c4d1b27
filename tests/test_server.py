"""The worker's end of a link, against gateways made of a bare DEALER socket."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from cache_store.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, Tier
from model_worker.link import LinkError, LinkTiming, derive_link_keys
from model_worker.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    CacheReset,
    Command,
    ErrorCode,
    GatewayMessage,
    Goodbye,
    Heartbeat,
    Hello,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    ProtocolVersion,
    Refusal,
    RequestOutput,
    ResetCache,
    SamplingParams,
    StepFrame,
    TenantPolicies,
    TenantPolicy,
    Welcome,
    WorkerMessage,
    WorkerStats,
    WorkerStatus,
    decode_worker_message,
    encode,
)
from model_worker.server import LinkCommand, LinkLost, LinkOpened, WorkerServer
from tests.scripted_worker import make_card

EPOCH = 42
SECRET = b"a secret of enough bytes"
FAST = LinkTiming(heartbeat_s=0.05, silence_s=0.4)
PATIENT = LinkTiming(heartbeat_s=60.0, silence_s=600.0)  # nothing is sent by the clock


class BareGateway:
    """A DEALER socket that says what it is told to."""

    def __init__(
        self, endpoint: str, secret: bytes | None = None, *, has_own_keys: bool = False
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if secret is not None:
            keys = derive_link_keys(secret)
            self.socket.curve_serverkey = keys.server_public
            self.socket.curve_publickey = keys.client_public
            self.socket.curve_secretkey = keys.client_secret
            if has_own_keys:
                self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
        self.socket.connect(endpoint)

    def say(self, message: GatewayMessage) -> None:
        self.socket.send(encode(message))

    def hear(self, timeout_s: float = 5.0) -> WorkerMessage:
        assert self.socket.poll(int(timeout_s * 1000)), "nothing was heard"
        return decode_worker_message(self.socket.recv())

    def hears_nothing(self, for_s: float) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def hear_until(self, kind: type[WorkerMessage], timeout_s: float = 5.0) -> WorkerMessage:
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            message = self.hear(timeout_s)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} was heard")

    def join(self, name: str = "gw", version: ProtocolVersion = PROTOCOL_VERSION) -> None:
        self.say(Hello(version=version, gateway_id=name))
        assert isinstance(self.hear_until(Welcome), Welcome)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w.sock"


@contextmanager
def running_server(
    endpoint: str,
    *,
    secret: bytes | None = None,
    timing: LinkTiming = PATIENT,
    max_backlog_frames: int = 512,
    is_ready: bool = True,
) -> Iterator[WorkerServer]:
    server = WorkerServer(
        endpoint, "w0", EPOCH, secret, timing=timing, max_backlog_frames=max_backlog_frames
    )
    server.start()
    try:
        if is_ready:
            server.set_ready(make_card())
        yield server
    finally:
        server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., BareGateway]]:
    gateways: list[BareGateway] = []

    def make(
        endpoint: str, secret: bytes | None = None, *, has_own_keys: bool = False
    ) -> BareGateway:
        gateways.append(BareGateway(endpoint, secret, has_own_keys=has_own_keys))
        return gateways[-1]

    yield make
    for gateway in gateways:
        gateway.close()


def make_request(request_id: str = "r1") -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=b"\x05\x00\x00\x00",
        sampling_params=SamplingParams(max_tokens=4),
    )


def poll(server: WorkerServer, timeout_s: float) -> list[LinkCommand]:
    """The next commands from gateways that are welcome already; none by ``timeout_s``."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        remaining_s = max(0.0, give_up_at - time.monotonic())
        commands = [
            item
            for item in server.poll_commands(remaining_s)
            if not isinstance(item.command, LinkOpened)
        ]
        if commands or not remaining_s:
            return commands


def poll_one(server: WorkerServer, timeout_s: float = 5.0) -> LinkCommand:
    commands = poll(server, timeout_s)
    assert len(commands) == 1, commands
    return commands[0]


def test_hello_is_answered_with_the_card(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint):
        gateway = connect(endpoint)
        gateway.say(Hello(version=PROTOCOL_VERSION, gateway_id="gw"))
        assert gateway.hear() == Welcome(
            version=PROTOCOL_VERSION, worker_id="w0", epoch=EPOCH, model=make_card()
        )


def test_status_is_told_while_the_model_loads(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, is_ready=False) as server:
        gateway = connect(endpoint)
        gateway.say(Hello(version=PROTOCOL_VERSION, gateway_id="gw"))
        assert gateway.hear() == WorkerStatus(worker_id="w0", state="loading", detail="starting")
        server.set_status("loading", "weights 40 %")
        assert gateway.hear() == WorkerStatus(
            worker_id="w0", state="loading", detail="weights 40 %"
        )
        server.set_ready(make_card())
        assert isinstance(gateway.hear(), Welcome)


def test_another_major_version_is_refused(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.say(Hello(version=ProtocolVersion(9, 1), gateway_id="gw"))
        refusal = gateway.hear()
        assert isinstance(refusal, Refusal)
        assert refusal.version == PROTOCOL_VERSION
        assert refusal.reason == (
            f"this worker speaks link protocol {PROTOCOL_VERSION.major}.{PROTOCOL_VERSION.minor}, "
            "the gateway 9.1"
        )
        assert server.poll_commands(0) == []


def test_commands_arrive_in_order_with_their_link(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join("alpha")
        sent: list[Command] = [
            make_request("a"),
            make_request("b"),
            Abort(request_id="a"),
            ResetCache(call_id="1"),
            PrefixCommand(call_id="2", action=PrefixAction.DROP, prompt_token_ids=b"\x07\0\0\0"),
        ]
        for message in sent:
            gateway.say(message)
        commands: list[LinkCommand] = []
        while len(commands) < len(sent):
            commands += poll(server, 5.0)
        assert [item.command for item in commands] == sent
        assert {item.link_id for item in commands} == {"alpha/1"}


def test_poll_commands_times_out_and_can_be_woken(endpoint: str) -> None:
    with running_server(endpoint) as server:
        started = time.monotonic()
        assert server.poll_commands(0.05) == []
        assert time.monotonic() - started >= 0.05
        assert server.poll_commands(0) == []
        threading.Timer(0.05, server.wake).start()
        assert server.poll_commands(None) == []


def test_frames_are_numbered_per_link(endpoint: str, connect: Callable[..., BareGateway]) -> None:
    with running_server(endpoint) as server:
        first, second = connect(endpoint), connect(endpoint)
        first.join("a")
        second.join("b")
        stats = WorkerStats(num_running=2)
        for token in (7, 8):
            server.publish({"a/1": [RequestOutput(request_id="x", token_ids=(token,))]}, stats)
        server.publish({"b/2": [RequestOutput(request_id="x", token_ids=(9,))]}, stats)
        frames = [first.hear(), first.hear(), second.hear()]
        assert [(f.sequence, f.outputs[0].token_ids, f.epoch) for f in frames] == [  # type: ignore[union-attr]
            (1, (7,), EPOCH),
            (2, (8,), EPOCH),
            (1, (9,), EPOCH),
        ]
        assert first.hears_nothing(0.05)
        assert second.hears_nothing(0.05)


def test_heartbeats_carry_the_last_sequence(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, timing=FAST) as server:
        gateway = connect(endpoint)
        gateway.join()
        assert gateway.hear() == Heartbeat(epoch=EPOCH, sequence=0)
        server.publish({"gw/1": [RequestOutput(request_id="x")]}, WorkerStats())
        assert gateway.hear_until(StepFrame).sequence == 1  # type: ignore[union-attr]
        assert gateway.hear() == Heartbeat(epoch=EPOCH, sequence=1)


def test_stats_alone_travel_with_the_next_heartbeat(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, timing=FAST) as server:
        gateway = connect(endpoint)
        gateway.join()
        stats = WorkerStats(num_free_blocks=11)
        server.publish({}, stats)
        assert gateway.hear_until(StepFrame) == StepFrame(
            epoch=EPOCH, sequence=1, outputs=(), stats=stats
        )
        assert gateway.hear() == Heartbeat(epoch=EPOCH, sequence=1)


def stored(number: int) -> BlockStored:
    return BlockStored(Tier.DEVICE, number.to_bytes(16, "little"))


def events_in(frames: list[WorkerMessage]) -> list[CacheEvent]:
    return [event for frame in frames if isinstance(frame, StepFrame) for event in frame.events]


def test_a_welcome_opens_the_link(endpoint: str, connect: Callable[..., BareGateway]) -> None:
    with running_server(endpoint, is_ready=False) as server:
        early = connect(endpoint)
        early.say(Hello(version=PROTOCOL_VERSION, gateway_id="early"))
        assert isinstance(early.hear(), WorkerStatus)
        assert server.poll_commands(0) == []
        server.set_ready(make_card())
        assert server.poll_commands(5.0) == [LinkCommand("early/1", LinkOpened())]
        connect(endpoint).join("late")
        assert server.poll_commands(5.0) == [LinkCommand("late/2", LinkOpened())]
        early.say(Hello(version=PROTOCOL_VERSION, gateway_id="early"))
        assert server.poll_commands(5.0) == [LinkCommand("early/1", LinkOpened())]


def test_events_reach_every_link_in_order_with_its_outputs(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        busy, idle = connect(endpoint), connect(endpoint)
        busy.join("busy")
        idle.join("idle")
        output = RequestOutput(request_id="x", token_ids=(3,))
        for number in range(200):
            outputs = {"busy/1": [output]} if number % 2 else {}
            server.publish(outputs, WorkerStats(), [stored(number), BlockRemoved(b"r" * 16)])
        for gateway, has_outputs in ((busy, True), (idle, False)):
            frames = [gateway.hear() for _ in range(200)]
            assert [frame.sequence for frame in frames] == list(range(1, 201))  # type: ignore[union-attr]
            expected = [event for n in range(200) for event in (stored(n), BlockRemoved(b"r" * 16))]
            assert events_in(frames) == expected
            answered = [bool(frame.outputs) for frame in frames]  # type: ignore[union-attr]
            assert answered == [has_outputs and bool(number % 2) for number in range(200)]


def test_a_link_is_told_apart_what_was_stored_before_it(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, is_ready=False) as server:
        old, new = connect(endpoint), connect(endpoint)
        new.say(Hello(version=PROTOCOL_VERSION, gateway_id="new"))
        assert isinstance(new.hear(), WorkerStatus)
        server.publish({}, WorkerStats(), [stored(1)])  # nobody is welcome yet
        server.set_ready(make_card())
        assert isinstance(new.hear(), Welcome)
        old.join("old")
        server.publish({}, WorkerStats(), [stored(2)])
        server.publish_events("new/1", [stored(1), stored(2)])
        server.publish_events("new/1", [])
        server.publish({}, WorkerStats(), [AllBlocksCleared()])
        frames = [new.hear() for _ in range(3)]
        assert events_in(frames) == [stored(2), stored(1), stored(2), AllBlocksCleared()]
        assert [frame.sequence for frame in frames] == [1, 2, 3]  # type: ignore[union-attr]
        assert events_in([old.hear(), old.hear()]) == [stored(2), AllBlocksCleared()]
        assert old.hears_nothing(0.05)


def test_a_gateway_of_the_minor_version_before_is_understood(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        older = connect(endpoint)
        older.join("older", ProtocolVersion(1, PROTOCOL_VERSION.minor - 1))
        request = msgspec.to_builtins(make_request("old"), builtin_types=(bytes,))
        older.socket.send(msgspec.msgpack.encode(request))
        assert poll_one(server) == LinkCommand("older/1", make_request("old"))


def test_policies_of_tenants_are_a_command(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        message = TenantPolicies(policies=(TenantPolicy(tenant="a", max_host_bytes=0),))
        gateway.say(message)
        assert poll_one(server) == LinkCommand("gw/1", message)


def test_a_silent_gateway_is_lost(endpoint: str, connect: Callable[..., BareGateway]) -> None:
    with running_server(endpoint, timing=FAST) as server:
        gateway = connect(endpoint)
        gateway.join()
        started = time.monotonic()
        lost = poll_one(server)
        assert time.monotonic() - started < 2 * FAST.silence_s
        assert lost.link_id == "gw/1"
        assert isinstance(lost.command, LinkLost)
        assert lost.command.reason.startswith("the gateway was silent for")
        assert isinstance(gateway.hear_until(Goodbye), Goodbye)
        gateway.say(Heartbeat())
        assert gateway.hear() == Goodbye(reason="this link is not open any more")


def test_heartbeats_keep_a_gateway_that_asks_for_nothing(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, timing=FAST) as server:
        gateway = connect(endpoint)
        gateway.join()
        for _ in range(12):  # twice silence_s
            gateway.say(Heartbeat())
            assert poll(server, FAST.silence_s / 6) == []


def test_a_goodbye_is_a_loss_at_once(endpoint: str, connect: Callable[..., BareGateway]) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        gateway.say(Goodbye(reason="stopping"))
        assert poll_one(server) == LinkCommand("gw/1", LinkLost("stopping", is_goodbye=True))


def test_a_closed_connection_is_found_when_something_is_sent(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        gateway.close()
        give_up_at = time.monotonic() + 5
        commands: list[LinkCommand] = []
        while not commands and time.monotonic() < give_up_at:
            server.publish({"gw/1": [RequestOutput(request_id="x")]}, WorkerStats())
            commands = poll(server, 0.02)
        assert commands == [LinkCommand("gw/1", LinkLost("the gateway closed the connection"))]


def test_a_gateway_that_does_not_read_is_dropped_and_publish_never_waits(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, max_backlog_frames=20) as server:
        slow, quick = connect(endpoint), connect(endpoint)
        slow.socket.setsockopt(zmq.RCVHWM, 1)
        slow.join("slow")
        quick.join("quick")
        bulk = RequestOutput(request_id="x", token_ids=tuple(range(2**20, 2**20 + 4000)))
        longest = 0.0
        lost: list[LinkCommand] = []
        for _ in range(2000):
            started = time.monotonic()
            server.publish({"slow/1": [bulk]}, WorkerStats())
            longest = max(longest, time.monotonic() - started)
            lost += poll(server, 0.001)
            if lost:
                break
        assert [item.link_id for item in lost] == ["slow/1"]
        assert lost[0].command == LinkLost("the gateway left 21 frames unread")
        assert longest < 0.25
        server.publish({"quick/2": [RequestOutput(request_id="y")]}, WorkerStats())
        assert quick.hear_until(StepFrame).sequence == 1  # type: ignore[union-attr]


def test_a_gateway_that_reads_late_gets_its_backlog_in_order(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, max_backlog_frames=10_000) as server:
        gateway = connect(endpoint)
        gateway.join()
        bulk = tuple(range(2**20, 2**20 + 2000))
        for _ in range(1500):
            server.publish({"gw/1": [RequestOutput(request_id="x", token_ids=bulk)]}, WorkerStats())
        sequences = [gateway.hear().sequence for _ in range(1500)]  # type: ignore[union-attr]
        assert sequences == list(range(1, 1501))


def test_outputs_for_a_link_that_is_gone_go_nowhere(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        server.publish({"other/9": [RequestOutput(request_id="x")]}, WorkerStats())
        server.reply("other/9", CacheReset(call_id="1", num_blocks_dropped=3))
        server.publish_events("other/9", [AllBlocksCleared()])
        server.reply("gw/1", CacheReset(call_id="1", num_blocks_dropped=4))
        server.reply("gw/1", PrefixReply(call_id="2", num_disk_tokens=5))
        assert gateway.hear() == CacheReset(call_id="1", num_blocks_dropped=4)
        assert gateway.hear() == PrefixReply(call_id="2", num_disk_tokens=5)


def test_a_request_with_a_bad_field_ends_alone(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        bad = msgspec.to_builtins(make_request("bad"), builtin_types=(bytes,))
        bad["sampling_params"]["top_k"] = 1.5
        gateway.socket.send(msgspec.msgpack.encode(bad))
        gateway.say(make_request("good"))
        assert poll_one(server).command == make_request("good")
        frame = gateway.hear()
        assert isinstance(frame, StepFrame)
        assert frame.outputs[0].request_id == "bad"
        assert frame.outputs[0].error is not None
        assert frame.outputs[0].error.code is ErrorCode.INVALID_REQUEST
        assert "top_k" in frame.outputs[0].error.message


def test_garbage_ends_its_link_only(endpoint: str, connect: Callable[..., BareGateway]) -> None:
    with running_server(endpoint) as server:
        noisy, quiet = connect(endpoint), connect(endpoint)
        noisy.join("noisy")
        quiet.join("quiet")
        noisy.socket.send(b"\xc1 not msgpack")
        lost = poll_one(server)
        assert lost.link_id == "noisy/1"
        assert isinstance(lost.command, LinkLost)
        assert isinstance(noisy.hear(), Goodbye)
        quiet.say(make_request())
        assert poll_one(server) == LinkCommand("quiet/2", make_request())


def test_garbage_without_a_link_is_refused(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        stranger = connect(endpoint)
        stranger.socket.send_multipart([b"", b"GET / HTTP/1.1"])
        assert isinstance(stranger.hear(), Refusal)
        stranger.say(make_request())
        assert isinstance(stranger.hear(), Goodbye)
        assert server.poll_commands(0.05) == []


def test_commands_before_the_welcome_end_the_link(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint, is_ready=False) as server:
        gateway = connect(endpoint)
        gateway.say(Hello(version=PROTOCOL_VERSION, gateway_id="gw"))
        gateway.say(make_request())
        assert isinstance(poll_one(server).command, LinkLost)
        assert isinstance(gateway.hear_until(Goodbye), Goodbye)


def test_a_draining_worker_goes_on_but_takes_nothing_new(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway, late = connect(endpoint), connect(endpoint)
        gateway.join()
        server.set_status("draining", "stopping")
        assert isinstance(gateway.hear(), WorkerStatus)
        gateway.say(make_request("new"))
        frame = gateway.hear()
        assert isinstance(frame, StepFrame)
        assert frame.outputs[0].error is not None
        assert frame.outputs[0].error.code is ErrorCode.SHUTTING_DOWN
        gateway.say(Abort(request_id="old"))
        assert poll_one(server).command == Abort(request_id="old")
        server.publish({"gw/1": [RequestOutput(request_id="old", token_ids=(1,))]}, WorkerStats())
        assert isinstance(gateway.hear(), StepFrame)
        late.say(Hello(version=PROTOCOL_VERSION, gateway_id="late"))
        assert late.hear() == WorkerStatus(worker_id="w0", state="draining", detail="stopping")


def test_close_delivers_what_was_published_and_says_why(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        for token in range(300):
            output = RequestOutput(request_id="x", token_ids=(token,))
            server.publish({"gw/1": [output]}, WorkerStats())
        server.close("done for today")
        heard = [gateway.hear() for _ in range(301)]
        assert [m.outputs[0].token_ids[0] for m in heard[:-1]] == list(range(300))  # type: ignore[union-attr]
        assert heard[-1] == Goodbye(reason="done for today")


def test_close_leaves_no_thread_socket_or_file(endpoint: str) -> None:
    threads_before = set(threading.enumerate())
    with running_server(endpoint):
        assert len(threading.enumerate()) > len(threads_before)
    assert set(threading.enumerate()) == threads_before
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_the_ipc_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "w.sock"
    with running_server(f"ipc://{path}"):
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_tcp_admits_the_holder_of_the_secret_only(connect: Callable[..., BareGateway]) -> None:
    with running_server("tcp://127.0.0.1:0", secret=SECRET) as server:
        assert not server.endpoint.endswith(":0")
        connect(server.endpoint, SECRET).join()
        plain = connect(server.endpoint)
        wrong = connect(server.endpoint, b"another secret, as long")
        # Knows the worker's public key, but is not who the secret makes it.
        half = connect(server.endpoint, SECRET, has_own_keys=True)
        for gateway in (plain, wrong, half):
            gateway.say(Hello(version=PROTOCOL_VERSION, gateway_id="intruder"))
        assert wrong.hears_nothing(0.4)
        assert plain.hears_nothing(0.05)
        assert half.hears_nothing(0.05)


def test_tcp_without_a_secret_is_refused_at_construction() -> None:
    with pytest.raises(
        LinkError, match=r"tcp://127\.0\.0\.1:0: a link over TCP needs a shared secret"
    ):
        WorkerServer("tcp://127.0.0.1:0", "w0", EPOCH)


def test_a_taken_port_is_one_clear_line() -> None:
    with running_server("tcp://127.0.0.1:0", secret=SECRET) as server:
        second = WorkerServer(server.endpoint, "w1", EPOCH, SECRET)
        with pytest.raises(LinkError, match=r"cannot listen on tcp://.*: Address already in use"):
            second.start()
        second.close()


def test_a_failure_of_the_link_thread_reaches_the_engine(
    endpoint: str, connect: Callable[..., BareGateway]
) -> None:
    with running_server(endpoint) as server:
        gateway = connect(endpoint)
        gateway.join()
        assert server.poll_commands(5.0) == [LinkCommand("gw/1", LinkOpened())]
        server.publish({"gw/1": 3}, WorkerStats())  # type: ignore[dict-item]
        with pytest.raises(LinkError, match="the link thread failed: TypeError"):
            server.poll_commands(5.0)
