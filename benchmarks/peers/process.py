"""A server and its children: started, waited for, paused while others are measured.

Owns these processes and ends them by their ids. Knows nothing of what the server is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

import httpx
import psutil

READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
IDLE_CHECK_S = 1.0
IDLE_SHARE = 0.02  # of one core; a server that burns more between its turns is paused


class ServerProcess:
    """``health_url`` answers 200 once the server is ready. Serves on loopback only."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], health_url: str
    ) -> None:
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._health_url = health_url
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._paused: list[psutil.Process] = []
        self.idle_share: float | None = None  # of one core, between turns
        self.start_s: float | None = None

    def start(self) -> None:
        """Raises RuntimeError, with the last lines it wrote, if it ends or is not ready in time."""
        started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        while time.monotonic() < started + READY_TIMEOUT_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"ended with {self._process.returncode}: {self._log_tail()}")
            if self._is_healthy():
                self.start_s = time.monotonic() - started
                return
            time.sleep(0.3)
        last_lines = self._log_tail()
        self.stop()
        raise RuntimeError(f"not ready in {READY_TIMEOUT_S:.0f} s: {last_lines}")

    def rest(self) -> None:
        """End of a turn: see whether it is quiet, and pause it if it is not."""
        if self.idle_share is None:
            time.sleep(IDLE_CHECK_S)  # threads that spin after work have stopped by then
            before = self._cpu_s()
            time.sleep(IDLE_CHECK_S)
            self.idle_share = (self._cpu_s() - before) / IDLE_CHECK_S
        if self.idle_share > IDLE_SHARE:
            self._paused = self._family()
            for process in self._paused:
                process.suspend()

    def wake(self) -> None:
        """Begin of a turn."""
        for process in self._paused:
            process.resume()
        self._paused = []

    def stop(self) -> None:
        if self._process is None:
            return
        self.wake()
        family = self._family()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_TIMEOUT_S)
        for process in family:  # what it left behind, and itself if it did not listen
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None
        self._log.close()

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(self._health_url, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._family()]
        return sum(time_of.user + time_of.system for time_of in times)

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _log_tail(self) -> str:
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 1500, 0))
        return " | ".join(self._log.read().decode(errors="replace").splitlines()[-8:])
