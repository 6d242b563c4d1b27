"""What a GGUF file says about itself, and the part of it that transformers does not carry over.

Owns the reading of metadata fields and the rope scaling that GGUF expresses in its own way.
Refuses a file whose scaling it cannot express exactly: served without it, it would answer wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from model_worker.loader.errors import ModelLoadError, first_line

ROPE_FACTORS_TENSOR = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ORIGINAL_LEN = 8192
_FACTOR_TOLERANCE = 1e-3  # relative; converters store float32 of a float32 computation
_KNOWN_SCALING = frozenset({"type", "factor", "original_context_length", "finetuned"})


@dataclass(frozen=True)
class GGUFMetadata:
    """``fields`` without long arrays; ``tensors`` are views of the mapped file, still quantized;
    ``rope_factors`` divide the rope frequencies, if given."""

    architecture: str
    fields: dict[str, Any]
    tensors: tuple[ReaderTensor, ...]
    rope_factors: tuple[float, ...] | None

    @property
    def num_weights(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self.tensors)

    def get(self, key: str) -> Any:
        return self.fields.get(key)

    def get_own(self, key: str) -> Any:
        """A field of the architecture's own name space, such as ``llama.block_count``."""
        return self.fields.get(f"{self.architecture}.{key}")


def read_metadata(file: Path) -> GGUFMetadata:
    """Raises ModelLoadError for a file that is not GGUF, is truncated, or names no architecture."""
    try:
        reader = GGUFReader(str(file))
        fields = {
            name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 64
        }
        factors = None
        for tensor in reader.tensors:
            if tensor.name == ROPE_FACTORS_TENSOR:
                values = dequantize(tensor.data, tensor.tensor_type)
                factors = tuple(float(value) for value in np.ravel(values))
        return GGUFMetadata(
            architecture=str(fields["general.architecture"]),
            fields=fields,
            tensors=tuple(
                tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS_TENSOR
            ),
            rope_factors=factors,
        )
    except Exception as error:  # the reader raises numpy's and struct's errors on a broken file
        raise ModelLoadError(
            f"Cannot read {file}: the file is truncated or not GGUF ({first_line(error)})"
        ) from error


def rope_scaling(metadata: GGUFMetadata) -> dict[str, Any] | None:
    """The rope parameters (beside rope_theta) that ``metadata`` implies; None for plain rope.

    Raises ModelLoadError if they have no exact counterpart.
    """
    prefix = f"{metadata.architecture}.rope.scaling."
    scaling = {
        name.removeprefix(prefix): value
        for name, value in metadata.fields.items()
        if name.startswith(prefix)
    }
    kind = scaling.get("type", "none")
    if metadata.get_own("rope.scale_linear") not in (None, 1.0):
        kind, scaling = "linear", {"factor": metadata.get_own("rope.scale_linear")}
    if metadata.rope_factors is not None:
        if kind != "none":
            raise _unknown_scaling(f"{kind} with {ROPE_FACTORS_TENSOR}")
        return _llama3_scaling(metadata.rope_factors, metadata)
    if kind == "none":
        return None
    unknown = set(scaling) - _KNOWN_SCALING
    if unknown:
        raise _unknown_scaling(f"{kind} with {', '.join(sorted(unknown))}")
    if kind == "linear" and "factor" in scaling:
        return {"rope_type": "linear", "factor": float(scaling["factor"])}
    if kind == "yarn" and {"factor", "original_context_length"} <= set(scaling):
        return {
            "rope_type": "yarn",
            "factor": float(scaling["factor"]),
            "original_max_position_embeddings": int(scaling["original_context_length"]),
        }
    raise _unknown_scaling(str(kind))


def _llama3_scaling(factors: tuple[float, ...], metadata: GGUFMetadata) -> dict[str, Any] | None:
    """The llama3 parameters that give ``factors``, which is how converters store that variant."""
    if all(factor == 1.0 for factor in factors):
        return None
    base = float(metadata.get_own("rope.freq_base") or 10_000.0)
    parameters = {
        "rope_type": "llama3",
        "factor": float(round(max(factors))),
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_LEN,
        **_LLAMA3,
    }
    expected = [_llama3_factor(base ** (i / len(factors)), parameters) for i in range(len(factors))]
    pairs = zip(factors, expected, strict=True)
    if not all(math.isclose(a, b, rel_tol=_FACTOR_TOLERANCE) for a, b in pairs):
        raise _unknown_scaling(ROPE_FACTORS_TENSOR)
    return parameters


def _llama3_factor(wave: float, parameters: dict[str, Any]) -> float:
    """What llama3 scaling divides the frequency 1 / ``wave`` by."""
    length = 2 * math.pi * wave
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if length < original / high:
        return 1.0
    if length > original / low:
        return float(parameters["factor"])
    smooth = (original / length - low) / (high - low)
    return float(1.0 / ((1 - smooth) / parameters["factor"] + smooth))


def _unknown_scaling(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The GGUF file scales its rope in a way that cannot be converted exactly ({what}); "
        "give --model the safetensors form of this model"
    )
