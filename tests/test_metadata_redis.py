"""Redis absent, killed, stalled, emptied, foreign, full, locked or encrypted: what callers see."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cache_store.cipher import Cipher
from cache_store.metadata.base import MetadataError
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink
from cache_store.metadata.redis_url import parse_redis_url
from cache_store.metadata.resilient import ResilientMetadataStore
from tests.metadata_kit import chunk, chunks, make_session, make_worker, stored
from tests.redis_kit import PATIENCE_S, Server, running_server

TIMEOUT_S = 0.3
PROBE_S = 0.05
MARGIN_S = 0.5  # what a busy machine may add
PASSWORD = "p@ss/w0rd:sec#ret"
QUOTED = "p%40ss%2Fw0rd%3Asec%23ret"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server("redis", tmp_path) as running:
        yield running


def make_store(url: str, cipher: Cipher | None = None) -> RedisMetadataStore:
    return RedisMetadataStore(RedisLink(url, timeout_s=TIMEOUT_S, probe_s=PROBE_S), cipher=cipher)


@asynccontextmanager
async def started(
    url: str, cipher: Cipher | None = None, *, max_kept: int = 100, max_kept_bytes: int = 2**20
) -> AsyncIterator[ResilientMetadataStore]:
    store = ResilientMetadataStore(
        make_store(url, cipher), max_kept=max_kept, max_kept_bytes=max_kept_bytes
    )
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def seconds_of(call: Awaitable[object]) -> float:
    """How long it takes to fail."""
    began = time.monotonic()
    with pytest.raises(MetadataError):
        await call
    return time.monotonic() - began


async def until_healthy(store: ResilientMetadataStore, is_empty: bool = True) -> None:
    async with asyncio.timeout(10):
        while store.is_degraded or (is_empty and store.stats.num_kept):
            await asyncio.sleep(0.01)


async def until_degraded(store: ResilientMetadataStore) -> None:
    """Bounded: two failures open the breaker."""
    for _ in range(2):
        if not store.is_degraded:
            assert await seconds_of(store.num_sessions()) < TIMEOUT_S + MARGIN_S
    assert store.is_degraded


# ---------------------------------------------------------------- out of reach


async def test_absent_at_start_it_is_found_when_it_comes(server: Server) -> None:
    server.kill()
    began = time.monotonic()
    async with started(server.url) as store:
        assert time.monotonic() - began < TIMEOUT_S + MARGIN_S
        assert store.is_degraded
        assert await seconds_of(store.locate("model", chunk(1))) < 0.1
        assert await seconds_of(store.renew_worker(make_worker(), 60.0)) < 0.1
        assert await store.put_session(make_session(history=b"kept"), 0)
        server.start()
        await until_healthy(store)
        await store.renew_worker(make_worker(), 60.0)
        assert list(await store.workers("model")) == [make_worker()]
        assert await read_elsewhere(server) == b"kept"
        assert 0 < store.stats.degraded_s < time.monotonic() - began


async def test_one_late_answer_at_start_is_no_outage(server: Server) -> None:
    server.signal(signal.SIGSTOP)
    link = RedisLink(server.url, timeout_s=1.0, probe_s=PROBE_S)
    starting = asyncio.create_task(link.start())
    await asyncio.sleep(1.3)
    assert not starting.done()
    server.signal(signal.SIGCONT)
    await starting
    assert not link.breaker.is_open
    assert link.breaker.open_s == 0.0
    await link.close()


async def test_killed_under_load_every_call_ends_in_time(server: Server) -> None:
    async with started(server.url) as store:
        await store.renew_worker(make_worker(), 60.0)
        await store.apply_events(make_worker(), [stored(*range(100))], 60.0)
        slowest = 0.0
        is_over = False

        async def ask() -> None:
            nonlocal slowest
            while not is_over:
                began = time.monotonic()
                try:
                    await store.locate("model", chunks(*range(100)))
                except MetadataError:
                    await asyncio.sleep(0.01)
                slowest = max(slowest, time.monotonic() - began)

        tasks = [asyncio.create_task(ask()) for _ in range(20)]
        await asyncio.sleep(0.1)
        server.kill()
        await asyncio.sleep(0.3)
        assert store.is_degraded
        server.start()
        await until_healthy(store)
        is_over = True
        await asyncio.gather(*tasks)
        assert slowest < TIMEOUT_S + MARGIN_S
        assert list(await store.workers("model")) == []  # it came back empty
        await store.renew_worker(make_worker(), 60.0)
        await store.apply_events(make_worker(), [stored(1)], 60.0)
        assert [found.tiers for found in await store.locate("model", chunk(1))] == [("device",)]


async def test_stalled_it_costs_a_bounded_time_and_then_none(server: Server) -> None:
    async with started(server.url) as store:
        assert await store.put_session(make_session(history=b"first"), 0)
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        await until_degraded(store)
        assert time.monotonic() - began < 2 * TIMEOUT_S + MARGIN_S
        assert await seconds_of(store.get_session("t1", "s1")) < 0.1
        assert await store.put_session(make_session(history=b"second"), 1)
        kept = await store.get_session("t1", "s1")
        assert kept is not None
        assert (kept.version, kept.history) == (2, b"second")
        await asyncio.sleep(3 * PROBE_S)
        assert store.is_degraded
        server.signal(signal.SIGCONT)
        await until_healthy(store)
        assert await read_elsewhere(server) == b"second"
        assert store.stats.conflicts_total == 0


async def test_answers_never_change_places_when_calls_are_given_up(server: Server) -> None:
    link = RedisLink(server.url, timeout_s=0.03, probe_s=PROBE_S, max_failures=10**6)
    store = RedisMetadataStore(link)
    await store.start()
    patient = RedisMetadataStore(RedisLink(server.url, timeout_s=PATIENCE_S))
    await patient.start()
    for n in range(20):
        assert await patient.put_session(make_session(f"s{n}", history=b"%d" % n * 50), 0)
    await patient.close()
    num_answers = num_failures = 0
    is_over = False

    async def ask(n: int) -> None:
        nonlocal num_answers, num_failures
        while not is_over:
            try:
                found = await store.get_session("t1", f"s{n}")
                assert found is not None
                assert found.history == b"%d" % n * 50
                await store.apply_events(make_worker(), [stored(n)], 60.0)
                num_answers += 1
            except MetadataError:
                num_failures += 1
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ask(n)) for n in range(20)]
    for _ in range(15):
        await asyncio.sleep(0.03)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(0.05)
        server.signal(signal.SIGCONT)
    is_over = True
    await asyncio.gather(*tasks)
    assert num_answers > 20
    assert num_failures > 20
    await store.close()


async def test_a_write_whose_answer_was_lost_is_no_conflict(server: Server) -> None:
    async with started(server.url) as store:
        server.signal(signal.SIGSTOP)
        # The server takes the command from its socket once it goes on.
        assert await store.put_session(make_session(history=b"first"), 0)
        assert await store.put_session(make_session(history=b"second"), 1)
        assert not await store.put_session(make_session(history=b"fork"), 1)
        server.signal(signal.SIGCONT)
        await until_healthy(store)
        assert await read_elsewhere(server) == b"second"
        assert (store.stats.conflicts_total, store.stats.dropped_total) == (0, 0)
        assert await store.put_session(make_session(history=b"third"), 2)


async def read_elsewhere(server: Server, cipher: Cipher | None = None) -> bytes | None:
    """The history as another gateway finds it."""
    async with started(server.url, cipher) as other:
        found = await other.get_session("t1", "s1")
        return None if found is None else found.history


# ---------------------------------------------------------------- what is kept


async def test_a_session_that_another_changed_meanwhile_stays_as_stored(server: Server) -> None:
    async with started(server.url) as store:
        assert await store.put_session(make_session(history=b"first"), 0)
        server.kill()
        await until_degraded(store)
        assert await store.put_session(make_session(history=b"ours"), 1)
        server.start()
        async with started(server.url) as other:  # before ours is written, it may be
            for version in range(3):
                await other.put_session(make_session(history=b"theirs"), version)
            await until_healthy(store)
        assert await read_elsewhere(server) == b"theirs"
        assert store.stats.conflicts_total == 1
        assert store.stats.num_kept == 0
        found = await store.get_session("t1", "s1")
        assert found is not None
        assert found.history == b"theirs"


async def test_what_is_kept_is_bounded_by_number_and_by_bytes(server: Server) -> None:
    server.kill()
    async with started(server.url, max_kept=3, max_kept_bytes=20_000) as store:
        for n in range(5):
            assert await store.put_session(make_session(f"s{n}"), 0)
        assert (store.stats.num_kept, store.stats.dropped_total) == (3, 2)
        assert await seconds_of(store.get_session("t1", "s1")) < 0.1
        assert await store.get_session("t1", "s2") is not None
        assert await store.put_session(make_session("large", history=bytes(18_000)), 0)
        assert (store.stats.num_kept, store.stats.kept_bytes) == (2, 20_000)
        too_large = make_session("too large", history=bytes(20_000))
        assert await seconds_of(store.put_session(too_large, 0)) < 0.1
        assert (store.stats.num_kept, store.stats.kept_bytes) == (2, 20_000)
        assert store.stats.dropped_total == 5


async def test_a_kept_session_that_is_deleted_is_not_written(server: Server) -> None:
    server.kill()
    async with started(server.url) as store:
        assert await store.put_session(make_session(history=b"words"), 0)
        assert await seconds_of(store.delete_session("t1", "s1")) < 0.1
        server.start()
        await until_healthy(store)
        assert await store.get_session("t1", "s1") is None
        assert await store.num_sessions() == 0


async def test_a_kept_session_whose_time_is_over_is_not_written(server: Server) -> None:
    server.kill()
    async with started(server.url) as store:
        assert await store.put_session(make_session(lifetime_s=0.1), 0)
        await asyncio.sleep(0.15)
        assert await store.get_session("t1", "s1") is None
        server.start()
        await until_healthy(store)
        assert store.stats.dropped_total == 1


async def test_what_is_kept_is_written_at_the_end_if_it_can_be(server: Server) -> None:
    async with started(server.url) as store:
        server.signal(signal.SIGSTOP)
        assert await store.put_session(make_session(history=b"last"), 0)
        assert not store.is_degraded  # one failure does not open it
        server.signal(signal.SIGCONT)
    assert await read_elsewhere(server) == b"last"


# ---------------------------------------------------------------- what others put there


async def test_foreign_data_under_our_keys_counts_as_absent_and_is_replaced(
    server: Server,
) -> None:
    names = (
        "worker:w1", "workers", "workers:model", "chunks:model:w1:7", "session:t1:s1", "sessions",
        "sessions:t1",
    )  # fmt: skip
    async with started(server.url) as store:
        for plant in ("string", "list", "hash", "zset"):
            with server.client() as client:
                client.flushall()
                for name in names:
                    key = f"headstart:1:{name}"
                    if plant == "string":
                        client.set(key, b"\xff\x00foreign")
                    elif plant == "list":
                        client.rpush(key, "foreign")
                    elif plant == "hash":
                        client.hset(key, mapping={"version": "x", "foreign": "y"})
                    else:
                        client.zadd(key, {b"\xfffore%ign": 9e15})
            assert list(await store.workers("model")) == []
            assert list(await store.all_workers()) == []
            assert list(await store.locate("model", chunk(1))) == []
            assert await store.get_session("t1", "s1") is None
            assert await store.list_sessions("t1") == ([], "")
            assert await store.num_sessions() in (0, 1)
            await store.renew_worker(make_worker(), 60.0)
            await store.apply_events(make_worker(), [stored(1)], 60.0)
            assert await store.put_session(make_session(history=b"ours"), 0)
            assert list(await store.workers("model")) == [make_worker()]
            assert len(await store.locate("model", chunk(1))) == 1
            found = await store.get_session("t1", "s1")
            assert found is not None
            assert found.history == b"ours"
            assert [r.session_id for r in (await store.list_sessions("t1"))[0]] == ["s1"]
            assert await store.delete_session("t1", "s1") is not None
            await store.remove_worker("w1")
            assert list(await store.workers("model")) == []
        assert not store.is_degraded


async def test_a_deployment_with_another_key_is_not_read_and_not_stuck(server: Server) -> None:
    ours, theirs = Cipher(bytes(32)), Cipher(bytes([1]) * 32)
    async with started(server.url, theirs) as store:
        assert await store.put_session(make_session(history=b"theirs"), 0)
        assert await store.put_session(make_session(history=b"theirs"), 1)
    for cipher in (ours, None):
        assert await read_elsewhere(server, cipher) is None
    async with started(server.url, ours) as store:
        assert await store.put_session(make_session(history=b"ours"), 0)
        assert not await store.put_session(make_session(history=b"fork"), 0)
        found = await store.get_session("t1", "s1")
        assert found is not None
        assert (found.version, found.history) == (1, b"ours")
        assert store.stats.unreadable_total == 1


async def test_what_is_sealed_shows_nothing_and_opens_only_in_its_place(server: Server) -> None:
    cipher = Cipher(bytes(32))
    async with started(server.url, cipher) as store:
        for name in ("s1", "s2"):
            record = make_session(name, history=b"a needle", cache_salt="a secret salt")
            assert await store.put_session(record, 0)
        with server.client() as client:
            one, other = (client.hgetall(f"headstart:1:session:t1:{n}") for n in ("s1", "s2"))
            assert not any(b"needle" in v or b"secret" in v for v in one.values())
            client.hset("headstart:1:session:t1:s1", "history", other[b"history"])
        assert await store.get_session("t1", "s1") is None
        assert await store.get_session("t1", "s2") is not None


async def test_everything_in_redis_runs_out_by_itself(server: Server) -> None:
    async with started(server.url) as store:
        await store.renew_worker(make_worker(), 0.2)
        await store.apply_events(make_worker(), [stored(1)], 0.2)
        await store.put_session(make_session(lifetime_s=0.2), 0)
        with server.client() as client:
            keys = client.keys("*")
            assert all(0 < client.pttl(key) <= 10_000 for key in keys)
            assert len(keys) == 8
            await asyncio.sleep(0.3)
            assert client.keys("*") == [b"headstart:1:probe"]


# ---------------------------------------------------------------- passwords, TLS, policies


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


async def test_a_password_opens_the_door_and_is_shown_nowhere(
    tmp_path: Path, everything_logged: pytest.LogCaptureFixture
) -> None:
    with running_server("redis", tmp_path, ("--requirepass", PASSWORD)) as server:
        address = f"127.0.0.1:{server.port}"
        async with started(f"redis://:{QUOTED}@{address}") as store:
            assert await store.put_session(make_session(), 0)
            assert_hidden(repr(store) + repr(vars(store)) + repr(store._store.link))
            server.kill()
            with pytest.raises(MetadataError) as caught:
                await store.num_sessions()
            assert_hidden(repr(caught.value) + str(caught.value))
            server.start()
        for url in (f"redis://{address}", f"redis://:wrong-{QUOTED}@{address}"):
            async with started(url) as store:
                assert store.is_degraded
                with pytest.raises(MetadataError, match="out of reach"):
                    await store.num_sessions()
    assert "it refuses the password" in everything_logged.text
    assert_hidden(everything_logged.text)


def assert_hidden(text: str) -> None:
    assert PASSWORD not in text
    assert QUOTED not in text
    assert "p@ss" not in text


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{QUOTED}@host",
        f"redis://:{QUOTED}@",
        f"redis://:{QUOTED}@host:port",
        f"redis://:{PASSWORD}@host:6379",
        f"redis://:{QUOTED}@host/first",
        f"redis://:{QUOTED}@host?socket_timeout=100",
        f"rediss://:{QUOTED}@host?ssl_cert_reqs=maybe",
        f"unix://:{QUOTED}@",
        QUOTED,
    ],
)
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected redis://|is a number|unknown|is required or"
    ) as e:
        parse_redis_url(url)
    assert_hidden(str(e.value))
    assert e.value.__cause__ is None


def test_urls_are_read_as_the_client_library_needs_them() -> None:
    url = parse_redis_url(f"rediss://user:{QUOTED}@host:1234/5?ssl_ca_certs=/ca.pem")
    assert (url.address, url.is_encrypted) == ("host:1234", True)
    assert url.options == {
        "host": "host", "port": 1234, "db": 5, "username": "user", "password": PASSWORD,
        "ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "required", "ssl_check_hostname": True,
    }  # fmt: skip
    assert_hidden(repr(url))
    assert parse_redis_url("redis://host").options == {"host": "host", "port": 6379, "db": 0}
    assert parse_redis_url("redis://[::1]:7").options == {"host": "::1", "port": 7, "db": 0}
    assert parse_redis_url("unix:///run/r.sock?db=2").options == {"path": "/run/r.sock", "db": 2}


async def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with running_server("redis", tmp_path, ("--unixsocket", str(path))):
        async with started(f"unix://{path}?db=3") as store:
            await until_healthy(store)
            assert await store.put_session(make_session(), 0)
            assert await store.num_sessions() == 1


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headstart test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


async def test_tls_is_used_and_its_certificate_is_checked(tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path)
    tls = (
        *("--tls-cert-file", str(cert_file), "--tls-key-file", str(key_file)),
        *("--tls-ca-cert-file", str(cert_file), "--tls-auth-clients", "no"),
        *("--requirepass", PASSWORD),
    )
    with running_server("redis", tmp_path, tls, is_tls=True) as server:
        address = f"rediss://:{QUOTED}@127.0.0.1:{server.port}"
        async with started(f"{address}?ssl_ca_certs={cert_file}") as store:
            await until_healthy(store)
            assert await store.put_session(make_session(history=b"words"), 0)
            found = await store.get_session("t1", "s1")
            assert found is not None
            assert found.history == b"words"
        async with started(f"{address}?ssl_cert_reqs=none") as store:
            await until_healthy(store)
        for url in (address, f"redis://:{QUOTED}@127.0.0.1:{server.port}"):
            async with started(url) as store:  # nobody vouches for it; it is not spoken in plain
                assert store.is_degraded


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_policy_that_drops_sessions_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server("redis", tmp_path, ("--maxmemory-policy", "allkeys-lru")) as server:
        async with started(server.url) as store:
            server.kill()
            await until_degraded(store)
            server.start()
            await until_healthy(store)
        address = f"127.0.0.1:{server.port}"
    about_policy = [text for text in warnings_in(caplog) if "maxmemory" in text]
    assert about_policy == [
        f"Redis at {address} has maxmemory-policy allkeys-lru: it may drop sessions when it is "
        "full; set noeviction"
    ]


async def test_a_policy_that_is_hidden_is_said_to_be_unchecked(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        client.acl_setuser(
            "gateway", enabled=True, passwords=["+pw"], keys=["*"],
            commands=["+@all", "-info", "-config"],
        )  # fmt: skip
    async with started(f"redis://gateway:pw@127.0.0.1:{server.port}") as store:
        assert not store.is_degraded
    assert warnings_in(caplog) == [
        f"Redis at 127.0.0.1:{server.port} does not tell its maxmemory-policy (it answers NOPERM), "
        "so it could not be checked; sessions are safe only with noeviction"
    ]


async def test_with_the_right_policy_nothing_is_warned_of(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(server.url) as store:
        assert not store.is_degraded
    assert warnings_in(caplog) == []


async def test_a_full_server_counts_as_out_of_reach(server: Server) -> None:
    async with started(server.url) as store:
        with server.client() as client:
            client.config_set("maxmemory", 1)
            for n in range(2):
                assert await store.put_session(make_session(f"s{n}"), 0)
            await asyncio.sleep(3 * PROBE_S)
            assert store.is_degraded
            assert store.stats.num_kept == 2
            client.config_set("maxmemory", 0)
        await until_healthy(store)
        assert await store.num_sessions() == 2
