"""Rotary embeddings whose frequencies do not depend on the batch.

Owns the refusal of rope variants that follow the longest sequence of the moment, and the pinning
of longrope to one of its two factor sets: a key that was rotated by one set and read with the
other would be wrong. Knows nothing of KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_worker.loader.errors import ModelLoadError

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
_PINNED_ROPE_TYPE = "pinned"  # unknown to transformers, whose per-forward update then stays away


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The configuration's rope parameters; empty for a model without rotary embeddings."""
    return dict(getattr(config, "rope_parameters", None) or {})


def check_rope(config: PretrainedConfig) -> None:
    """Raises ModelLoadError for a rope variant whose frequencies cannot be fixed at start."""
    for parameters, is_nested in _parameter_sets(config):
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope" and not is_nested:
            continue
        if rope_type not in _FIXED_ROPE_TYPES:
            raise ModelLoadError(
                f"Rope variant {rope_type!r} is not served: its frequencies depend on the length "
                "of the batch, so stored keys would not stay valid"
                if rope_type in {"dynamic", "longrope"}
                else f"Rope variant {rope_type!r} is not served: only "
                f"{', '.join(sorted(_FIXED_ROPE_TYPES))} and longrope are"
            )
        if parameters.get("mrope_section"):
            raise ModelLoadError("Rope with several axes (mrope) is not served: it is multimodal")


def longrope_choice(config: PretrainedConfig, max_model_len: int) -> str:
    """ "short" or "long" for longrope, "fixed" for every other variant."""
    parameters = rope_parameters(config)
    if parameters.get("rope_type") != "longrope":
        return "fixed"
    return "short" if max_model_len <= original_length(config) else "long"


def original_length(config: PretrainedConfig) -> int:
    """Tokens of context that the model was trained on before its rope was stretched."""
    return int(rope_parameters(config)["original_max_position_embeddings"])


def pin_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Fix the frequencies of ``model``'s longrope embeddings for good; others are untouched.

    The choice is what the reference makes for a sequence of ``max_model_len`` tokens. It holds for
    every shorter sequence too, for which the reference would switch to the short factors.
    """
    choice = longrope_choice(model.config, max_model_len)
    if choice == "fixed":
        return
    seq_len = original_length(model.config) + (1 if choice == "long" else 0)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            _pin(module, model.config, seq_len)


def _pin(module: torch.nn.Module, config: PretrainedConfig, seq_len: int) -> None:
    held = module.inv_freq
    assert isinstance(held, torch.Tensor)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, held.device, seq_len=seq_len)
    held.copy_(inv_freq)
    if isinstance(getattr(module, "original_inv_freq", None), torch.Tensor):
        module.original_inv_freq = held.clone()
    setattr(module, "attention_scaling", scaling)  # noqa: B010 - not a tensor, which mypy expects
    setattr(module, "rope_type", _PINNED_ROPE_TYPE)  # noqa: B010


def _parameter_sets(config: PretrainedConfig) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each set of rope parameters, and whether it belongs to one type of layer only."""
    parameters = rope_parameters(config)
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    if nested:
        yield from ((value, True) for value in nested)
    else:
        yield parameters, False
