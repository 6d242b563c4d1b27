"""Where Linux keeps the limits of the control groups that this process is in.

Owns the walk from the process's groups up to their root, in both versions of the interface. Knows
nothing of what a limit means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class GroupFolder:
    path: Path
    version: int  # of the control-group interface: 1 or 2


def group_folders(root: Path, controller: str) -> Iterator[GroupFolder]:
    """The folders with ``controller``'s files, each group's own first, then those above it.

    ``root`` is where proc and sys are found. A container may see its own group as the root.
    """
    mount = root / "sys" / "fs" / "cgroup"
    for line in read_text(root / "proc" / "self" / "cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            base, version = mount, 2
        elif controller in controllers.split(","):
            base, version = mount / controller, 1
        else:
            continue
        names = [name for name in PurePosixPath(group).parts if name not in ("/", "..")]
        for depth in range(len(names), -1, -1):
            yield GroupFolder(base.joinpath(*names[:depth]), version)


def read_text(file: Path) -> str:
    """The file's text; empty where it cannot be read, as where there are no control groups."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
