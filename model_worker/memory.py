"""How much memory there is, and what it buys: the memory bill printed at start.

Owns the reading of free memory (host and control group, whichever is smaller) and the arithmetic
from bytes to blocks to conversations. Refuses a pool in which one conversation of --max-model-len
does not fit. Allocates nothing and knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cache_store.block import KVCacheSpec, num_blocks_for
from model_worker.control_groups import group_folders, read_text
from model_worker.loader.errors import ModelLoadError

_GIB = 1024**3
_MIB = 1024**2
_KIB = 1024
# A v1 group without a limit reports a number near 2**63, rounded to a page.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class MemoryBill:
    """What a KV pool of ``num_blocks`` holds. Bytes are bytes, lengths are tokens."""

    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    free_bytes: int | None  # as found before the pool was made; None if it was not looked at

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_tokens * self.kv_bytes_per_token

    @property
    def num_conversations(self) -> int:
        """Conversations of ``max_model_len`` tokens that fit at once without sharing a prefix."""
        return self.num_blocks // num_blocks_for(self.max_model_len, self.block_size)

    def lines(self, spec: KVCacheSpec) -> tuple[str, ...]:
        """The bill for a person, one statement per line."""
        free = "" if self.free_bytes is None else f" of {size_text(self.free_bytes)} free"
        vector = f"{spec.head_dim} x {spec.bytes_per_element} B ({spec.dtype})"
        if spec.scale_bytes:
            vector = f"({vector} + {spec.scale_bytes} B scale)"
        return (
            f"KV per token: 2 x {spec.num_layers} layers x {spec.num_kv_heads} kv heads x {vector} "
            f"= {self.kv_bytes_per_token:,} B",
            f"KV pool: {self.num_blocks:,} blocks of {self.block_size} tokens "
            f"= {self.num_tokens:,} tokens, {size_text(self.pool_bytes)}{free}",
            f"Room for {self.num_conversations:,} conversations of {self.max_model_len:,} tokens",
        )


def plan_memory(
    spec: KVCacheSpec, budget_bytes: int, max_model_len: int, free_bytes: int | None = None
) -> MemoryBill:
    """The bill for a KV pool of at most ``budget_bytes``.

    Raises ModelLoadError if it would not hold one block, or not one conversation.
    """
    num_blocks = spec.num_blocks_in(budget_bytes)
    if num_blocks == 0:
        raise ModelLoadError(
            f"There is no memory for one KV block: {size_text(budget_bytes)} are available and a "
            f"block of {spec.block_size} tokens takes {size_text(spec.bytes_per_block)}; raise "
            "--kv-cache-memory"
        )
    # One block more than its tokens fill: a partial hit also holds the block that it copies from.
    needed = num_blocks_for(max_model_len, spec.block_size) + 1
    if num_blocks < needed:
        fitting = (num_blocks - 1) * spec.block_size
        lower = f"lower --max-model-len to {fitting} or " if fitting else ""
        raise ModelLoadError(
            f"The KV pool of {size_text(budget_bytes)} holds {num_blocks} blocks of "
            f"{spec.block_size} tokens; --max-model-len {max_model_len} needs {needed} "
            f"({size_text(needed * spec.bytes_per_block)}): {lower}raise --kv-cache-memory"
        )
    return MemoryBill(
        kv_bytes_per_token=spec.bytes_per_token,
        block_size=spec.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        free_bytes=free_bytes,
    )


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the smaller of what the host has and its groups allow.

    ``root`` is where proc and sys are found. Raises ModelLoadError where the system does not say.
    """
    host = _host_available(root / "proc" / "meminfo")
    if host is None:
        raise ModelLoadError(
            "The system does not say how much memory is free: set --kv-cache-memory"
        )
    return max(0, min([host, *_group_headrooms(root)]))


def _host_available(meminfo: Path) -> int | None:
    for line in read_text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _group_headrooms(root: Path) -> list[int]:
    """Limit minus use of each control group that this process is in, parents included."""
    headrooms = []
    for folder in group_folders(root, "memory"):
        if folder.version == 2:
            files = ("memory.max", "memory.current", "inactive_file")
        else:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        headroom = _headroom(folder.path, *files)
        if headroom is not None:
            headrooms.append(headroom)
    return headrooms


def _headroom(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> int | None:
    limit = read_text(folder / limit_file).strip()
    usage = read_text(folder / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None
    # Cached file pages count as used but are given up on demand, a model's own file among them.
    reclaimable = 0
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_field:
            reclaimable = int(value)
    return int(limit) - int(usage) + reclaimable


def size_text(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.2f} MiB"
    return f"{num_bytes / _KIB:.2f} KiB"
