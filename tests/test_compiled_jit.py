"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from filelock import FileLock
from numba.core.caching import IndexDataCacheFile

from model_worker.compiled import jit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jit, "_cache_folder", lambda: tmp_path)
    # numba's own variable, which the decorator sets: put back afterwards.
    monkeypatch.setitem(vars(numba.config), "CACHE_DIR", numba.config.CACHE_DIR)
    return tmp_path


def double_kernel() -> Any:
    """A kernel that knows nothing of what others compiled, as in a process of its own."""

    @jit.kernel()
    def double(x: float) -> float:
        return x + x

    return double


def kept(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.rglob("*.nb?"))


def test_a_kernel_computes_what_its_function_does() -> None:
    @jit.kernel(is_exact=True)
    def add(x: np.ndarray, y: np.ndarray) -> None:
        for i in range(len(x)):
            x[i] += y[i]

    x = np.arange(3.0)
    add(x, np.ones(3))
    assert x.tolist() == [1.0, 2.0, 3.0]


def test_the_folder_lies_beside_the_sources() -> None:
    folder = jit._cache_folder()
    assert folder.parent == Path(jit.__file__).parent / "__pycache__"
    assert folder.is_dir()
    assert jit._cache_folder() is folder


def test_where_the_sources_cannot_be_written_to_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "jit.py").write_text("")
    (package / "__pycache__").write_text("no folder")
    home = tmp_path / "home"
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    monkeypatch.setenv("HOME", str(home))
    folder = jit._cache_folder.__wrapped__()
    assert folder.parent == home / ".cache" / "headstart"
    (package / "other.py").write_text("a = 1")
    assert jit._cache_folder.__wrapped__() != folder  # other sources, another folder
    (home / ".cache" / "headstart").rename(home / "away")
    (home / ".cache" / "headstart").write_text("no folder")
    assert jit._cache_folder.__wrapped__().name.startswith("headstart-kernels-")


def test_a_compiled_kernel_is_kept_for_the_next_process(folder: Path) -> None:
    assert double_kernel()(2.5) == 5.0
    assert kept(folder) == [".nbc", ".nbi"]
    again = double_kernel()
    assert again(2.5) == 5.0
    assert again.stats.cache_hits
    assert not again.stats.cache_misses


def test_two_processes_that_keep_a_kernel_for_other_types_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has read the index before the other has written it, if nothing keeps them apart."""
    kernels = [double_kernel(), double_kernel()]
    with monkeypatch.context() as patch:
        patch.setattr(jit._KernelCache, "save_overload", lambda *_: None)
        assert [kernels[0](2.5), kernels[1](2)] == [5.0, 4]
    read = IndexDataCacheFile._load_index

    def read_slowly(self: Any) -> Any:
        overloads = read(self)
        time.sleep(0.2)
        return overloads

    monkeypatch.setattr(IndexDataCacheFile, "_load_index", read_slowly)
    threads = []
    for kernel in kernels:
        ((types, compiled),) = kernel.overloads.items()
        save = threading.Thread(target=kernel._cache.save_overload, args=(types, compiled))
        threads.append(save)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(folder) == [".nbc", ".nbc", ".nbi"]
    again = double_kernel()
    assert [again(2.5), again(2)] == [5.0, 4]
    assert len(again.stats.cache_hits) == 2


def test_a_kernel_that_cannot_be_kept_is_of_use_to_its_own_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "LOCK_TIMEOUT_S", 0.01)
    with FileLock(folder / "lock"):
        assert double_kernel()(2.5) == 5.0
    assert kept(folder) == []
    assert "cannot be kept" in caplog.text


def test_kernels_of_sources_that_nobody_has_run_for_a_month_are_removed(tmp_path: Path) -> None:
    old, recent, other = (tmp_path / name for name in ("kernels-1", "kernels-2", "other-1"))
    for path, days in ((old, 31), (recent, 29), (other, 31)):
        path.mkdir()
        (path / "code.nbc").write_text("code")
        then = time.time() - days * 24 * 3600
        os.utime(path, (then, then))
    jit._remove_unused(tmp_path)
    assert sorted(tmp_path.iterdir()) == [recent, other]


def test_a_start_counts_as_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jit.py").write_text("")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    folder = jit._cache_folder.__wrapped__()
    os.utime(folder, (0, 0))
    assert jit._cache_folder.__wrapped__() == folder
    assert time.time() - folder.stat().st_mtime < 60
