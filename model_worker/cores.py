"""How many CPU cores this process may really use.

Owns the reading of affinity and of the control groups' quotas. A container with a quota of four
cores on a host of sixty-four would otherwise start sixty-four threads that wait for each other.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """The smaller of the affinity mask and the tightest quota; at least 1.

    ``root`` is where proc and sys are found.
    """
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, math.ceil(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> list[float]:
    """Cores that each control group above this process allows."""
    mount = root / "sys" / "fs" / "cgroup"
    quotas = []
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        names = [name for name in PurePosixPath(group).parts if name not in ("/", "..")]
        for depth in range(len(names), -1, -1):
            if number == "0" and not controllers:
                limits = _read(mount.joinpath(*names[:depth]) / "cpu.max").split()
            elif "cpu" in controllers.split(","):
                folder = (mount / "cpu").joinpath(*names[:depth])
                limits = [
                    _read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period")
                ]
            else:
                break
            if len(limits) == 2 and limits[0].isdigit() and limits[1].isdigit():
                quotas.append(int(limits[0]) / int(limits[1]))
    return quotas


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
