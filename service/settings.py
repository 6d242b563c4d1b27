"""The table of every setting there is: name, kind, default, help, and which commands take it.

The command line, the HEADSTART_* variables, the validation and the documentation all come from it.
It only describes: reading arguments and the environment is service.config's work.
"""

from __future__ import annotations

from model_worker.protocol import LOG_FORMATS
from service import setting_types as kinds
from service.gateway_settings import GATEWAY_SETTINGS
from service.setting import ENV_PREFIX, Section, Setting
from service.tool_settings import TOOL_SETTINGS

__all__ = ["ENV_PREFIX", "SECTIONS", "SETTINGS", "Section", "Setting", "settings_of"]

_WORKER = ("serve", "worker")
_BOTH = ("serve", "gateway", "worker")
_CLIENTS = ("chat", "simulate", "top")


_LINK_SETTINGS = (
    Setting(
        "link_endpoint",
        kinds.endpoint,
        None,
        "Where the worker listens for gateways, tcp://address:port or ipc:///path.",
        ("worker",),
        "ENDPOINT",
    ),
    Setting(
        "link_secret_file",
        kinds.path,
        None,
        "File with the secret that gateways and workers "
        "share; required for tcp:// links, which it encrypts.",
        ("gateway", "worker"),
        "FILE",
    ),
    Setting(
        "log_level",
        kinds.choice("debug", "info", "warning", "error"),
        "info",
        "Least severe log line that is written.",
        _BOTH,
        "LEVEL",
    ),
    Setting(
        "log_format",
        kinds.choice(*LOG_FORMATS),
        "pretty",
        "Log lines for people, or as one JSON object each.",
        _BOTH,
        "FORMAT",
    ),
    Setting(
        "log_prompts",
        kinds.boolean,
        False,
        "Write the text of each prompt to the log: what users say.",
        ("serve", "gateway"),
        "",
        is_flag=True,
    ),
)

_SHARED_STATE_SETTINGS = (
    Setting(
        "redis_url",
        kinds.redis_url,
        None,
        "Redis or Valkey that gateways and workers share, redis://, rediss:// or unix://; or "
        "@FILE that holds the URL, since a command line can be read by others.",
        _BOTH,
        "URL",
    ),
    Setting(
        "encryption_key_file",
        kinds.path,
        None,
        "File with the 32-byte key (raw, hex or base64) that seals what is kept on disk and "
        "session histories in Redis.",
        _BOTH,
        "FILE",
    ),
)

_MODEL_SETTINGS = (
    Setting(
        "model",
        kinds.text,
        "demo",
        "What to serve: a hub id, a folder with safetensors "
        "weights, a .gguf file, or demo (SmolLM2-135M-Instruct).",
        _WORKER,
        "MODEL",
    ),
    Setting(
        "served_model_name",
        kinds.text,
        (),
        "Name that clients ask for.",
        _WORKER,
        "NAME",
        default_text="the value of --model",
        is_list=True,
    ),
    Setting(
        "model_cache_dir",
        kinds.path,
        None,
        "Folder for converted weights and digests.",
        _WORKER,
        "FOLDER",
        default_text="headstart in the user's cache folder",
    ),
    Setting(
        "device",
        kinds.choice("auto", "cpu", "cuda"),
        "auto",
        "Where the model runs.",
        _WORKER,
        "DEVICE",
    ),
    Setting(
        "dtype",
        kinds.choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "Number format of weights and KV.",
        _WORKER,
        "DTYPE",
    ),
    Setting(
        "quantization",
        kinds.choice("none", "int8"),
        "none",
        "int8 keeps the weights of linear layers in 8 bits: less memory, on a CPU also faster "
        "answers, close but not equal.",
        _WORKER,
        "KIND",
    ),
    Setting(
        "max_model_len",
        kinds.integer(2),  # one token of prompt, one of answer
        None,
        "Longest prompt plus answer.",
        _WORKER,
        "TOKENS",
        default_text="the model's own limit",
    ),
)

