"""The gateway's end of a link: a DEALER socket on a thread of its own.

Owns connecting and connecting again, the handshake, heartbeats, and the proof that no frame is
missing. A busy event loop therefore never looks like a dead gateway. Knows nothing of streams or
of asyncio: what it finds goes to ``on_event``, which is called on the link's thread.

Each attempt is a new socket and a new link with its own number. Nothing that was sent for one link
travels on the next.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from model_worker.protocol import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    LinkKeys,
    LinkTiming,
    Waker,
)
from service.workers.connection import LinkEndedError, WorkerConnection, WorkerNews


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """One message of the worker. Frames are in order and complete; heartbeats are not passed on."""

    number: int
    message: WorkerNews


@dataclass(frozen=True, slots=True)
class LinkWaiting:
    """Not connected for answer_s."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link has ended, another is opened by and by. Exactly one per link that was heard."""

    reason: str
    is_refused: bool  # the worker speaks another version: a person must act


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The thread is done; the last event."""

    failure: str | None  # why, unless it was told to


LinkEvent = LinkMessage | LinkWaiting | LinkDown | LinkClosed


class WorkerLink:
    """Keeps a link to the worker at ``endpoint`` open until told to stop.

    ``keys`` are what link_keys_for gives for the endpoint. Each method is safe on any thread.
    """

    def __init__(
        self,
        endpoint: str,
        gateway_id: str,
        keys: LinkKeys | None,
        timing: LinkTiming,
        on_event: Callable[[LinkEvent], None],
    ) -> None:
        self._endpoint = endpoint
        self._gateway_id = gateway_id
        self._keys = keys
        self._timing = timing
        self._on_event = on_event
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._waker = Waker()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="headstart-gateway-link", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def send(self, number: int, payload: bytes) -> None:
        """Send on link ``number``; dropped when that one has ended (LinkDown says so)."""
        self._outbox.append((number, payload))
        self._waker.wake()

    def stop(self) -> None:
        """Begin to end; LinkClosed follows."""
        self._is_stopping.set()
        self._waker.wake()

    def join(self) -> None:
        """After LinkClosed: free the rest, without a wait worth the name."""
        if self._thread.ident is not None:
            self._thread.join()
        self._waker.close()

    # ------------------------------------------------------------ the link's thread

    def _run(self) -> None:
        failure = None
        context = zmq.Context()
        try:
            number = 0
            while not self._is_stopping.is_set():
                number += 1
                self._pause(self._run_link(context, number))
        except Exception as error:  # must be told, whatever it is: the streams depend on it
            failure = f"the link thread failed: {error!r}"
        finally:
            context.term()
            self._on_event(LinkClosed(failure))

    def _run_link(self, context: zmq.Context[zmq.Socket[bytes]], number: int) -> float:
        """One link from its first attempt to its end; the seconds to wait before the next."""
        connection = WorkerConnection(context, number, self._endpoint, self._keys, self._timing)
        try:
            self._serve(connection)
        except LinkEndedError as end:
            connection.say(Goodbye(reason=end.reason))
            self._on_event(LinkDown(end.reason, end.is_refused))
            return self._timing.refused_retry_s if end.is_refused else self._timing.reopen_s
        finally:
            connection.close()
        return 0.0

    def _serve(self, connection: WorkerConnection) -> None:
        poller = connection.poller(self._waker)
        next_tick = time.monotonic() + self._timing.heartbeat_s
        while True:
            poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
            self._waker.clear()
            if self._is_stopping.is_set():
                connection.say(Goodbye(reason="the gateway closed the link"))
                return
            now = time.monotonic()
            self._receive(connection, now)
            self._send_outbox(connection)
            if now >= next_tick:
                self._tick(connection, now)
                next_tick = now + self._timing.heartbeat_s

    def _receive(self, connection: WorkerConnection, now: float) -> None:
        # Events are fetched first and acted on last: what came before a disconnect still counts.
        events = connection.monitor_events()
        for message in connection.messages(now):
            self._on_event(LinkMessage(connection.number, message))
        for event in events:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.heard_at = now
                connection.say(Hello(version=PROTOCOL_VERSION, gateway_id=self._gateway_id))
            elif event == zmq.EVENT_CONNECTED:
                connection.num_connects += 1
            elif connection.heard_at is not None:
                raise LinkEndedError("the connection was closed")

    def _send_outbox(self, connection: WorkerConnection) -> None:
        while self._outbox:
            number, payload = self._outbox.popleft()
            if number == connection.number:
                connection.send(payload)

    def _tick(self, connection: WorkerConnection, now: float) -> None:
        if connection.heard_at is None:
            waited_s = now - connection.opened_at
            if waited_s >= self._timing.answer_s:
                self._on_event(LinkWaiting(connection.why_unanswered()))
        elif now - connection.heard_at > self._timing.silence_s:
            raise LinkEndedError(f"nothing was heard for {now - connection.heard_at:.1f} s")
        else:
            connection.say(Heartbeat())

    def _pause(self, seconds: float) -> None:
        self._is_stopping.wait(seconds)
