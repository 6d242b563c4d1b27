"""A gateway process from its listening socket to its last request.

Owns the order of start and shutdown (bind, start workers, serve, drain, close), what a signal does,
and what is printed on the way. Knows nothing of requests or of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import uvicorn

from model_worker.protocol import (
    EXIT_CONFIG,
    LinkError,
    WorkerConfig,
    configure_logging,
    log_event,
    read_link_secret,
)
from service import __version__
from service.app import create_app, gateway_in, uvicorn_config
from service.config import ConfigError, GatewayConfig
from service.gateway import Gateway
from service.tokenizer import do_without_torch
from service.workers.base import StateChange, WorkerState
from service.workers.local import LocalWorker
from service.workers.registry import WorkerRegistry
from service.workers.remote import RemoteWorker

__all__ = ["GatewayProcess", "become_worker", "client_url", "gateway", "listen", "serve"]

_BACKLOG = 2048
_POLL_S = 0.05
_LAST_WORDS_S = 5  # for answers that were told to end, once the drain's time is over
_FORCED_CLOSE_S = 1.0
_EXIT_FORCED = 130
_LEVELS = {
    WorkerState.READY: logging.INFO,
    WorkerState.DRAINING: logging.INFO,
    WorkerState.LOST: logging.WARNING,
    WorkerState.FAILED: logging.WARNING,
}

_log = logging.getLogger("headstart")


def serve(config: GatewayConfig, worker: WorkerConfig) -> int:
    """A gateway and one worker child, until a signal; the process's exit code.

    Raises ConfigError when the address cannot be listened on.
    """
    listener = listen(config.host, config.port)
    do_without_torch()
    child = LocalWorker(worker)
    exit_code = asyncio.run(GatewayProcess(config, WorkerRegistry([child]), listener).run())
    if exit_code == EXIT_CONFIG and not child.last_lines:
        print(f"headstart: {child.detail}", file=sys.stderr)
    return exit_code


def gateway(config: GatewayConfig) -> int:
    """A gateway for the workers at ``config.workers``. As :func:`serve`."""
    listener = listen(config.host, config.port)
    do_without_torch()
    try:
        secret = read_link_secret(config.link_secret_file) if config.link_secret_file else None
    except LinkError as error:
        raise ConfigError(str(error)) from None
    workers = [RemoteWorker(endpoint, secret) for endpoint in config.workers]
    return asyncio.run(GatewayProcess(config, WorkerRegistry(workers), listener).run())


def become_worker(worker: WorkerConfig) -> NoReturn:
    """Replace this process by a worker.

    A worker reads its configuration from standard input and takes the end of it for the death of
    its parent. This one has no parent: it holds the other end of the pipe itself.
    """
    reader, writer = os.pipe()
    os.write(writer, msgspec.json.encode(worker) + b"\n")
    os.dup2(reader, 0)
    os.close(reader)
    os.set_inheritable(writer, True)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "model_worker"])


class _Server(uvicorn.Server):
    """Leaves signals to the process: a second one must end it at once, whichever it is."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayProcess:
    """``listener`` is bound and listens; it is closed by the end of :meth:`run`."""

    def __init__(
        self, config: GatewayConfig, registry: WorkerRegistry, listener: socket.socket
    ) -> None:
        configure_logging(config.log_level, config.log_format)
        self._config = config
        self._registry = registry
        self._listener = listener
        app = create_app(config, registry)
        self._gateway: Gateway = gateway_in(app)
        server_config = uvicorn_config(app, config)
        server_config.timeout_graceful_shutdown = _LAST_WORDS_S
        if config.log_level == "info":
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server = _Server(server_config)
        self._drain: asyncio.Task[None] | None = None
        self._exit_code = 0
        registry.add_state_listener(self._on_worker_change)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.tenant_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self._gateway.tenants.ask_to_reload)
        announcement = asyncio.create_task(self._announce())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            announcement.cancel()
            self._listener.close()
        if self._server.force_exit:
            await self._end_now()
        if not self._server.started:
            self._exit_code = self._exit_code or 1
        return self._exit_code

    def _on_signal(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_stop())
            return
        self._drain.cancel()
        self._server.force_exit = True
        self._server.should_exit = True

    async def _drain_and_stop(self) -> None:
        num_running = self._gateway.gate.num_in_flight
        if num_running:
            log_event(
                _log,
                logging.WARNING,
                "stopping: running requests get some time to finish; once more to stop at once",
                num_requests=num_running,
                seconds=self._config.drain_timeout,
            )
        if not await self._gateway.drain():
            await self._registry.close()  # ends what still runs with a typed error
        self._server.should_exit = True

    async def _end_now(self) -> NoReturn:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FORCED_CLOSE_S):
                await self._registry.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_FORCED)  # no thread and no child may hold up the second Ctrl-C

    def _on_worker_change(self, change: StateChange) -> None:
        if self._drain is not None or self._server.should_exit:
            return  # what happens to workers now was asked for
        is_child = not (self._config.workers or self._config.finds_workers)
        if is_child and change.state is WorkerState.FAILED:  # it has said why; no restart mends it
            self._exit_code = EXIT_CONFIG
            self._server.should_exit = True
            return
        log_event(
            _log,
            _LEVELS.get(change.state, logging.DEBUG),
            f"worker {change.state}",
            worker_id=change.worker_id,
            detail=change.detail or None,
        )

    async def _announce(self) -> None:
        """Say where the server is, once requests are answered."""
        while self._gateway.unready_reason:
            await asyncio.sleep(_POLL_S)
        served = self._gateway.served
        assert served is not None
        url = client_url(self._config.host, self._listener.getsockname()[1])
        print(_banner(url, served.names[0], has_keys=self._config.has_keys), flush=True)


def _banner(url: str, model: str, *, has_keys: bool) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = '-H "Authorization: Bearer $HEADSTART_API_KEY" ' if has_keys else ""
    return (
        f"\nHeadstart {__version__} serves {model}\n"
        f"  API        {url}/v1\n"
        f"  Dashboard  {url}/\n"
        f"  Try        curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n"
    )


def client_url(host: str, port: int) -> str:
    """As a client on this machine would write it."""
    bare = host.strip("[]")
    bare = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Bound and listening, before anything slow begins. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        raise ConfigError(f"--host {host}: there is no such address") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: another program already listens there on {host}"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener
