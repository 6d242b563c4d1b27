"""Words that occur nowhere else, and every place where a deployment could keep them.

Owns the forms in which tokens and text may lie about, and the search for them in files, in Redis,
in logs and in metrics. Knows nothing of sessions.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.gateway_kit import ids_of
from tests.redis_kit import Server, running_server
from tests.server_kit import RealServer
from tests.session_kit import wait_for

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
DISK, DUMP, VALUES, SESSIONS_FILE = "disk", "dump.rdb", "values", "sessions file"
REDIS_PASSWORD = "the-password-of-redis"
GONE_S = 60.0  # what is promised
_PAUSE_S = 0.2  # between searches, which keep a core busy that the servers need
_WINDOW = 6  # tokens in a row that are found nowhere by chance
_CONSONANTS = "bcdfgjklmnpqrvxz"
_MODEL = "tiny"


@dataclass(frozen=True)
class Needle:
    """Token ids in a row, and the text that they stand for, if it is known."""

    ids: tuple[int, ...]
    text: str = ""

    @classmethod
    def made(cls, name: str) -> Needle:
        """Words of no language, to be said after a space."""
        drawn = random.Random(f"needle {name}")
        words = ["".join(drawn.choices(_CONSONANTS, k=8)) for _ in range(6)]
        text = " ".join(words)
        return cls(ids_of(" " + text), text)

    @cached_property
    def forms(self) -> tuple[bytes, ...]:
        """Any few of the ids, as integers of several sizes and orders and as decimals; any word."""
        return self._forms(_WINDOW, stride=1)

    @cached_property
    def hints(self) -> tuple[bytes, ...]:
        """Where a form is, one of these is: of the starts of fewer ids in a form, each fourth. They
        are a quarter as many, and mostly it is them that are not found."""
        return self._forms(_WINDOW // 2, stride=_WINDOW // 2 + 1)

    def _forms(self, size: int, stride: int) -> tuple[bytes, ...]:
        starts = range(0, len(self.ids) - size + 1, stride)
        windows = [self.ids[at : at + size] for at in starts]
        packed = (
            np.array(window, dtype=order).tobytes()
            for window in windows
            for order in ("<i4", ">i4", "<i2", ">i2", "<i8")
        )
        decimal = (
            between.join(map(str, window)).encode()
            for window in windows
            for between in (", ", ",", " ")
        )
        return (*packed, *decimal, *(word.encode() for word in self.text.split()))

    def is_in(self, content: bytes) -> bool:
        if not any(hint in content for hint in self.hints):
            return False
        return any(form in content for form in self.forms)


@dataclass(frozen=True)
class SearchedRedis:
    server: Server
    folder: Path

    @property
    def url(self) -> str:
        return f"redis://:{REDIS_PASSWORD}@127.0.0.1:{self.server.port}"

    def contents(self) -> dict[str, bytes]:
        with self.server.client() as client:
            client.save()
            dump = (self.folder / "dump.rdb").read_bytes()
            return {DUMP: dump, VALUES: b"\n".join(_values(client))}


@dataclass
class Place:
    """`headstart serve` with host and disk tiers, and a Redis if ``redis`` is given."""

    server: RealServer
    disk: Path
    redis: SearchedRedis | None
    used: list[Needle] = field(default_factory=list)  # all that was ever said
    deleted: list[Needle] = field(default_factory=list)

    def needle(self, name: str) -> Needle:
        return self.note(Needle.made(name))

    def note(self, needle: Needle) -> Needle:
        self.used.append(needle)
        return needle

    @contextlib.contextmanager
    def forgetting(self, *needles: Needle) -> Iterator[None]:
        """All of ``needles`` is there, and no more once the block has deleted it."""
        for needle in needles:
            self.wait_found(needle)
        yield
        self.wait_gone(*needles)

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.server.url, timeout=60.0, verify=False, headers=headers)

    # ------------------------------------------------------------ the search

    def contents(self) -> dict[str, bytes]:
        """Everything that is kept outside of the processes, by kind of place."""
        files = {path: _content(path) for path in self.disk.rglob("*") if path.is_file()}
        is_gateways = {path: path.parent.name == "gateway" for path in files}
        found = {
            DISK: b"\n".join(files[path] for path in files if not is_gateways[path]),
            SESSIONS_FILE: b"\n".join(files[path] for path in files if is_gateways[path]),
        }
        if self.redis is not None:
            found |= self.redis.contents()
        return found

    def where(self, needle: Needle) -> set[str]:
        contents = self.contents().items()
        return {kind for kind, content in contents if needle.is_in(_without_gaps(content))}

    @property
    def everywhere(self) -> set[str]:
        return {DISK, SESSIONS_FILE} if self.redis is None else {DISK, DUMP, VALUES}

    def wait_found(self, needle: Needle) -> None:
        """The search would find it: otherwise its finding nothing means nothing."""
        found: set[str] = set()

        def is_complete() -> bool:
            found.update(self.where(needle))  # in one place later than in another
            return found == self.everywhere

        wait_for(is_complete, GONE_S, _PAUSE_S)

    def wait_gone(self, *needles: Needle) -> None:
        self.deleted += needles
        wait_for(lambda: not any(self.where(n) for n in needles), GONE_S, _PAUSE_S)

    def assert_silent(self) -> None:
        """Neither logs nor metrics say any of it, or whose it is."""
        said = f"{self.server.stdout}\n{self.server.stderr}"
        if self.server.process.poll() is None:
            with self.client(ADMIN) as client:
                said += client.get("/metrics").text
        for secret in (REDIS_PASSWORD, "key-of-", "name-of-"):  # of API keys, of sessions
            assert secret not in said
        for needle in self.used:
            assert not needle.is_in(said.encode())


def _without_gaps(content: bytes) -> bytes:
    """Long runs of zeros made short, still longer than in any form: they are slow to search, and
    most of a file whose blocks were erased."""
    return re.sub(rb"\0{64,}", bytes(64), content)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # it was replaced by another one meanwhile
        return b""


def _values(client: Any) -> Iterator[bytes]:
    for key in client.keys("*"):
        yield key
        match client.type(key):
            case b"hash":
                for name, value in client.hgetall(key).items():
                    yield name
                    yield value
            case b"zset":
                yield from client.zrange(key, 0, -1)
            case b"string":
                yield client.get(key) or b""
            case b"none":
                pass  # it has gone meanwhile
            case other:
                raise AssertionError(f"a value of another kind: {other!r}")


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[SearchedRedis]:
    """With a password, and with dumps that show what they hold."""
    folder.mkdir()
    options = ("--requirepass", REDIS_PASSWORD, "--rdbcompression", "no")
    with running_server("redis", folder, options) as server:
        yield SearchedRedis(server, folder)


@contextlib.contextmanager
def place(
    folder: Path,
    model: Path,
    *options: str,
    redis: SearchedRedis | None = None,
) -> Iterator[Place]:
    """``folder`` holds all of the deployment, and may be that of an earlier one. It is only begun:
    ``server.wait_ready`` is the caller's, so that several can start side by side."""
    folder.mkdir(exist_ok=True)
    arguments = ["--model", str(model), "--served-model-name", _MODEL, "--num-threads", "1"]
    arguments += ["--model-cache-dir", str(folder / "digests"), "--log-level", "debug"]
    arguments += ["--block-size", "16", "--kv-cache-memory", "4MiB", "--max-num-seqs", "4"]
    arguments += ["--host-cache-size", "4MiB", "--disk-cache-dir", str(folder / "disk")]
    arguments += ["--disk-cache-size", "64MiB", "--session-idle-timeout", "1"]
    arguments += ["--api-key-file", _secret(folder / "keys", f"{ALICE}\n{BOB}")]
    arguments += ["--admin-key-file", _secret(folder / "admin-keys", ADMIN)]
    if redis is not None:
        arguments += ["--redis-url", "@" + _secret(folder / "redis-url", redis.url)]
    here = Place(RealServer(*arguments, *options), folder / "disk", redis)
    try:
        yield here
        here.assert_silent()
    finally:
        here.server.stop()
    here.assert_silent()
    for needle in here.deleted:  # nothing of it came back, not even by the shutdown
        assert not here.where(needle)


def _secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
