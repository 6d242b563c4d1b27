"""The weights of a Llama-like model as the compiled layers want them: one array per kind.

Owns which models fit, and the taking over: what is packed is given up by the model, module by
module, so that nothing is held twice; the model itself can no longer be run. Knows nothing of
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from model_worker.compiled.panels import pack_into, panels_shape, rows_of
from model_worker.int8_linear import Int8Linear

Floats = NDArray[np.float32]
Panels = NDArray[Any]  # float32 or int8, as compiled.panels lays them out

# Models whose layers are exactly those of compiled.layers. A class that is not here is run by
# transformers' own modules: it may norm, gate or rotate otherwise.
_CLASSES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)


class LayerWeights(NamedTuple):
    """float32, or where a scale goes with it maybe int8; all (layers, ...), contiguous.

    A weight is (layers, *panels), its scale and its bias (layers, outputs): ones for float32, zeros
    where the model has none. Norms that it does not have are of no size.
    """

    qkv: Panels
    qkv_scale: Floats
    qkv_bias: Floats
    out: Panels
    out_scale: Floats
    out_bias: Floats
    gate_up: Panels
    gate_up_scale: Floats
    down: Panels
    down_scale: Floats
    down_bias: Floats
    norm_in: Floats
    norm_post: Floats
    query_norm: Floats
    key_norm: Floats


class HeadWeights(NamedTuple):
    """The output embedding: panels, (vocab,), (vocab,)."""

    weight: Panels
    scale: Floats
    bias: Floats


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that a model's forward pass reads. ``embeddings`` (vocab, hidden); None where they are
    the head's, whose panels have them. ``rotary``: the model's own module."""

    layers: LayerWeights
    head: HeadWeights
    embeddings: Floats | None
    norm: Floats
    epsilon: np.float32
    scaling: np.float32
    rotary: torch.nn.Module

    @classmethod
    def take(cls, model: PreTrainedModel) -> DecoderWeights:
        """``model`` must fit, and is of no more use. Raises AttributeError if it does not fit."""
        core: Any = model.model
        is_tied = core.embed_tokens.weight is getattr(model.lm_head, "weight", None)
        layers = _take_layers(list(core.layers))
        weight, scale, bias = _take([[model.lm_head]])
        embeddings = None if is_tied else core.embed_tokens.weight.detach().clone().numpy()
        norm = core.norm.weight.detach().clone().numpy()
        # While one tensor is a view of the mapped file, all that was read of it stays resident.
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return cls(
            layers,
            HeadWeights(weight[0], scale[0], bias[0]),
            embeddings,
            norm,
            np.float32(core.norm.variance_epsilon),
            np.float32(core.layers[0].self_attn.scaling),
            core.rotary_emb,
        )

    def embed(self, token_ids: NDArray[np.int64]) -> Floats:
        """(tokens, hidden)."""
        if self.embeddings is None:
            return rows_of(self.head.weight, token_ids)
        rows: Floats = self.embeddings[token_ids]
        return rows


def fits(model: PreTrainedModel) -> bool:
    """Whether the compiled layers compute what ``model`` does. For models on the CPU."""
    config = model.config
    return (
        type(model).__name__ in _CLASSES
        and all(parameter.dtype == torch.float32 for parameter in model.parameters())
        and model.device.type == "cpu"
        and getattr(config, "hidden_act", None) == "silu"
        and not getattr(config, "mlp_bias", False)
    )


def _take_layers(layers: list[Any]) -> LayerWeights:
    attentions = [layer.self_attn for layer in layers]
    mlps = [layer.mlp for layer in layers]
    qkv = _take([[item.q_proj, item.k_proj, item.v_proj] for item in attentions])
    out = _take([[item.o_proj] for item in attentions])
    gate_up = _take([[item.gate_proj, item.up_proj] for item in mlps])
    down = _take([[item.down_proj] for item in mlps])
    return LayerWeights(
        *qkv,
        *out,
        *gate_up[:2],
        *down,
        norm_in=_norms([layer.input_layernorm for layer in layers]),
        norm_post=_norms([layer.post_attention_layernorm for layer in layers]),
        query_norm=_norms([getattr(item, "q_norm", None) for item in attentions]),
        key_norm=_norms([getattr(item, "k_norm", None) for item in attentions]),
    )


@torch.no_grad()
def _take(groups: list[list[torch.nn.Module]]) -> tuple[Panels, Floats, Floats]:
    """Panels (groups, ...), scales and biases (groups, outputs of a group): the modules of a group
    side by side, as one layer."""
    outputs = sum(len(weight_of(item)) for item in groups[0])
    first = weight_of(groups[0][0])
    shape = panels_shape(outputs, first.shape[1], first.dtype)
    panels = torch.empty(len(groups), *shape, dtype=first.dtype)
    scale = torch.stack([torch.cat([scale_of(item) for item in group]) for group in groups])
    bias = torch.stack([torch.cat([bias_of(item) for item in group]) for group in groups])
    for own, group in zip(panels, groups, strict=True):
        pack_into(torch.cat([weight_of(item) for item in group]), own)
        for item in group:
            give_up_weight(item)
    return panels.numpy(), scale.numpy(), bias.detach().numpy()


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    """(outputs, inputs)."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def give_up_weight(module: torch.nn.Module) -> None:
    """What has been packed is not held twice. A module that is called all the same says so."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    weight.data = weight.data.new_empty(0)


def scale_of(module: torch.nn.Module) -> torch.Tensor:
    """(outputs,): ones where the weights are not coded."""
    if isinstance(module, Int8Linear):
        return module.scale
    return torch.ones(len(weight_of(module)))


def bias_of(module: torch.nn.Module) -> torch.Tensor:
    """(outputs,): zeros where there is none."""
    bias = module.bias
    if isinstance(bias, torch.Tensor):
        return bias.detach()
    return torch.zeros(len(weight_of(module)))


def _norms(modules: list[Any]) -> Floats:
    if modules[0] is None:
        return np.empty((len(modules), 0), np.float32)
    stacked: Floats = torch.stack([module.weight for module in modules]).detach().numpy()
    return stacked
