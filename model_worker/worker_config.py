"""What a worker process is started with.

Owns the resolved settings and their JSON form. Names, defaults and help for people are the gateway
package's table of settings; nothing is read or checked here.
"""

from __future__ import annotations

import msgspec

EXIT_CONFIG = 78  # os.EX_CONFIG, also where os lacks it: a person must act, no restart helps


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All a worker process is told, as JSON on its standard input.

    None means that the worker chooses by device and says what it chose. The settings table of the
    gateway package is where names, defaults and help live; this is their resolved form.
    """

    endpoint: str  # ipc://... or tcp://host:port, bound by the worker
    worker_id: str
    link_secret_file: str | None = None  # required for tcp
    model: str = "demo"
    served_model_names: tuple[str, ...] = ()
    model_cache_dir: str | None = None
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    quantization: str = "none"  # none | int8: how linear layers keep their weights
    max_model_len: int | None = None
    block_size: int = 32
    kv_cache_memory: int | None = None  # bytes
    kv_cache_dtype: str = "auto"  # auto | int8: what the device holds
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    cache: str = "prefix"  # prefix | none
    eviction_policy: str = "lru"  # lru | adaptive | lfu | fifo
    host_cache_size: int | None = None  # bytes; 0 for no host tier
    host_cache_dtype: str = "exact"  # exact | int8: how blocks are coded below the device
    disk_cache_dir: str | None = None  # None for no disk tier
    disk_cache_size: int = 10 * 2**30  # bytes
    speculation: str = "auto"  # auto | off
    max_itl_factor: float = 2.0
    num_threads: int | None = None
    drain_timeout_s: float = 30.0
    events_endpoint: str | None = None  # where others hear of blocks; tcp:// or ipc://
    redis_url: str | None = None  # where it announces itself; may hold a password
    encryption_key_file: str | None = None  # of what is kept on disk
    log_level: str = "info"
    log_format: str = "pretty"  # pretty | json

    def __repr__(self) -> str:
        """Without the URL, for the sake of the password in it."""
        shown = [f"{n}={getattr(self, n)!r}" for n in self.__struct_fields__ if n != "redis_url"]
        return f"WorkerConfig({', '.join(shown)})"
