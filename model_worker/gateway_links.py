"""The I/O thread's side of the worker's links: one ROUTER socket, one GatewayLink per gateway.

Owns the handshake, frame numbering, heartbeats, and each link's bounded outbound queue. Used by
one thread only. Knows nothing of the engine: what it hears goes to ``deliver``, and what it sends
was handed to it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from cache_store.events import CacheEvent
from model_worker.link import LinkTiming
from model_worker.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Command,
    ErrorCode,
    FinishReason,
    GatewayMessage,
    Goodbye,
    Heartbeat,
    Hello,
    ModelCard,
    PrefixCommand,
    ProtocolVersion,
    Refusal,
    Reply,
    RequestError,
    RequestOutput,
    ResetCache,
    StepFrame,
    TenantPolicies,
    Welcome,
    WorkerStats,
    WorkerStatus,
    decode_gateway_message,
    encode,
    peek_request_id,
)

DRAINING = "draining"
_RECEIVE_BATCH = 512  # so that one flooding gateway does not keep the thread from sending


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A link has been welcomed: it hears all cache events from here on, and has yet to be told
    what was stored before. Comes again if the link is welcomed again."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The gateway behind a link is gone: its requests are to be aborted, nobody reads them.
    ``is_goodbye``: it said so itself."""

    reason: str
    is_goodbye: bool = False


@dataclass(frozen=True, slots=True)
class LinkCommand:
    link_id: str
    command: Command | LinkOpened | LinkLost


@dataclass(slots=True)
class GatewayLink:
    """One gateway that has said Hello."""

    link_id: str
    routing_id: bytes
    version: ProtocolVersion  # the gateway's
    last_heard: float  # seconds of the monotonic clock
    sequence: int = 0  # of the last StepFrame
    is_welcomed: bool = False
    has_stale_stats: bool = False
    backlog: deque[bytes] = field(default_factory=deque)  # what the socket did not take yet


