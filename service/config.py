"""From arguments and environment to the configuration objects that everything else is given.

The table of settings in service.settings says what there is. This is the only module that reads
the environment. It knows nothing of HTTP, of sockets or of models: whether a model exists or a
port is free is found out by those who use it.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_worker.protocol import WorkerConfig
from service.setting_types import http_url, redis_url
from service.settings import ENV_PREFIX, SETTINGS, Setting, settings_of

__all__ = [
    "ChatConfig",
    "ConfigError",
    "GatewayConfig",
    "OperatorConfig",
    "chat_config",
    "gateway_config",
    "is_loopback",
    "operator_config",
    "resolve",
    "worker_config",
]


class ConfigError(Exception):
    """A setting that the person at the keyboard must change; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway process is told. Sizes in bytes, times in seconds.

    Without any key or tenant file every caller may do everything. With one, every caller needs an
    API key or an admin key, and the operator's routes need an admin key (without one they stay
    closed).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    tenant_file: str | None = None
    allow_no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256  # requests
    max_body_size: int = 8 * 2**20
    drain_timeout: float = 30.0
    workers: tuple[str, ...] = ()  # link endpoints; empty for `serve`, which has its own child
    finds_workers: bool = False  # those that announce themselves in Redis
    link_secret_file: str | None = None
    redis_url: str | None = field(default=None, repr=False)  # may hold a password
    encryption_key_file: str | None = None
    session_ttl: float = 86_400.0
    no_store: bool = False
    no_request_history: bool = False
    show_prompt_text: bool = False
    session_idle_timeout: float = 60.0
    sessions_dir: str | None = None  # where embedded metadata keeps sessions; None: nowhere
    tool_call_parser: str = "auto"
    canonical_tools: bool = False
    otlp_endpoint: str | None = None  # of the collector that spans go to
    log_level: str = "info"
    log_format: str = "pretty"
    log_prompts: bool = False

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.admin_keys or self.tenant_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """What the terminal chat is told; ``model`` None is the first one served."""

    url: str
    model: str | None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """The server that a command in the terminal looks at."""

    url: str
    api_key: str | None = field(default=None, repr=False)


