"""A GGUF file converted once to safetensors, float32, and kept.

Owns the conversion and its place: a folder named by the file's content, made under another name
and renamed when complete, so that an interrupted conversion is never used. Tensor names are the
gguf library's knowledge and layouts are transformers'; that no tensor is lost is checked here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from model_worker.loader.attention_layout import causal_model_class
from model_worker.loader.digests import DigestCache
from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.gguf_metadata import (
    GGUFMetadata,
    read_metadata,
    rope_scaling,
)
from model_worker.loader.gguf_tokenizer import convert_tokenizer, save_tokenizer
from model_worker.loader.progress import Progress, format_bytes, quiet_transformers

_FORMAT = "1"  # raised whenever the same file would be converted differently
_STALE_S = 24 * 3600.0
_FILE_MODE = 0o644
_MAX_SHARD_SIZE = "4GB"
_BYTES_PER_WEIGHT = 4
_NOT_OF_THE_MODEL = (
    "quantization_config",
    "_model_name_or_path",
    "_name_or_path",
    "transformers_version",
)


def convert_once(file: Path, cache_dir: Path, progress: Progress) -> Path:
    """The folder with ``file`` as safetensors and tokenizer files; converts it the first time.

    Raises ModelLoadError for a file that cannot be converted exactly, or for no disk space.
    """
    try:
        (digest,) = DigestCache(cache_dir / "digests.json").digests([file])
        parent = cache_dir / "converted"
        target = parent / f"{digest}-v{_FORMAT}"
        if target.is_dir():
            return target
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / f".{digest}.lock"):
            if not target.is_dir():  # another process may have made it meanwhile
                _remove_stale(parent)
                _convert(file, target, progress)
        return target
    except OSError as error:
        raise ModelLoadError(f"Cannot convert {file} into {cache_dir}: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_stale(parent: Path) -> None:
    """Remove what conversions that died have left, after a day."""
    for leftover in parent.glob(".tmp-*"):
        if time.time() - leftover.stat().st_mtime > _STALE_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _convert(file: Path, target: Path, progress: Progress) -> None:
    metadata = read_metadata(file)
    needed = metadata.num_weights * _BYTES_PER_WEIGHT
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ModelLoadError(
            f"Converting {file.name} takes {format_bytes(needed)} in {target.parent}, "
            f"where {format_bytes(free)} are free"
        )
    progress(f"Converting {file.name} to safetensors, once ({format_bytes(needed)})")
    work = target.parent / f".tmp-{uuid.uuid4().hex}"
    work.mkdir()
    try:
        with quiet_transformers():
            _write(file, metadata, work)
        for made in work.iterdir():
            made.chmod(_FILE_MODE)  # weights are written for their owner alone
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(file: Path, metadata: GGUFMetadata, folder: Path) -> None:
    tokenizer = convert_tokenizer(file, metadata)  # first: it may refuse, and is quick
    config = _read_config(file, metadata)
    save_torch_state_dict(
        _read_tensors(file, metadata, config), folder, max_shard_size=_MAX_SHARD_SIZE
    )
    config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    _generation_config(config, metadata).save_pretrained(folder)


def _read_config(file: Path, metadata: GGUFMetadata) -> PretrainedConfig:
    scaling = rope_scaling(metadata)
    try:
        read = AutoConfig.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the reader's own errors, for architectures it does not know
        raise ModelLoadError(f"Cannot convert {file}: {first_line(error)}") from error
    fields: dict[str, Any] = read.to_dict()
    for name in _NOT_OF_THE_MODEL:
        fields.pop(name, None)
    if scaling is not None:
        fields["rope_parameters"] = {**(fields.get("rope_parameters") or {}), **scaling}
    window = metadata.get_own("attention.sliding_window")
    if window and "sliding_window" in fields:
        fields["sliding_window"] = int(window)
    config: PretrainedConfig = type(read).from_dict(fields)
    config.dtype = torch.float32
    config.architectures = [_model_class(config).__name__]
    return config


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    model_class = causal_model_class(config)
    if model_class is None:
        raise ModelLoadError(f"GGUF files of type {config.model_type} are not served")
    return model_class


def _read_tensors(
    file: Path, metadata: GGUFMetadata, config: PretrainedConfig
) -> dict[str, torch.Tensor]:
    """The weights by their names in the model, float32; all of them, and each exactly once."""
    with torch.device("meta"):
        model = _model_class(config)(config)
    expected = {name: value.shape for name, value in model.state_dict().items()}
    for tied in model.all_tied_weights_keys if config.tie_word_embeddings else ():
        expected.pop(tied, None)
    names = _names_in_model(metadata, config, expected)
    processor_class: Any = TENSOR_PROCESSORS.get(metadata.architecture, TensorProcessor)
    processor = processor_class(config.to_dict())
    tensors = {}
    for stored in metadata.tensors:
        name = names.pop(stored.name, None)
        if name is None:
            raise _mismatch(file, config, f"{stored.name} has no place in it")
        values = dequantize(stored.data, stored.tensor_type)
        tensor = torch.from_numpy(np.array(processor.process(values, stored.name).weights))
        if tensor.shape != expected[name]:
            raise _mismatch(file, config, f"{stored.name} has the shape {tuple(tensor.shape)}")
        tensors[name] = tensor.to(torch.float32)
    if names:
        raise _mismatch(file, config, f"{min(names)} is missing")
    return tensors


def _names_in_model(
    metadata: GGUFMetadata, config: PretrainedConfig, expected: Iterable[str]
) -> dict[str, str]:
    """Names in the file -> names in the model, by the table that GGUF's own converter uses."""
    known = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(known[metadata.architecture], int(config.num_hidden_layers))
    names = {}
    for name in expected:
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        names[stored or name] = name
    return names


def _mismatch(file: Path, config: PretrainedConfig, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The tensors of {file.name} do not match a {config.model_type} model: {what}; "
        "give --model the safetensors form of this model"
    )


def _generation_config(config: PretrainedConfig, metadata: GGUFMetadata) -> GenerationConfig:
    """The ids that end an answer: the end of text, and of a turn where the file names one."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ids = sorted({int(token_id) for token_id in found if token_id is not None})
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=ids or None, pad_token_id=config.pad_token_id
    )
