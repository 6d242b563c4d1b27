"""What some accelerators have, as their makers publish it.

Owns the table: memory, memory bandwidth, and dense arithmetic of 16-bit and of 32-bit floats (the
latter without tensor cores). Floors only: no program reaches all of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["DEVICES", "Device"]


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes, bytes per second, and operations per second; None where nobody has said."""

    memory: int
    bandwidth: float | None
    flops_16: float | None
    flops_32: float | None

    def flops(self, dtype: str) -> float | None:
        return self.flops_32 if dtype == "float32" else self.flops_16


def _device(gigabytes: int, gigabytes_per_s: int, tera_16: float, tera_32: float) -> Device:
    return Device(gigabytes * 10**9, gigabytes_per_s * 1e9, tera_16 * 1e12, tera_32 * 1e12)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "A10": _device(24, 600, 125, 31.2),
        "A100-40GB": _device(40, 1_555, 312, 19.5),
        "A100-80GB": _device(80, 2_039, 312, 19.5),
        "H100": _device(80, 3_350, 989, 67),
        "H100-PCIe": _device(80, 2_000, 756, 51),
        "H200": _device(141, 4_800, 989, 67),
        "L4": _device(24, 300, 121, 30.3),
        "L40S": _device(48, 864, 362, 91.6),
        "RTX-3090": _device(24, 936, 71, 35.6),
        "RTX-4090": _device(24, 1_008, 165, 82.6),
    }
)
