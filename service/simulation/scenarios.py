"""What is to be simulated: sizes and policies as they were asked for, made into scenarios.

Owns how a size is written (blocks, or bytes with a unit) and the limit on how many combinations one
command runs. Knows nothing of traces beyond their lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cache_store.eviction import EVICTION_POLICIES
from cache_store.simulation.replay import Capacity
from cache_store.simulation.sweep import Scenario, device_sizes
from service import setting_types as kinds
from service.config import ConfigError
from service.simulation.source import Recorded

__all__ = ["MAX_RUNS", "Asked", "scenarios_of"]

MAX_RUNS = 64
_DEFAULT_POLICIES = ("lru", "adaptive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Sizes as they were typed, separated by commas; empty for what is worth a look."""

    device: str = ""
    host: str = ""
    disk: str = ""
    policy: str = ""
    block_bytes: int | None = None


def scenarios_of(asked: Asked, recorded: Recorded) -> tuple[Scenario, ...]:
    """Every combination, the device's size changing slowest. Raises ConfigError."""
    trace, present = recorded.trace, recorded.present
    block_bytes = asked.block_bytes or recorded.block_bytes
    devices = _sizes("--device", asked.device, block_bytes)
    longest = trace.num_longest_blocks
    for size in devices:
        if size < longest:
            raise ConfigError(
                f"--device: {size} blocks cannot hold the longest request, which has {longest}"
            )
    if not devices:
        devices = device_sizes(trace, present.device if present else None)
    hosts = _sizes("--host", asked.host, block_bytes) or (present.host if present else 0,)
    disks = _sizes("--disk", asked.disk, block_bytes) or (present.disk if present else 0,)
    policies = _policies(asked.policy)
    found = tuple(
        Scenario(Capacity(device, host, disk), policy)
        for device, host, disk, policy in itertools.product(devices, hosts, disks, policies)
    )
    if len(found) > MAX_RUNS:
        raise ConfigError(
            f"--device, --host, --disk and --policy: {len(found)} combinations, "
            f"and at most {MAX_RUNS} are run"
        )
    return found


def _sizes(flag: str, text: str, block_bytes: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_size(flag, part, block_bytes) for part in _parts(text)))


def _size(flag: str, text: str, block_bytes: int | None) -> int:
    if text.isascii() and text.isdecimal():
        size = int(text)
    else:
        try:
            num_bytes = kinds.size(text)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}, or a number of blocks") from None
        if block_bytes is None:
            raise ConfigError(
                f"{flag}: {text} is in bytes, and a trace does not say what a block takes: "
                "give --bytes-per-token, or a number of blocks"
            )
        size = num_bytes // block_bytes
    if size == 0 and flag == "--device":
        raise ConfigError("--device: must be at least one block")
    if size >= 2**31:
        raise ConfigError(f"{flag}: must be less than {2**31} blocks, got {size}")
    return size


def _policies(text: str) -> Sequence[str]:
    try:
        parse = kinds.choice(*EVICTION_POLICIES)
        return tuple(dict.fromkeys(map(parse, _parts(text)))) or _DEFAULT_POLICIES
    except ValueError as error:
        raise ConfigError(f"--policy: {error}") from None


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
