"""Where a model's configuration comes from: a table, a folder, a file, a GGUF file, or the hub.

Owns the forms of MODEL. Reads no weights: of a GGUF file its metadata and the list of its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config import ConfigError
from service.planning.known_models import KNOWN_MODELS
from service.planning.shape import FAMILIES, ModelShape, ShapeError, shape_of

__all__ = ["model_shape"]

_GGUF_FIELDS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}


def model_shape(spec: str, context: int) -> ModelShape:
    """The shape of the model that ``spec`` names, to be served with ``context`` tokens.

    Raises ConfigError, with the reason.
    """
    known = {name.lower(): name for name in KNOWN_MODELS}
    path = Path(spec).expanduser()
    num_weights = None
    if name := known.get(spec.lower()):
        config = _config_of(KNOWN_MODELS[name])
    elif path.is_dir() or path.suffix == ".json":
        config = _config_of(_read(path / "config.json" if path.is_dir() else path))
    elif path.suffix.lower() == ".gguf":
        fields, num_weights = _read_gguf(path)
        config = _config_of(fields)
    else:
        config = _fetched(spec)
    try:
        return shape_of(name or spec, config, context, num_weights)
    except ShapeError as error:
        raise ConfigError(f"MODEL: {spec}: {error}") from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(
            f"MODEL: {spec}: its configuration lacks layers, heads or sizes"
        ) from None


def _config_of(fields: Mapping[str, Any]) -> Any:
    """With the defaults of its type, which configurations leave out."""
    from transformers import AutoConfig

    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("MODEL: the configuration has no model_type")
    try:
        rest = {name: value for name, value in fields.items() if name != "model_type"}
        return AutoConfig.for_model(kind, **rest)
    except Exception as error:  # the library's own, for types and values that it does not know
        raise ConfigError(f"MODEL: {_first_line(error)}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"MODEL: cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"MODEL: {path} is no JSON object")
    return fields


def _read_gguf(path: Path) -> tuple[Mapping[str, Any], int]:
    """Its fields by their names in a configuration, and the number of its weights."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            "MODEL: reading a .gguf file needs gguf, which is not installed here: "
            "pip install 'headstart[worker]'"
        ) from None
    try:
        reader = GGUFReader(str(path))
        said = {
            name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 1
        }
        shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
        num_weights = sum(
            int(tensor.n_elements)
            for tensor in reader.tensors
            if tensor.name != "rope_freqs.weight"
        )
        kind = str(said["general.architecture"])
        fields = {
            name: value
            for name, field in _GGUF_FIELDS.items()
            if (value := said.get(f"{kind}.{field}")) is not None
        }
        vocab_size = int(shapes["token_embd.weight"][-1])
    except FileNotFoundError:
        raise ConfigError(f"MODEL: cannot read {path}: No such file or directory") from None
    except Exception as error:  # numpy's and struct's, on a file that is broken
        raise ConfigError(
            f"MODEL: {path} is truncated or not GGUF ({_first_line(error)})"
        ) from None
    if kind not in FAMILIES or said.get(f"{kind}.expert_count"):
        raise ConfigError(f"MODEL: GGUF files of type {kind} are not planned for")
    is_tied = "output.weight" not in shapes
    more = {"model_type": kind, "vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    return {**fields, **more, "dtype": "float32"}, num_weights


def _fetched(spec: str) -> Any:
    from transformers import AutoConfig

    try:
        name, _, revision = spec.partition("@")
        return AutoConfig.from_pretrained(
            name, revision=revision or "main", trust_remote_code=False
        )
    except Exception as error:  # the hub's and the network's, of several libraries
        names = ", ".join(KNOWN_MODELS)
        raise ConfigError(
            f"MODEL: {spec!r} is no folder, config.json, .gguf file or model on the hub that can "
            f"be read ({_first_line(error)}); known by name: {names}"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
