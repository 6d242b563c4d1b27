"""How many CPU cores this process may really use.

Owns the reading of affinity and of the control groups' quotas. A container with a quota of four
cores on a host of sixty-four would otherwise start sixty-four threads that wait for each other.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from model_worker.control_groups import group_folders, read_text


def usable_cores(root: Path = Path("/")) -> int:
    """The smaller of the affinity mask and the tightest quota; at least 1.

    ``root`` is where proc and sys are found.
    """
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, math.ceil(min([cores, *_quotas(root)])))


def _quotas(root: Path) -> list[float]:
    """Cores that each control group above this process allows."""
    quotas = []
    for folder in group_folders(root, "cpu"):
        if folder.version == 2:
            limits = read_text(folder.path / "cpu.max").split()
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limits = [read_text(folder.path / file).strip() for file in files]
        if len(limits) == 2 and limits[0].isdigit() and limits[1].isdigit():
            quotas.append(int(limits[0]) / int(limits[1]))
    return quotas
