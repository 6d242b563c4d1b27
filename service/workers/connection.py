"""One socket to one worker, and the proof that nothing received on it is missing or out of place.

Owns the DEALER socket, its security and its monitor. Used by the link's thread only. Knows
nothing of threads or of when to try again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from model_worker.protocol import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    LinkKeys,
    LinkTiming,
    Refusal,
    Reply,
    StepFrame,
    Waker,
    Welcome,
    WorkerMessage,
    WorkerStatus,
    decode_worker_message,
    encode,
)

_LINGER_MS = 200  # for the Goodbye, should the worker not read just now
_RECONNECT_MS = 100
_MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

WorkerNews = Welcome | WorkerStatus | StepFrame | Reply


class LinkEndedError(Exception):
    """The link is over; ``is_refused`` when the worker speaks another version."""

    def __init__(self, reason: str, *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_refused = is_refused


class WorkerConnection:
    """One socket, and what has been received on it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        number: int,
        endpoint: str,
        keys: LinkKeys | None,
        timing: LinkTiming,
    ) -> None:
        self.number = number
        self.opened_at = time.monotonic()
        self.heard_at: float | None = None  # None until the transport's handshake is done
        self.num_connects = 0
        self._endpoint = endpoint
        self._welcome: Welcome | None = None
        self._sequence = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never blocks; silence bounds it
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(timing.answer_s * 1000))
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        self._socket.connect(endpoint)

    def poller(self, waker: Waker) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(waker.fileno(), zmq.POLLIN)
        return poller

    def monitor_events(self) -> list[int]:
        events: list[int] = []
        while True:
            try:
                events.append(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            except zmq.Again:
                return events

    def messages(self, now: float) -> Iterator[WorkerNews]:
        """Everything received, checked one by one. Raises LinkEndedError."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.heard_at = now
            message = self._check(frame)
            if message is not None:
                yield message

    def say(self, message: Hello | Heartbeat | Goodbye) -> None:
        self.send(encode(message))

    def send(self, payload: bytes) -> None:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return  # no connection: LinkDown follows or has been said

    def why_unanswered(self) -> str:
        if self.num_connects:
            return (
                f"{self._endpoint} does not complete the handshake: "
                "is it a worker with the same link secret?"
            )
        return f"nothing answers at {self._endpoint}"

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _check(self, frame: bytes) -> WorkerNews | None:
        try:
            message: WorkerMessage = decode_worker_message(frame)
        except msgspec.DecodeError as error:
            raise LinkEndedError(f"not a message of this link protocol: {error}") from None
        match message:
            case Heartbeat():
                self._check_heartbeat(message)
                return None
            case Goodbye(reason=reason):
                raise LinkEndedError(reason)
            case Refusal(reason=reason):
                raise LinkEndedError(reason, is_refused=True)
            case Welcome():
                self._check_welcome(message)
            case StepFrame():
                self._check_step(message)
        return message

    def _check_welcome(self, welcome: Welcome) -> None:
        if not PROTOCOL_VERSION.accepts(welcome.version):
            raise LinkEndedError(
                f"this gateway speaks link protocol {PROTOCOL_VERSION.major}."
                f"{PROTOCOL_VERSION.minor}, the worker {welcome.version.major}."
                f"{welcome.version.minor}",
                is_refused=True,
            )
        self._check_epoch(welcome.epoch)
        self._welcome = welcome

    def _check_step(self, frame: StepFrame) -> None:
        if self._welcome is None:
            raise LinkEndedError("a frame came before the welcome")
        self._check_epoch(frame.epoch)
        if frame.sequence != self._sequence + 1:
            raise LinkEndedError(f"frame {self._sequence + 1} is missing, {frame.sequence} came")
        self._sequence = frame.sequence

    def _check_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._welcome is not None:
            self._check_epoch(heartbeat.epoch)
        if heartbeat.sequence != self._sequence:
            raise LinkEndedError(f"frame {self._sequence + 1} is missing")

    def _check_epoch(self, epoch: int) -> None:
        if self._welcome is not None and epoch != self._welcome.epoch:
            raise LinkEndedError("the worker was started anew")
