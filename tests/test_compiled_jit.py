"""Where compiled kernels are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model_worker.compiled import jit


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
