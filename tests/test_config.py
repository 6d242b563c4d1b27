"""From arguments and environment to configuration objects: precedence, bounds, refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from model_worker.protocol import WorkerConfig
from service import setting_types as kinds
from service.config import (
    ConfigError,
    GatewayConfig,
    chat_config,
    gateway_config,
    resolve,
    worker_config,
)
from service.settings import SETTINGS, settings_of

NOTHING: dict[str, str] = {}


def gateway(**arguments: Any) -> GatewayConfig:
    return gateway_config(resolve("serve", arguments, NOTHING))


def worker(**arguments: Any) -> WorkerConfig:
    values = resolve("serve", arguments, NOTHING)
    return worker_config(values, endpoint="ipc:///run/w", worker_id="w", environ=NOTHING)


def refusal(command: str, arguments: dict[str, Any], environ: dict[str, str] = NOTHING) -> str:
    def configure() -> object:
        values = resolve(command, arguments, environ)
        return worker_config(values) if command == "worker" else gateway_config(values)

    with pytest.raises(ConfigError) as caught:
        configure()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_table_is_small_and_unambiguous() -> None:
    assert len(SETTINGS) <= 56
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    for command in ("serve", "gateway", "worker", "chat"):
        flags = [setting.flag for setting in settings_of(command)]
        assert len(set(flags)) == len(flags)
    assert all(setting.help.strip().endswith(".") for setting in SETTINGS)


def test_defaults_equal_the_ones_of_the_configuration_classes() -> None:
    assert gateway() == GatewayConfig()
    made = worker(model_cache_dir="/c")
    assert made == WorkerConfig(endpoint="ipc:///run/w", worker_id="w", model_cache_dir="/c")


def test_every_worker_setting_reaches_the_worker() -> None:
    arguments = {
        "link_endpoint": "ipc:///run/link",
        "log_level": "debug",
        "log_format": "json",
        "model": "org/name",
        "served_model_name": ["a,b", "c", "a"],
        "model_cache_dir": "/cache",
        "device": "cpu",
        "dtype": "float32",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        "max_model_len": "4096",
        "cache": "none",
        "block_size": "16",
        "eviction_policy": "adaptive",
        "kv_cache_memory": "1.5GiB",
        "host_cache_size": "0",
        "host_cache_dtype": "int8",
        "disk_cache_dir": "/disk",
        "disk_cache_size": "3GB",
        "gpu_memory_utilization": "0.5",
        "max_num_seqs": "3",
        "max_num_batched_tokens": "512",
        "speculation": "off",
        "max_itl_factor": "1.5",
        "num_threads": "2",
        "drain_timeout": "2.5",
        "events_endpoint": "tcp://127.0.0.1:5557",
        "redis_url": "rediss://host/3",
        "encryption_key_file": "/key",
    }
    assert set(arguments) | {"link_secret_file"} == {s.name for s in settings_of("worker")}
    made = worker_config(resolve("worker", arguments, NOTHING), worker_id="w")
    assert made == WorkerConfig(
        endpoint="ipc:///run/link",
        worker_id="w",
        log_level="debug",
        log_format="json",
        model="org/name",
        served_model_names=("a", "b", "c"),
        model_cache_dir="/cache",
        device="cpu",
        dtype="float32",
        quantization="int8",
        kv_cache_dtype="int8",
        max_model_len=4096,
        cache="none",
        block_size=16,
        eviction_policy="adaptive",
        kv_cache_memory=1610612736,
        host_cache_size=0,
        host_cache_dtype="int8",
        disk_cache_dir="/disk",
        disk_cache_size=3_000_000_000,
        gpu_memory_utilization=0.5,
        max_num_seqs=3,
        max_num_batched_tokens=512,
        speculation="off",
        max_itl_factor=1.5,
        num_threads=2,
        drain_timeout_s=2.5,
        events_endpoint="tcp://127.0.0.1:5557",
        redis_url="rediss://host/3",
        encryption_key_file="/key",
    )


def test_every_gateway_setting_reaches_the_gateway(tmp_path: Path) -> None:
    keys, admin, secret = tmp_path / "keys", tmp_path / "admin", tmp_path / "secret"
    keys.write_text("# clients\nk1\n\n  k2  \nk1\n")
    admin.write_text("root-key\n")
    secret.write_text("s")
    arguments: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": "9000",
        "api_key_file": str(keys),
        "admin_key_file": str(admin),
        "tenant_file": "/tenants.toml",
        "allow_no_auth": True,
        "allowed_host": ["chat.example,api.example"],
        "cors_origin": ["https://App.example:443,localhost"],
        "max_queue": "5",
        "max_body_size": "1MB",
        "drain_timeout": "2.5",
        "session_ttl": "3600",
        "session_idle_timeout": "5",
        "no_store": True,
        "no_request_history": True,
        "show_prompt_text": True,
        "worker": ["tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"],
        "link_secret_file": str(secret),
        "redis_url": "redis://:hidden@host",
        "encryption_key_file": "/key",
        "log_level": "error",
        "log_format": "json",
        "log_prompts": True,
        "tool_call_parser": "mistral",
        "canonical_tools": True,
        "otlp_endpoint": "http://collector:4318/",
    }
    assert set(arguments) == {setting.name for setting in settings_of("gateway")}
    made = gateway_config(resolve("gateway", arguments, NOTHING))
    assert dataclasses.asdict(made) == {
        "host": "0.0.0.0",
        "port": 9000,
        "api_keys": ("k1", "k2"),
        "admin_keys": ("root-key",),
        "tenant_file": "/tenants.toml",
        "allow_no_auth": True,
        "allowed_hosts": ("chat.example", "api.example"),
        "cors_origins": ("https://app.example", "localhost"),
        "max_queue": 5,
        "max_body_size": 1_000_000,
        "drain_timeout": 2.5,
        "session_ttl": 3600.0,
        "session_idle_timeout": 5.0,
        "no_store": True,
        "no_request_history": True,
        "show_prompt_text": True,
        "workers": ("tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"),
        "finds_workers": False,
        "link_secret_file": str(secret),
        "redis_url": "redis://:hidden@host",
        "encryption_key_file": "/key",
        "sessions_dir": None,
        "tool_call_parser": "mistral",
        "canonical_tools": True,
        "otlp_endpoint": "http://collector:4318",
        "log_level": "error",
        "log_format": "json",
        "log_prompts": True,
    }
    assert "hidden" not in repr(made)
    assert "k1" not in repr(made)
    assert "root-key" not in repr(made)


def test_an_argument_beats_a_variable_beats_the_default() -> None:
    environ = {"HEADSTART_PORT": "7001", "HEADSTART_MODEL": "x", "HEADSTART_ALLOW_NO_AUTH": "yes"}
    values = resolve("serve", {"port": "7002"}, environ)
    assert values["port"] == 7002
    assert values["model"] == "x"
    assert values["allow_no_auth"] is True
    assert values["max_queue"] == 256


def test_an_empty_variable_counts_as_absent() -> None:
    assert resolve("serve", {}, {"HEADSTART_PORT": " "})["port"] == 8000


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    assert refusal("serve", {}, {"HEADSTART_BLOCKSIZE": "8"}) == (
        "unknown environment variable HEADSTART_BLOCKSIZE; did you mean HEADSTART_BLOCK_SIZE?"
    )


def test_a_variable_of_another_command_is_fine() -> None:
    assert "api_key" not in resolve("serve", {}, {"HEADSTART_API_KEY": "k"})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("port", "70000", "--port: must be at most 65535, got 70000"),
        ("port", "http", "--port: expected a whole number, got 'http'"),
        ("block_size", "24", "--block-size: expected one of 8, 16, 32, 64, 128, 256, got '24'"),
        ("device", "tpu", "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        ("gpu_memory_utilization", "0", "--gpu-memory-utilization: must be more than 0, got 0"),
        ("gpu_memory_utilization", "1.1", "--gpu-memory-utilization: must be at most 1, got 1.1"),
        ("max_itl_factor", "nan", "--max-itl-factor: expected a finite number, got 'nan'"),
        ("max_itl_factor", "0.5", "--max-itl-factor: must be at least 1, got 0.5"),
        ("max_num_seqs", "0", "--max-num-seqs: must be at least 1, got 0"),
        ("kv_cache_memory", "lots", "--kv-cache-memory: expected a size such as 512MB or 4GiB, "
         "got 'lots'"),
        ("kv_cache_memory", "-1GB", "--kv-cache-memory: expected a size such as 512MB or 4GiB, "
         "got '-1GB'"),
        ("kv_cache_memory", "4Gib", None),
        ("kv_cache_memory", "0", "--kv-cache-memory: must be at least one byte, got '0'"),
        ("kv_cache_memory", "8388608TiB", "--kv-cache-memory: must be less than 8 EiB, "
         "got '8388608TiB'"),
        ("kv_cache_memory", "9" * 400, "--kv-cache-memory: must be less than 8 EiB, "
         f"got '{'9' * 400}'"),
        ("max_model_len", "1", "--max-model-len: must be at least 2, got 1"),
        ("model", " ", "--model: must not be empty"),
        ("served_model_name", ["a,,b"], "--served-model-name: must not be empty"),
    ],
)  # fmt: skip
def test_values_are_checked(name: str, value: Any, reason: str | None) -> None:
    if reason is None:
        assert resolve("serve", {name: value}, NOTHING)[name] == 4 * 2**30
    else:
        assert refusal("serve", {name: value}) == reason


def test_a_bad_variable_is_named_as_a_variable() -> None:
    message = refusal("serve", {}, {"HEADSTART_CACHE": "redis"})
    assert message == "HEADSTART_CACHE: expected one of prefix, none, got 'redis'"


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("1", 1), ("512MB", 512_000_000), ("4GiB", 2**32), ("0.5 kib", 512), ("2TB", 2 * 10**12)],
)
def test_sizes(given: str, num_bytes: int) -> None:
    assert kinds.size(given) == num_bytes


def test_an_unbounded_number_is_unbounded() -> None:
    assert kinds.number(0.0)("1e300") == 1e300 < math.inf


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    assert gateway(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-box", "localhost.evil.com"])
def test_another_address_needs_a_key_or_consent(host: str, tmp_path: Path) -> None:
    assert refusal("serve", {"host": host}) == (
        f"--host {host} can be reached from other machines and no key is set: "
        "give --api-key-file or --tenant-file, or --allow-no-auth to serve everyone"
    )
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    assert gateway(host=host, api_key_file=str(keys)).has_keys
    assert gateway(host=host, allow_no_auth=True).allow_no_auth
    assert gateway(host=host, tenant_file="/tenants").has_keys


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://App.example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://bundle", "app://bundle"),
        ("Localhost", "localhost"),
    ],
)
def test_origins_are_kept_as_browsers_send_them(given: str, origin: str) -> None:
    assert gateway(cors_origin=[given]).cors_origins == (origin,)


@pytest.mark.parametrize(
    "given", ["app.example", "https://", "https://app.example/", "https://a b", "https://a@b", ""]
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    assert refusal("serve", {"cors_origin": [given]}) == (
        f"--cors-origin: expected an origin such as https://app.example, got {given!r}"
    )


def test_every_page_may_use_a_server_with_keys_alone(tmp_path: Path) -> None:
    assert refusal("serve", {"cors_origin": ["*"]}).startswith(
        "--cors-origin * lets every web page"
    )
    assert gateway(cors_origin=["*"], tenant_file="/t").cors_origins == ("*",)
    assert gateway(cors_origin=["*"], allow_no_auth=True).cors_origins == ("*",)


def test_prompts_are_shown_to_those_with_an_admin_key_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give an --admin-key-file as well"):
        gateway(show_prompt_text=True)
    admin = tmp_path / "admin"
    admin.write_text("root-key\n")
    assert gateway(show_prompt_text=True, admin_key_file=str(admin)).show_prompt_text


def test_key_files_that_cannot_work_are_refused(tmp_path: Path) -> None:
    empty, spaced, binary = tmp_path / "empty", tmp_path / "spaced", tmp_path / "binary"
    empty.write_text("# nothing yet\n")
    spaced.write_text("two words\n")
    binary.write_bytes(b"\xff\xfe\x00")
    missing = tmp_path / "missing"
    for file, reason in [
        (empty, f"{empty} holds no key"),
        (spaced, f"{spaced} holds a key that no HTTP header can carry"),
        (binary, f"cannot read {binary}: not UTF-8 text"),
        (missing, f"cannot read {missing}: No such file or directory"),
    ]:
        assert refusal("serve", {"api_key_file": str(file)}) == f"--api-key-file: {reason}"


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ("tcp://127.0.0.1:7000", True),
        ("tcp://[::1]:7000", True),
        ("ipc:///run/headstart", True),
        ("tcp://127.0.0.1", False),
        ("tcp://:7000", False),
        ("tcp://h:0", False),
        ("http://h:1", False),
        ("ipc://", False),
    ],
)
def test_link_endpoints(value: str, is_valid: bool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    arguments = {"link_endpoint": value, "link_secret_file": str(secret)}
    if is_valid:
        made = worker_config(resolve("worker", arguments, NOTHING))
        assert (made.endpoint, made.link_secret_file) == (value, str(secret))
    else:
        assert refusal("worker", arguments) == (
            f"--link-endpoint: expected tcp://address:port or ipc:///path, got {value!r}"
        )


def test_a_tcp_link_needs_a_secret(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"link_endpoint": "tcp://0.0.0.0:7000"}
    assert refusal("worker", arguments) == "a tcp:// link needs a --link-secret-file"
    assert refusal("gateway", {"worker": ["tcp://h:7000"]}) == (
        "a tcp:// link needs a --link-secret-file"
    )
    missing = tmp_path / "missing"
    assert refusal("worker", {**arguments, "link_secret_file": str(missing)}) == (
        f"--link-secret-file: {missing} is not a file"
    )


def test_gateway_and_worker_need_an_endpoint() -> None:
    assert refusal("gateway", {}) == (
        "headstart gateway needs at least one --worker endpoint, or a --redis-url to find workers "
        "with"
    )
    assert refusal("worker", {}) == "headstart worker needs a --link-endpoint"


def test_worker_ids_differ_between_processes_of_one_host() -> None:
    values = resolve("worker", {"link_endpoint": "ipc:///run/w"}, NOTHING)
    assert worker_config(values).worker_id != worker_config(values).worker_id


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/headstart"),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_the_model_cache_lives_in_the_users_cache_folder(
    environ: dict[str, str], folder: str | None
) -> None:
    values = resolve("serve", {}, environ)
    made = worker_config(values, endpoint="ipc:///run/w", environ=environ)
    assert made.model_cache_dir == (folder or str(Path.home() / ".cache" / "headstart"))


def test_the_chat_takes_its_key_from_the_environment_only() -> None:
    (row,) = [setting for setting in SETTINGS if setting.name == "api_key"]
    assert row.is_env_only
    made = chat_config(resolve("chat", {}, {"HEADSTART_API_KEY": "k"}), "http://h:1/", "m")
    assert (made.url, made.model, made.api_key) == ("http://h:1", "m", "k")
    assert "'k'" not in repr(made)


def test_an_address_that_is_none_is_refused_by_the_chat() -> None:
    with pytest.raises(ConfigError, match=r"--url: expected an address such as .*, got 'h:1'"):
        chat_config(resolve("chat", {}, NOTHING), "h:1", None)


def test_a_redis_url_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("rediss://:hidden@host:1/2\n")
    environ = {"HEADSTART_REDIS_URL": f"@{file}"}
    assert gateway_config(resolve("serve", {}, environ)).redis_url == "rediss://:hidden@host:1/2"
    made = worker_config(resolve("worker", {"link_endpoint": "ipc:///w"}, environ))
    assert made.redis_url == "rediss://:hidden@host:1/2"
    assert "hidden" not in repr(made)
    assert worker(redis_url=f"@{file}").redis_url == "rediss://:hidden@host:1/2"


def test_the_child_of_serve_does_not_announce_itself() -> None:
    values = resolve("serve", {"redis_url": "redis://host"}, NOTHING)
    assert worker_config(values, endpoint="", worker_id="local").redis_url is None
    assert gateway_config(values).redis_url == "redis://host"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"http://:hidden@host", "expected redis://, rediss:// or unix:// and an address"),
        (b"", "must not be empty"),
        (b"\xffhidden", "not UTF-8 text"),
        (None, "No such file or directory"),
    ],
)
def test_a_redis_url_that_is_none_is_refused_unseen(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    message = refusal("gateway", {"redis_url": f"@{file}"})
    assert message.startswith("--redis-url: ")
    assert problem in message
    assert "hidden" not in message


def test_a_redis_url_given_wrongly_is_not_repeated() -> None:
    for given in ("redis://:hidden@host:port", "hidden", "redis://:hidden@host?x=1", "@"):
        assert "hidden" not in refusal("serve", {"redis_url": given})


def test_a_gateway_without_workers_of_its_own_finds_them_in_redis() -> None:
    made = gateway_config(resolve("gateway", {"redis_url": "redis://host"}, NOTHING))
    assert made.finds_workers
    values = resolve("gateway", {"redis_url": "redis://host", "worker": ["ipc:///w"]}, NOTHING)
    assert not gateway_config(values).finds_workers
    assert not gateway(redis_url="redis://host").finds_workers


def test_embedded_sessions_lie_beside_the_blocks_on_disk() -> None:
    values = resolve("serve", {}, NOTHING)
    assert gateway_config(values).sessions_dir is None
    assert gateway_config(values | {"disk_cache_dir": Path("/d")}).sessions_dir == "/d/gateway"
