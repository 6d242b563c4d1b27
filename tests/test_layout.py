"""The directions of imports, and the house rules that a parser can hold, over every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SLOW_FILES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("service", "cache_store", "model_worker")
MAX_LINES = 400

ALLOWED_IMPORTS = {
    "service": ("service", "model_worker.protocol", "cache_store.block_hash", "cache_store.cipher",
                "cache_store.events", "cache_store.metadata", "cache_store.shared_prefixes"),
    "model_worker": ("model_worker", "cache_store"),
    "cache_store": ("cache_store",),
}  # fmt: skip
# Commands of a person at a terminal, no part of a gateway: one replays through the real cache, one
# reckons with its blocks.
EXTRA_IMPORTS = {
    "service.planning": ("cache_store.block",),
    "service.simulation": ("cache_store.simulation", "cache_store.eviction"),
}
TORCH_PACKAGES = ("model_worker", "cache_store.tiers")


def module_files() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported_modules(tree: ast.AST, own_name: str, is_package: bool) -> Iterator[str]:
    """Absolute names; `from a.b import c` gives a.b.c where that is a module, else a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = own_name.split(".")
                keep = len(anchor) - node.level + (1 if is_package else 0)
                base = ".".join([*anchor[:keep], *([base] if base else [])])
            for alias in node.names:
                child = ROOT / base.replace(".", "/") / alias.name
                is_module = child.is_dir() or child.with_suffix(".py").is_file()
                yield f"{base}.{alias.name}" if is_module else base


def imports_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return set(imported_modules(tree, module_name(file), file.name == "__init__.py"))


def forbidden_imports(file: Path) -> list[str]:
    own = module_name(file)
    allowed = ALLOWED_IMPORTS[own.split(".")[0]]
    for package, names in EXTRA_IMPORTS.items():
        allowed += names if is_within(own, package) else ()
    found = []
    for name in sorted(imports_of(file)):
        is_ours = any(is_within(name, package) for package in PACKAGES)
        if is_ours and not any(is_within(name, package) for package in allowed):
            found.append(name)
        if is_within(name, "torch") and not any(is_within(own, p) for p in TORCH_PACKAGES):
            found.append(name)
    return found


def test_the_files_that_are_begun_first_are_there() -> None:
    assert [name for name in SLOW_FILES if not (ROOT / "tests" / name).is_file()] == []


def test_the_walk_finds_the_packages() -> None:
    names = {module_name(file) for file in module_files()}
    assert {"service.cli", "model_worker.protocol", "cache_store"} <= names


@pytest.mark.parametrize("file", module_files(), ids=module_name)
def test_imports_point_in_the_allowed_directions(file: Path) -> None:
    assert forbidden_imports(file) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import model_worker.engine", {"model_worker.engine"}),
        ("from model_worker import sampling_params", {"model_worker.sampling_params"}),
        ("from model_worker import protocol", {"model_worker.protocol"}),
        ("from model_worker.protocol import WorkerConfig", {"model_worker.protocol"}),
        ("def f():\n    import torch.nn", {"torch.nn"}),
        ("from . import config", {"service.config"}),
        ("from .workers import base", {"service.workers.base"}),
    ],
)
def test_the_import_check_sees(source: str, found: set[str]) -> None:
    seen = set(imported_modules(ast.parse(source), "service.probe", is_package=False))
    assert seen == found


GUARD = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch must not be imported here")

sys.meta_path.insert(0, Refusing())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


def test_the_gateway_and_the_cache_import_without_torch() -> None:
    names = [
        module_name(file)
        for file in module_files()
        if file.name != "__main__.py"
        and not any(is_within(module_name(file), package) for package in TORCH_PACKAGES)
    ]
    assert "service.cli" in names
    result = subprocess.run(
        [sys.executable, "-c", GUARD, *names, "model_worker.protocol"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def mutable_globals(tree: ast.Module) -> list[str]:
    """Names in lower case that a module binds to a list, dict or set, or that it rebinds."""
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        if is_mutable(value):
            found += [n for n in names if n != n.upper() and not n.startswith("__")]
    return found


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        called = value.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        return name in {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "Counter"}
    return False


@pytest.mark.parametrize("file", module_files(), ids=module_name)
def test_modules_hold_no_mutable_state(file: Path) -> None:
    assert mutable_globals(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("cache = {}", ["cache"]),
        ("seen: set[str] = set()", ["seen"]),
        ("_pending = deque()", ["_pending"]),
        ("def f():\n    global count\n    count = 1", ["count"]),
        ("TABLE = {'a': 1}", []),
        ("__all__ = ['a']", []),
        ("Alias = dict[str, int]", []),
        ("def f():\n    cache = {}", []),
    ],
)
def test_the_state_check_sees(source: str, found: list[str]) -> None:
    assert mutable_globals(ast.parse(source)) == found


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that read the process's environment.

    A statement that only sets what a library will read, `os.environ.setdefault(...)` with its
    result unused, is none.
    """
    names = {"environ", "environb", "getenv", "getenvb"}
    only_set = {
        id(node.value.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "setdefault"
    }
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in names and id(node) not in only_set:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return sorted(lines)


@pytest.mark.parametrize("file", module_files(), ids=module_name)
def test_only_the_configuration_reads_the_environment(file: Path) -> None:
    lines = environment_reads(ast.parse(file.read_text()))
    if module_name(file) == "service.config":
        assert lines
    else:
        assert lines == []


def test_the_environment_check_sees() -> None:
    source = """import os
os.environ['A']
os.getenv('B')
from os import environ
os.path
os.environ.setdefault('C', 'D')
e = os.environ.setdefault('E', 'F')
os.environ.get('G')
"""
    assert environment_reads(ast.parse(source)) == [2, 3, 4, 7, 8]


@pytest.mark.parametrize("file", module_files(), ids=module_name)
def test_modules_are_short_and_say_what_they_own(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text))
