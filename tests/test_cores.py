"""The cores that a process may use, from control-group files as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from model_worker.cores import usable_cores

MANY = 64


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(MANY)))


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == MANY


def test_version_2_takes_the_tightest_of_the_path(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/box\n")
    write(tmp_path, "sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
    assert usable_cores(tmp_path) == MANY
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "350000 100000\n")
    assert usable_cores(tmp_path) == 4
    write(tmp_path, "sys/fs/cgroup/pod/box/cpu.max", "20000 100000\n")
    assert usable_cores(tmp_path) == 1


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/box\n3:memory:/box\n")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == MANY
    write(tmp_path, "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "200000\n")
    assert usable_cores(tmp_path) == 2