class GatewayLinks:
    """All links of one worker. Every method is called by the thread that owns ``socket``.

    ``socket`` is a bound ROUTER with ROUTER_MANDATORY set: a send to a peer that is gone or full
    raises, which is how its link is dropped or its backlog grows.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        worker_id: str,
        epoch: int,
        timing: LinkTiming,
        max_backlog_frames: int,
        deliver: Callable[[LinkCommand], None],
    ) -> None:
        self._socket = socket
        self._worker_id = worker_id
        self._epoch = epoch
        self._timing = timing
        self._max_backlog_frames = max_backlog_frames
        self._deliver = deliver
        self._links: dict[bytes, GatewayLink] = {}
        self._ids: dict[str, GatewayLink] = {}
        self._numbers = itertools.count(1)
        self._status = WorkerStatus(worker_id=worker_id, state="loading", detail="starting")
        self._welcome: bytes | None = None
        self._stats = WorkerStats()

    @property
    def has_backlog(self) -> bool:
        return any(link.backlog for link in self._links.values())

    # ------------------------------------------------------------ from the engine

    def announce(self, state: str, detail: str) -> None:
        """Tell all gateways; unless draining, they are welcomed afresh once the card is known."""
        self._status = WorkerStatus(worker_id=self._worker_id, state=state, detail=detail)
        self._welcome = None
        self._broadcast(encode(self._status))

    def welcome_all(self, card: ModelCard) -> None:
        self._welcome = encode(
            Welcome(
                version=PROTOCOL_VERSION,
                worker_id=self._worker_id,
                epoch=self._epoch,
                model=card,
            )
        )
        self._status = WorkerStatus(worker_id=self._worker_id, state="ready", detail="")
        for link in tuple(self._links.values()):
            self._open(link, self._welcome)

    def publish(
        self,
        outputs: Mapping[str, Sequence[RequestOutput]],
        stats: WorkerStats,
        events: Sequence[CacheEvent] = (),
    ) -> None:
        """One frame to each link named, and with events to every welcomed link.

        The others learn the stats with the next heartbeat.
        """
        if stats != self._stats:
            self._stats = stats
            for link in self._links.values():
                link.has_stale_stats = link.is_welcomed
        for link in tuple(self._links.values()):
            link_outputs = outputs.get(link.link_id)
            link_events = tuple(events) if link.is_welcomed else ()
            if link_outputs is not None or link_events:
                self._send_frame(link, tuple(link_outputs or ()), link_events)

    def publish_events(self, link_id: str, events: Sequence[CacheEvent]) -> None:
        """For this link alone, as one frame."""
        link = self._ids.get(link_id)
        if link is not None and link.is_welcomed and events:
            self._send_frame(link, (), tuple(events))

    def reply(self, link_id: str, message: Reply) -> None:
        link = self._ids.get(link_id)
        if link is not None:
            self._send(link, encode(message))

    def say_goodbye(self, reason: str) -> None:
        """The worker ends: nothing more is delivered, the links learn why."""
        self._broadcast(encode(Goodbye(reason=reason)))
        self._links.clear()
        self._ids.clear()

    # ------------------------------------------------------------ from the gateways

    def receive(self, now: float) -> None:
        """Take what has arrived, at most a batch. ``now``: seconds of the monotonic clock."""
        for _ in range(_RECEIVE_BATCH):
            try:
                routing_id, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = parts[-1] if parts else b""
            link = self._links.get(routing_id)
            if link is not None:
                link.last_heard = now
            try:
                message = decode_gateway_message(frame)
            except msgspec.DecodeError as error:
                self._reject(routing_id, link, frame, str(error))
            else:
                self._take(routing_id, link, message, now)

    def tick(self, now: float) -> None:
        """Once per heartbeat_s, after :meth:`receive`: drop silent links, speak to the others."""
        for link in tuple(self._links.values()):
            silence_s = now - link.last_heard
            if silence_s > self._timing.silence_s:
                self._drop(link, f"the gateway was silent for {silence_s:.1f} s")
            elif link.has_stale_stats:
                self._send_frame(link, ())
            else:
                self._send(link, encode(Heartbeat(epoch=self._epoch, sequence=link.sequence)))

    def flush(self) -> None:
        """Offer the backlogs to the socket again."""
        for link in tuple(self._links.values()):
            while link.backlog and self._try_send(link, link.backlog[0]):
                link.backlog.popleft()

    # ------------------------------------------------------------ messages

    def _take(
        self, routing_id: bytes, link: GatewayLink | None, message: GatewayMessage, now: float
    ) -> None:
        match message:
            case Hello():
                self._greet(routing_id, message, now)
            case Goodbye(reason=reason):
                if link is not None:
                    self._forget(link, reason, is_goodbye=True)
            case Heartbeat():
                if link is None:
                    self._send_stray(routing_id, Goodbye(reason="this link is not open any more"))
            case AddRequest() | Abort() | ResetCache() | PrefixCommand() | TenantPolicies():
                if link is None:
                    self._send_stray(routing_id, Goodbye(reason="this link is not open any more"))
                else:
                    self._command(link, message)

    def _greet(self, routing_id: bytes, hello: Hello, now: float) -> None:
        if not PROTOCOL_VERSION.accepts(hello.version):
            self._refuse(
                routing_id,
                f"this worker speaks link protocol {PROTOCOL_VERSION.major}."
                f"{PROTOCOL_VERSION.minor}, the gateway {hello.version.major}."
                f"{hello.version.minor}",
            )
            return
        link = self._links.get(routing_id)
        if link is None:
            link_id = f"{hello.gateway_id}/{next(self._numbers)}"
            link = GatewayLink(link_id, routing_id, hello.version, last_heard=now)
            self._links[routing_id] = link
            self._ids[link_id] = link
        link.version = hello.version
        if self._welcome is None:
            self._send(link, encode(self._status))
        else:
            self._open(link, self._welcome)

    def _open(self, link: GatewayLink, welcome: bytes) -> None:
        link.is_welcomed = True
        # Said before it is sent: a send may find that the gateway is gone, and that comes after.
        self._deliver(LinkCommand(link.link_id, LinkOpened()))
        self._send(link, welcome)

    def _command(self, link: GatewayLink, command: Command) -> None:
        if not link.is_welcomed:
            self._drop(link, "the gateway sent a command before it was welcomed")
        elif isinstance(command, AddRequest) and self._status.state == DRAINING:
            self._end_request(
                link, command.request_id, ErrorCode.SHUTTING_DOWN, "the worker is shutting down"
            )
        else:
            self._deliver(LinkCommand(link.link_id, command))

    def _reject(
        self, routing_id: bytes, link: GatewayLink | None, frame: bytes, problem: str
    ) -> None:
        request_id = peek_request_id(frame)
        if link is None:
            self._refuse(routing_id, f"not a message of this link protocol: {problem}")
        elif request_id is None:
            self._drop(link, f"not a message of this link protocol: {problem}")
        else:
            self._end_request(
                link,
                request_id,
                ErrorCode.INVALID_REQUEST,
                f"the worker does not understand the request: {problem}",
            )

    def _end_request(
        self, link: GatewayLink, request_id: str, code: ErrorCode, message: str
    ) -> None:
        output = RequestOutput(
            request_id=request_id,
            finish_reason=FinishReason.ERROR,
            error=RequestError(code=code, message=message),
        )
        self._send_frame(link, (output,))

    # ------------------------------------------------------------ sending

    def _send_frame(
        self,
        link: GatewayLink,
        outputs: tuple[RequestOutput, ...],
        events: tuple[CacheEvent, ...] = (),
    ) -> None:
        link.sequence += 1
        link.has_stale_stats = False
        self._send(
            link,
            encode(
                StepFrame(
                    epoch=self._epoch,
                    sequence=link.sequence,
                    outputs=outputs,
                    stats=self._stats,
                    events=events,
                )
            ),
        )

    def _broadcast(self, payload: bytes) -> None:
        for link in tuple(self._links.values()):
            self._send(link, payload)

    def _send(self, link: GatewayLink, payload: bytes) -> None:
        if not link.backlog and self._try_send(link, payload):
            return
        if link.routing_id not in self._links:
            return  # it was dropped just now
        link.backlog.append(payload)
        if len(link.backlog) > self._max_backlog_frames:
            self._drop(link, f"the gateway left {len(link.backlog)} frames unread")

    def _try_send(self, link: GatewayLink, payload: bytes) -> bool:
        try:
            self._socket.send_multipart((link.routing_id, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(link, "the gateway closed the connection")
            return False
        return True

    def _refuse(self, routing_id: bytes, reason: str) -> None:
        self._send_stray(routing_id, Refusal(version=PROTOCOL_VERSION, reason=reason))

    def _send_stray(self, routing_id: bytes, message: Refusal | Goodbye) -> None:
        """To a peer that has no link: best effort, it hears of it or times out."""
        try:
            self._socket.send_multipart((routing_id, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def _drop(self, link: GatewayLink, reason: str) -> None:
        self._forget(link, reason)
        self._send_stray(link.routing_id, Goodbye(reason=reason))

    def _forget(self, link: GatewayLink, reason: str, *, is_goodbye: bool = False) -> None:
        if self._links.pop(link.routing_id, None) is not None:
            del self._ids[link.link_id]
            self._deliver(LinkCommand(link.link_id, LinkLost(reason, is_goodbye)))
