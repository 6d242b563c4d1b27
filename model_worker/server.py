"""The worker's end of its links, as the engine loop uses it.

Owns the I/O thread, the ROUTER socket's security, and the two queues between that thread and the
engine. Refuses to know what a step is: commands come out of :meth:`WorkerServer.poll_commands`,
outputs go into :meth:`WorkerServer.publish`, and neither ever waits for a gateway.
"""

from __future__ import annotations

import hmac
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from cache_store.events import CacheEvent
from model_worker.gateway_links import GatewayLinks, LinkCommand, LinkLost, LinkOpened
from model_worker.link import LinkError, LinkKeys, LinkTiming, Waker, link_keys_for
from model_worker.protocol import ModelCard, Reply, RequestOutput, WorkerStats

__all__ = ["LinkCommand", "LinkLost", "LinkOpened", "WorkerServer"]

MAX_BACKLOG_FRAMES = 512
_SOCKET_QUEUE_FRAMES = 64  # per link, inside ZeroMQ, before the backlog begins
_FLUSH_INTERVAL_S = 0.01  # a ROUTER cannot be polled for one peer's room
_LINGER_MS = 1000
_CURVE_DOMAIN = "headstart"


@dataclass(frozen=True, slots=True)
class _Announcement:
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Outputs:
    outputs: Mapping[str, Sequence[RequestOutput]]
    stats: WorkerStats
    events: Sequence[CacheEvent]


@dataclass(frozen=True, slots=True)
class _LinkEvents:
    link_id: str
    events: Sequence[CacheEvent]


@dataclass(frozen=True, slots=True)
class _Reply:
    link_id: str
    message: Reply


@dataclass(frozen=True, slots=True)
class _Stop:
    reason: str


_Item = _Announcement | ModelCard | _Outputs | _LinkEvents | _Reply | _Stop


