"""The stream of block events of a worker: a PUB socket, and a ROUTER socket for what was missed.

Owns the thread of both, the numbering of batches, and the bounds on what waits. The engine hands
events over and never waits: a subscriber that is slow misses batches, sees a gap in their numbers,
and may ask for them again. Knows nothing of what is in a cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from cache_store.events import AllBlocksCleared, CopyEvent
from model_worker.block_events import StreamEvent, encode_batch
from model_worker.link import Waker
from model_worker.process_start import ConfigError
from model_worker.replay_log import ReplayLog

__all__ = ["END_OF_REPLAY", "BlockPublisher", "PublisherBounds", "replay_endpoint_of"]

END_OF_REPLAY = b"\xff" * 8  # in place of a number
_GATHER_S = 0.01  # what comes within it goes out together
_NUMBER_BYTES = 8
_MAX_REPLAYS_AT_ONCE = 8  # so that who keeps asking does not keep events from going out

logger = logging.getLogger(__name__)

_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class PublisherBounds:
    """``max_pending`` events wait for the thread; beyond, all subscribers are told that everything
    is gone, which is safe, and hear of what comes after. ``max_unread`` batches wait inside ZeroMQ
    for each subscriber. The others bound what can be replayed, and what goes into one batch."""

    max_pending: int = 100_000
    max_unread: int = 1_000
    replay_batches: int = 10_000
    replay_bytes: int = 64 * 2**20
    batch_events: int = 1_000
    batch_bytes: int = 256 * 2**10  # of hashes; a single event may have more


class BlockPublisher:
    """Binds ``endpoint``, and beside it the one for replays (:func:`replay_endpoint_of`).

    A batch goes out as three frames: ``topic``, its number (8 bytes, big-endian) and the batch
    itself; the first one of a process says that everything is gone. A replay is asked for with an
    empty frame and a number, and answered with what is left from there on, an empty frame before
    each, and then END_OF_REPLAY. All this is as vLLM does it. But numbers do not begin at 0: with
    ``epoch``, which is larger in each life of a worker, a new life is a gap to who counts, and not
    the same numbers once more.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        block_size: int,
        epoch: int,
        *,
        bounds: PublisherBounds | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._topic = topic.encode()
        self._block_size = block_size
        self._bounds = bounds or PublisherBounds()
        self._clock = clock
        self._pending: deque[StreamEvent] = deque([AllBlocksCleared()])
        self._log = ReplayLog(self._bounds.replay_batches, self._bounds.replay_bytes, epoch)
        self._waker = Waker()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises ConfigError where it cannot listen."""
        context = zmq.Context()
        publishing, replaying = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        publishing.setsockopt(zmq.SNDHWM, self._bounds.max_unread)
        # Room for a whole replay and its end, twice, since ZeroMQ notes what was read by halves of
        # its limit. Who asks again and again without reading loses what is beyond it.
        replaying.setsockopt(zmq.SNDHWM, 2 * (self._bounds.replay_batches + 1))
        try:
            _bind(publishing, self._endpoint)
            _bind(replaying, replay_endpoint_of(self._endpoint))
        except BaseException:
            context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run,
            args=(context, publishing, replaying),
            name="headstart-block-events",
            daemon=True,
        )
        self._waker.wake()
        self._thread.start()

    def tell(self, event: CopyEvent) -> None:
        """Never waits. Called by one thread, in the order of what happens."""
        pending = self._pending
        if len(pending) >= self._bounds.max_pending:
            pending.clear()
            pending.append(AllBlocksCleared())
        pending.append(event)
        if len(pending) <= 2:  # else the thread has been woken and has not come to it yet
            self._waker.wake()

    def close(self) -> None:
        """Offer what is left to the subscribers, and end."""
        self._is_ending = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()
        for path in _files_of(self._endpoint):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # ------------------------------------------------------------ the thread

    def _run(self, context: zmq.Context[_Socket], publishing: _Socket, replaying: _Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        poller.register(replaying, zmq.POLLIN)
        try:
            while not self._is_ending:
                poller.poll()
                time.sleep(_GATHER_S)
                self._waker.clear()
                self._publish_pending(publishing)
                self._answer(replaying)
            self._publish_pending(publishing)
        except Exception:  # the worker serves on without it
            logger.exception("the stream of block events has ended")
        finally:
            context.destroy(linger=0)

    def _publish_pending(self, publishing: _Socket) -> None:
        while self._pending:
            events = list(self._next_events())
            payload = encode_batch(self._clock(), events, self._block_size)
            number = self._log.append(payload)
            publishing.send_multipart((self._topic, _number_frame(number), payload))

    def _next_events(self) -> Iterator[StreamEvent]:
        """Taken from what waits, as many as go into one batch."""
        num_bytes = 0
        for _ in range(self._bounds.batch_events):
            if num_bytes >= self._bounds.batch_bytes:
                return
            try:
                event = self._pending.popleft()
            except IndexError:
                return
            num_bytes += 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
            yield event

    def _answer(self, replaying: _Socket) -> None:
        for _ in range(_MAX_REPLAYS_AT_ONCE):
            try:
                asking, *request = replaying.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) != 2 or request[0] or len(request[1]) != _NUMBER_BYTES:
                continue  # not a question that anybody could answer
            for number, payload in self._log.since(int.from_bytes(request[1], "big")):
                frames = (asking, b"", self._topic, _number_frame(number), payload)
                replaying.send_multipart(frames)
            replaying.send_multipart((asking, b"", b"", END_OF_REPLAY, b""))


def replay_endpoint_of(endpoint: str) -> str:
    """The next port, or the socket's path with ``.replay`` behind it."""
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.replay"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + 1}"


def _bind(socket: _Socket, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    except (OSError, zmq.ZMQError) as error:
        reason = os.strerror(error.errno or 0)  # ZeroMQ's own words repeat the address
        raise ConfigError(f"--events-endpoint: cannot listen on {endpoint}: {reason}") from error


def _files_of(endpoint: str) -> tuple[str, ...]:
    if not endpoint.startswith("ipc://"):
        return ()
    return tuple(each.removeprefix("ipc://") for each in (endpoint, replay_endpoint_of(endpoint)))


def _number_frame(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