_CACHE_SETTINGS = (
    Setting(
        "cache",
        kinds.choice("prefix", "none"),
        "prefix",
        "prefix reuses the KV of earlier requests; none computes every prompt whole.",
        _WORKER,
        "KIND",
    ),
    Setting(
        "block_size",
        kinds.integer_choice(8, 16, 32, 64, 128, 256),
        32,
        "Tokens in one KV block.",
        _WORKER,
        "TOKENS",
    ),
    Setting(
        "eviction_policy",
        kinds.choice("lru", "adaptive", "lfu", "fifo"),
        "lru",
        "Which unused blocks go first when the pool is full.",
        _WORKER,
        "POLICY",
    ),
    Setting(
        "kv_cache_memory",
        kinds.size,
        None,
        "Memory for the KV pool.",
        _WORKER,
        "SIZE",
        default_text="from the memory that is free",
    ),
    Setting(
        "kv_cache_dtype",
        kinds.choice("auto", "int8"),
        "auto",
        "Number format of the KV on the device: the model's own, or int8 with a scale for each "
        "token and head, which holds two to four times the tokens and is close but not equal.",
        _WORKER,
        "TYPE",
    ),
    Setting(
        "host_cache_size",
        kinds.size_or_zero,
        None,
        "Host memory for KV blocks that leave the device; 0 is none.",
        _WORKER,
        "SIZE",
        default_text="0 on a CPU, a quarter of the free memory with a GPU",
    ),
    Setting(
        "host_cache_dtype",
        kinds.choice("exact", "int8"),
        "exact",
        "How blocks are kept below the device: exact, or int8, which takes a quarter to a half of "
        "the bytes and is close but not equal.",
        _WORKER,
        "KIND",
    ),
    Setting(
        "disk_cache_dir",
        kinds.path,
        None,
        "Folder for KV blocks on disk, which outlast a restart; with serve also for sessions.",
        _WORKER,
        "FOLDER",
        default_text="no disk tier",
    ),
    Setting(
        "disk_cache_size",
        kinds.size,
        10 * 2**30,
        "Most that the disk tier may take.",
        _WORKER,
        "SIZE",
        default_text="10GiB",
    ),
    Setting(
        "gpu_memory_utilization",
        kinds.number(0.0, 1.0, above_minimum=True),
        0.9,
        "Share of the GPU's memory that weights, activations and KV may take.",
        _WORKER,
        "SHARE",
    ),
    Setting(
        "events_endpoint",
        kinds.endpoint,
        None,
        "Where routers of others may hear of each block that is stored or removed, "
        "tcp://address:port or ipc:///path; the next port, or the path with .replay, repeats it.",
        _WORKER,
        "ENDPOINT",
    ),
)

_ENGINE_SETTINGS = (
    Setting("max_num_seqs", kinds.integer(1), 64, "Requests in one step.", _WORKER, "N"),
    Setting(
        "max_num_batched_tokens",
        kinds.integer(1),
        None,
        "Tokens in one step.",
        _WORKER,
        "TOKENS",
        default_text="by device",
    ),
    Setting(
        "speculation",
        kinds.choice("auto", "off"),
        "auto",
        "Draft answers from what the cache and the conversation already hold, where that pays. It "
        "changes no token.",
        _WORKER,
        "KIND",
    ),
    Setting(
        "max_itl_factor",
        kinds.number(1.0),
        2.0,
        "How much slower running answers may get while a prompt is prefilled beside them.",
        _WORKER,
        "FACTOR",
    ),
    Setting(
        "num_threads",
        kinds.integer(1),
        None,
        "CPU threads for the model.",
        _WORKER,
        "N",
        default_text="by device",
    ),
)

_CLIENT_SETTINGS = (
    Setting(
        "api_key",
        kinds.text,
        None,
        "Key to send to the server; simulate and top need an admin key.",
        _CLIENTS,
        "KEY",
        is_env_only=True,
    ),
)

SECTIONS: tuple[Section, ...] = (
    Section("Gateway", GATEWAY_SETTINGS),
    Section("Tools", TOOL_SETTINGS),
    Section("Link and logs", _LINK_SETTINGS),
    Section("Shared and kept", _SHARED_STATE_SETTINGS),
    Section("Model", _MODEL_SETTINGS),
    Section("Cache", _CACHE_SETTINGS),
    Section("Engine", _ENGINE_SETTINGS),
    Section("In the terminal", _CLIENT_SETTINGS),
)
SETTINGS: tuple[Setting, ...] = tuple(
    setting for section in SECTIONS for setting in section.settings
)


def settings_of(command: str) -> tuple[Setting, ...]:
    """The rows that ``command`` (serve, gateway, worker, chat, ...) takes, in table order."""
    return tuple(setting for setting in SETTINGS if command in setting.commands)