class _ClientKey:
    """Admits the one client key that the shared secret gives (called by pyzmq's ZAP thread)."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public_key)


class WorkerServer:
    """Binds ``endpoint`` and serves any number of gateways.

    All methods may be called from any thread; :meth:`poll_commands` from one at a time. ``epoch``
    must differ from that of every earlier process of this ``worker_id`` (time.time_ns() does).
    Raises LinkError when the endpoint is not legal (tcp without a secret, for one).
    """

    def __init__(
        self,
        endpoint: str,
        worker_id: str,
        epoch: int,
        secret: bytes | None = None,
        *,
        timing: LinkTiming | None = None,
        max_backlog_frames: int = MAX_BACKLOG_FRAMES,
    ) -> None:
        self._keys = link_keys_for(endpoint, secret)
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._epoch = epoch
        self._timing = timing or LinkTiming()
        self._max_backlog_frames = max_backlog_frames
        self._waker = Waker()
        self._inbox: deque[_Item] = deque()
        self._commands: queue.SimpleQueue[LinkCommand | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """Once started, the one that was bound: a tcp port given as 0 is resolved."""
        return self._endpoint

    def start(self) -> None:
        """Bind and begin to answer gateways (state "loading"). Raises LinkError."""
        context = zmq.Context()
        authenticator = None if self._keys is None else _authenticate(context, self._keys)
        socket = context.socket(zmq.ROUTER)
        try:
            self._bind(socket)
        except BaseException:
            _close(context, socket, authenticator)
            raise
        self._thread = threading.Thread(
            target=self._run,
            args=(context, socket, authenticator),
            name="headstart-worker-link",
            daemon=True,
        )
        self._thread.start()

    def set_status(self, state: str, detail: str) -> None:
        """Tell the gateways "loading", "failed" or "draining", and one line for a person.

        Draining: running requests go on, new ones are refused here.
        """
        self._put(_Announcement(state, detail))

    def set_ready(self, card: ModelCard) -> None:
        """Welcome the gateways, present and to come; commands arrive from here on."""
        self._put(card)

    def poll_commands(self, timeout_s: float | None) -> list[LinkCommand]:
        """What the gateways asked for, in order; waits up to ``timeout_s`` for the first.

        None waits until there is one, 0 does not wait; :meth:`wake` and signals whose handler
        calls it end the wait. Raises LinkError if the I/O thread has failed.
        """
        commands: list[LinkCommand] = []
        try:
            first = self._commands.get(block=timeout_s != 0, timeout=timeout_s or None)
            while True:
                if first is not None:
                    commands.append(first)
                first = self._commands.get_nowait()
        except queue.Empty:
            pass
        if self._failure is not None:
            raise LinkError(self._failure)
        return commands

    def wake(self) -> None:
        """End a poll_commands that is waiting. Safe in a signal handler."""
        self._commands.put(None)

    def publish(
        self,
        outputs: Mapping[str, Sequence[RequestOutput]],
        stats: WorkerStats,
        events: Sequence[CacheEvent] = (),
    ) -> None:
        """Send each link its outputs of this step as one frame, and all of them ``events``.

        Never waits. What is given belongs to the link from here on. An empty mapping without
        events brings the stats up to date, with the next heartbeat. Outputs for a link that was
        lost go nowhere. Events reach every link that is welcome, in the order of the calls.
        """
        self._put(_Outputs(outputs, stats, events))

    def publish_events(self, link_id: str, events: Sequence[CacheEvent]) -> None:
        """Tell one link, behind all that was published before: the answer to its LinkOpened.

        Events for a link that was lost go nowhere.
        """
        self._put(_LinkEvents(link_id, events))

    def reply(self, link_id: str, message: Reply) -> None:
        self._put(_Reply(link_id, message))

    def close(self, reason: str = "the worker is shutting down") -> None:
        """Deliver what was published (for up to a second), end all links and the thread."""
        if self._thread is None:
            self._waker.close()
            return
        self._put(_Stop(reason))
        self._thread.join()
        self._waker.close()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # ------------------------------------------------------------ starting

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, _SOCKET_QUEUE_FRAMES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, "[" in self._endpoint)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, _CURVE_DOMAIN)
        ipc_path = self._endpoint.removeprefix("ipc://") if self._keys is None else None
        try:
            if ipc_path is not None:
                Path(ipc_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            socket.bind(self._endpoint)
            if ipc_path is not None:
                os.chmod(ipc_path, 0o600)  # the file system is this link's only guard
        except (OSError, zmq.ZMQError) as error:
            raise LinkError(f"cannot listen on {self._endpoint}: {error.strerror}") from error
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _put(self, item: _Item) -> None:
        self._inbox.append(item)
        self._waker.wake()

    # ------------------------------------------------------------ the I/O thread

    def _run(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        authenticator: ThreadAuthenticator | None,
    ) -> None:
        links = GatewayLinks(
            socket,
            self._worker_id,
            self._epoch,
            self._timing,
            self._max_backlog_frames,
            self._commands.put,
        )
        try:
            self._serve(socket, links)
        except Exception as error:  # the engine must learn of it, whatever it is
            self._failure = f"the link thread failed: {error!r}"
            self.wake()
        finally:
            _close(context, socket, authenticator)

    def _serve(self, socket: zmq.Socket[bytes], links: GatewayLinks) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        next_tick = time.monotonic() + self._timing.heartbeat_s
        while True:
            wait_s = next_tick - time.monotonic()
            if links.has_backlog:
                wait_s = min(wait_s, _FLUSH_INTERVAL_S)
            poller.poll(max(0, math.ceil(wait_s * 1000)))
            self._waker.clear()
            now = time.monotonic()
            links.receive(now)
            if not self._empty_inbox(links):
                return
            links.flush()
            if now >= next_tick:
                links.tick(now)
                next_tick = now + self._timing.heartbeat_s

    def _empty_inbox(self, links: GatewayLinks) -> bool:
        """Act on what the engine handed over; False once it has closed the server."""
        while self._inbox:
            item = self._inbox.popleft()
            match item:
                case _Outputs():
                    links.publish(item.outputs, item.stats, item.events)
                case _LinkEvents():
                    links.publish_events(item.link_id, item.events)
                case _Announcement():
                    links.announce(item.state, item.detail)
                case ModelCard():
                    links.welcome_all(item)
                case _Reply():
                    links.reply(item.link_id, item.message)
                case _Stop():
                    self._finish(links, item.reason)
                    return False
        return True

    def _finish(self, links: GatewayLinks, reason: str) -> None:
        give_up_at = time.monotonic() + _LINGER_MS / 1000
        while links.has_backlog and time.monotonic() < give_up_at:
            time.sleep(_FLUSH_INTERVAL_S)
            links.flush()
        links.say_goodbye(reason)


def _authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(
        domain=_CURVE_DOMAIN, credentials_provider=_ClientKey(keys.client_public)
    )
    return authenticator


def _close(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    authenticator: ThreadAuthenticator | None,
) -> None:
    socket.close()
    if authenticator is not None:
        authenticator.stop()
    context.term()