def resolve(
    command: str,
    arguments: Mapping[str, str | Sequence[str] | bool | None],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The value of each of ``command``'s settings: argument, else variable, else default.

    ``arguments`` hold unparsed text by setting name; None and () mean "not given". ``environ`` is
    the process's own when left out. Raises ConfigError for a value that does not parse and for any
    HEADSTART_* variable that is not in the table.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown_variables(environ)
    values: dict[str, Any] = {}
    for setting in settings_of(command):
        given = arguments.get(setting.name)
        if given is not None and given != () and given != []:
            values[setting.name] = _parse(setting, given, setting.flag)
        elif environ.get(setting.env, "").strip():
            values[setting.name] = _parse(setting, environ[setting.env], setting.env)
        else:
            values[setting.name] = setting.default
    return values


def gateway_config(values: Mapping[str, Any]) -> GatewayConfig:
    """From resolved values of `serve` or `gateway`; reads the key files. Raises ConfigError."""
    config = GatewayConfig(
        host=values["host"],
        port=values["port"],
        api_keys=_read_keys(values["api_key_file"], "--api-key-file"),
        admin_keys=_read_keys(values["admin_key_file"], "--admin-key-file"),
        tenant_file=_text(values["tenant_file"]),
        allow_no_auth=values["allow_no_auth"],
        allowed_hosts=values["allowed_host"],
        cors_origins=values["cors_origin"],
        max_queue=values["max_queue"],
        max_body_size=values["max_body_size"],
        drain_timeout=values["drain_timeout"],
        workers=values.get("worker", ()),
        finds_workers="worker" in values and not values["worker"],
        link_secret_file=_secret_file(values, values.get("worker", ())),
        redis_url=_redis_url(values["redis_url"]),
        encryption_key_file=_text(values["encryption_key_file"]),
        session_ttl=values["session_ttl"],
        no_store=values["no_store"],
        no_request_history=values["no_request_history"],
        show_prompt_text=values["show_prompt_text"],
        session_idle_timeout=values["session_idle_timeout"],
        sessions_dir=_sessions_dir(values),
        tool_call_parser=values["tool_call_parser"],
        canonical_tools=values["canonical_tools"],
        otlp_endpoint=values["otlp_endpoint"],
        log_level=values["log_level"],
        log_format=values["log_format"],
        log_prompts=values["log_prompts"],
    )
    if not (is_loopback(config.host) or config.has_keys or config.allow_no_auth):
        raise ConfigError(
            f"--host {config.host} can be reached from other machines and no key is set: "
            "give --api-key-file or --tenant-file, or --allow-no-auth to serve everyone"
        )
    if "*" in config.cors_origins and not (config.has_keys or config.allow_no_auth):
        raise ConfigError(
            "--cors-origin * lets every web page use a server without keys: give --api-key-file or "
            "--tenant-file, or --allow-no-auth"
        )
    if config.show_prompt_text and not config.admin_keys:
        raise ConfigError(
            "--show-prompt-text shows what users have written to whoever may see the dashboard: "
            "give an --admin-key-file as well"
        )
    if "worker" in values and not config.workers and config.redis_url is None:
        raise ConfigError(
            "headstart gateway needs at least one --worker endpoint, or a --redis-url to find "
            "workers with"
        )
    return config


def worker_config(
    values: Mapping[str, Any],
    *,
    endpoint: str | None = None,
    worker_id: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> WorkerConfig:
    """From resolved values of `serve` (which gives ``endpoint``, "" for a private one) or `worker`.

    ``worker_id`` is made up from the host's name when left out. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    if endpoint is None:
        endpoint = values["link_endpoint"]
    if endpoint is None:
        raise ConfigError("headstart worker needs a --link-endpoint")
    is_private = not endpoint  # a child of this gateway alone, which no other can reach
    cache_dir = values["model_cache_dir"] or _user_cache_dir(environ) / "headstart"
    return WorkerConfig(
        endpoint=endpoint,
        worker_id=worker_id or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        link_secret_file=_secret_file(values, (endpoint,)),
        model=values["model"],
        served_model_names=values["served_model_name"],
        model_cache_dir=str(cache_dir),
        device=values["device"],
        dtype=values["dtype"],
        quantization=values["quantization"],
        max_model_len=values["max_model_len"],
        block_size=values["block_size"],
        kv_cache_memory=values["kv_cache_memory"],
        kv_cache_dtype=values["kv_cache_dtype"],
        gpu_memory_utilization=values["gpu_memory_utilization"],
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        cache=values["cache"],
        eviction_policy=values["eviction_policy"],
        host_cache_size=values["host_cache_size"],
        host_cache_dtype=values["host_cache_dtype"],
        disk_cache_dir=_text(values["disk_cache_dir"]),
        disk_cache_size=values["disk_cache_size"],
        speculation=values["speculation"],
        max_itl_factor=values["max_itl_factor"],
        num_threads=values["num_threads"],
        drain_timeout_s=values["drain_timeout"],
        events_endpoint=values["events_endpoint"],
        redis_url=None if is_private else _redis_url(values["redis_url"]),
        encryption_key_file=_text(values["encryption_key_file"]),
        log_level=values["log_level"],
        log_format=values["log_format"],
    )


def chat_config(values: Mapping[str, Any], url: str, model: str | None) -> ChatConfig:
    """``values`` are those of `chat`. Raises ConfigError."""
    try:
        return ChatConfig(url=http_url(url), model=model, api_key=values["api_key"])
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from error


def operator_config(values: Mapping[str, Any], url: str, name: str = "--url") -> OperatorConfig:
    """``values`` are those of `simulate` or `top`, ``name`` is what ``url`` was given as. Raises
    ConfigError."""
    try:
        return OperatorConfig(url=http_url(url), api_key=values["api_key"])
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [setting.env for setting in SETTINGS]
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown environment variable {name}; did you mean {nearest}?")


def _parse(setting: Setting, given: str | Sequence[str] | bool, source: str) -> Any:
    if isinstance(given, bool):
        return given
    try:
        if not setting.is_list:
            assert isinstance(given, str)
            return setting.parse(given)
        entries = [given] if isinstance(given, str) else list(given)
        parts = [part for entry in entries for part in entry.split(",")]
        return tuple(dict.fromkeys(setting.parse(part) for part in parts))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def _read_keys(file: Path | None, flag: str) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{flag}: cannot read {file}: {reason}") from None
    stripped = (line.strip() for line in lines)
    keys = tuple(dict.fromkeys(line for line in stripped if line and not line.startswith("#")))
    if not keys:
        raise ConfigError(f"{flag}: {file} holds no key")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ConfigError(f"{flag}: {file} holds a key that no HTTP header can carry")
    return keys


def _secret_file(values: Mapping[str, Any], endpoints: Sequence[str]) -> str | None:
    file: Path | None = values.get("link_secret_file")
    if file is None:
        if any(endpoint.startswith("tcp://") for endpoint in endpoints):
            raise ConfigError("a tcp:// link needs a --link-secret-file")
        return None
    if not file.is_file():
        raise ConfigError(f"--link-secret-file: {file} is not a file")
    return str(file)


def _redis_url(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    file = Path(given[1:])
    try:
        return redis_url(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--redis-url: cannot read {file}: {error.strerror}") from None
    except ValueError as error:  # of UnicodeDecodeError too, which shows what was read
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"--redis-url: {file}: {reason}") from None


def _sessions_dir(values: Mapping[str, Any]) -> str | None:
    """Beside the blocks on disk, which outlast the process as well."""
    folder: Path | None = values.get("disk_cache_dir")
    return None if folder is None else str(folder / "gateway")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _user_cache_dir(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME", "")
    return Path(given) if given.startswith("/") else Path.home() / ".cache"
