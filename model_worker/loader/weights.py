"""Which files of a folder are the model's weights, and whether they can be read.

Owns the rule that weights are safetensors and nothing else: a pickle can run code when it is
read. Looks at headers only; knows nothing of configurations or tensors' meaning.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model_worker.loader.errors import ModelLoadError, first_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of ``folder`` in name order, each with a readable, complete header.

    Raises ModelLoadError if there are none, one is missing, or one is truncated or unreadable.
    """
    if (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        files = _files_of_index(folder / INDEX_FILE)
    else:
        raise ModelLoadError(_why_none(folder))
    for file in files:
        _check_readable(file)
    return tuple(files)


def _files_of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"Cannot read the weight index {index}: {first_line(error)}"
        ) from error
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(
                f"The weight index {index} names a file outside its folder: {name}"
            )
        if not (index.parent / name).is_file():
            raise ModelLoadError(f"The weight index {index} names {name}, which is missing")
    return [index.parent / name for name in names]


def _check_readable(file: Path) -> None:
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"Cannot read the weights {file}: the file is truncated or not safetensors "
            f"({first_line(error)})"
        ) from error


def _why_none(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{folder} has pickle weights only ({pickles[0]}): reading them can run code, so they "
            "are never loaded; save the model as safetensors"
        )
    if "adapter_config.json" in names:
        return f"{folder} holds an adapter, not a model: give --model the base model"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"{folder} has no safetensors weights; give --model the file {folder / ggufs[0]}"
    return f"{folder} has no safetensors weights ({SINGLE_FILE} or {INDEX_FILE})"
