"""The compose file as `docker compose config` reads it, and what it starts, started without Docker.

Owns the translation of a container's paths, addresses and programs into this machine's. What a
service runs stays the compose file's business: its own command line, and its own health check.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.redis_kit import free_port

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ("cpu", "gpu")
OWNERS = ("HEADSTART", "REDIS", "PROMETHEUS", "GRAFANA")
HEALTHY_S = 180.0
CONTAINER_PORTS = ("6379", "7000", "8000")  # Redis, link, gateway
# The images' entry point. `python` of a health check is the image's one interpreter.
PROGRAMS = {"headstart": [sys.executable, "-m", "service.cli"], "python": [sys.executable]}


@cache
def compose_command() -> list[str]:
    """`docker compose` where there is such a plugin, else the program of Debian's package."""
    plugin = ["docker", "compose"]
    try:
        found = subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        found = 1
    return plugin if found == 0 else ["docker-compose"]


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADSTART_", "COMPOSE_"))}
    return kept | dict(variables)


def compose_config(profile: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The document that would be run, validated, variables put in. Services of other profiles
    are left out."""
    document: dict[str, Any] = yaml.safe_load(_config(profile, tuple((variables or {}).items())))
    document["services"] = {
        name: service
        for name, service in document["services"].items()
        if profile in service.get("profiles", [profile])
    }
    return document


@cache  # a second each
def _config(profile: str, variables: tuple[tuple[str, str], ...]) -> str:
    with tempfile.NamedTemporaryFile() as no_variables:  # not those of an .env that is here
        result = subprocess.run(
            [*compose_command(), "--env-file", no_variables.name, "--profile", profile, "config"],
            cwd=ROOT,
            env=clean_environment(dict(variables)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    return result.stdout


def make_secrets(folder: Path) -> None:
    """The secrets as deploy/make-secrets.sh makes them, for whoever runs this."""
    owner = f"{os.getuid()}:{os.getgid()}"
    subprocess.run(
        ["sh", str(ROOT / "deploy" / "make-secrets.sh"), str(folder)],
        env=clean_environment({f"{name}_OWNER": owner for name in OWNERS}),
        check=True,
        capture_output=True,
        timeout=30,
    )


@dataclass(frozen=True)
class Machine:
    """Where this machine has what containers find at fixed places."""

    folder: Path
    ports: Mapping[str, int]

    @classmethod
    def at(cls, folder: Path) -> Machine:
        for name in ("models", "disk", "redis"):
            (folder / name).mkdir()
        make_secrets(folder / "secrets")
        machine = cls(folder, {port: free_port() for port in CONTAINER_PORTS})
        url = folder / "secrets" / "redis-url"
        url.chmod(0o600)
        url.write_text(machine.translate(url.read_text()))
        return machine

    def translate(self, argument: str) -> str:
        """All at once, so that nothing is replaced in what was put in."""
        places = {
            "/run/secrets": str(self.folder / "secrets"),
            "/var/lib/headstart/models": str(self.folder / "models"),
            "/var/lib/headstart/disk": str(self.folder / "disk"),
            "/data": str(self.folder / "redis"),
            "0.0.0.0": "127.0.0.1",
            "//worker:": "//127.0.0.1:",
            "@redis:": "@127.0.0.1:",
            **{port: str(number) for port, number in self.ports.items()},
        }
        pattern = "|".join(re.escape(place) for place in places)
        return re.sub(pattern, lambda found: places[found[0]], argument)

    def command(self, words: list[str]) -> list[str]:
        program = PROGRAMS.get(words[0], [words[0]])
        return [*program, *(self.translate(word) for word in words[1:])]


@dataclass
class Running:
    """The processes of all services, by service name."""

    machine: Machine
    services: Mapping[str, Mapping[str, Any]]
    processes: dict[str, subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.machine.ports['8000']}"

    def secret(self, name: str) -> str:
        return (self.machine.folder / "secrets" / name).read_text().strip()

    def is_healthy(self, name: str) -> bool:
        """What the service's own health check says."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        if kind == "CMD-SHELL":
            words = ["sh", "-c", *words]
        check = self.machine.command(words)
        return subprocess.run(check, capture_output=True, timeout=30, check=False).returncode == 0

    def log(self, name: str) -> str:
        return (self.machine.folder / f"{name}.log").read_text(errors="replace")

    def wait_healthy(self, name: str) -> None:
        deadline = time.monotonic() + HEALTHY_S
        while not self.is_healthy(name):
            assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)}"
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name)}"
            time.sleep(0.5)

    def start(self, name: str) -> None:
        """By the command of the compose file, behind the image's entry point."""
        service = self.services[name]
        is_ours = "build" in service
        with (self.machine.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.machine.command([*(["headstart"] if is_ours else []), *service["command"]]),
                cwd=ROOT if is_ours else self.machine.folder,
                env=clean_environment({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self, name: str) -> int:
        """Ask as `docker compose stop` does; the exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(60)


@contextmanager
def running(document: Mapping[str, Any], folder: Path) -> Iterator[Running]:
    """All services of a document from :func:`compose_config`; none is left when this ends."""
    state = Running(Machine.at(folder), document["services"], {})
    try:
        for name in document["services"]:
            state.start(name)
        yield state
    finally:
        for process in state.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(30)


def entry_point(dockerfile: Path) -> list[str]:
    """The words of the last ENTRYPOINT."""
    *_, last = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile.read_text(), re.MULTILINE)
    words: list[str] = json.loads(last)
    return words
