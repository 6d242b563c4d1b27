"""The weights of a Llama-like model as the compiled layers want them: one array per kind.

Owns which models fit, and the stacking: the model's own parameters become views of the stacked
arrays, so that nothing is held twice and the model itself can still be run. Knows nothing of steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from model_worker.int8_linear import Int8Linear

Floats = NDArray[np.float32]

# Models whose layers are exactly those of compiled.layers. A class that is not here is run by
# transformers' own modules: it may norm, gate or rotate otherwise.
_CLASSES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)


class LayerWeights(NamedTuple):
    """float32, or where a scale goes with it maybe int8; all (layers, ...), contiguous.

    A weight is (layers, outputs, inputs), its scale (layers, outputs): ones for float32. Biases
    that the model does not have are zeros, norms that it does not have are of no size.
    """

    qkv: NDArray[Any]
    qkv_scale: Floats
    qkv_bias: Floats
    out: NDArray[Any]
    out_scale: Floats
    out_bias: Floats
    gate_up: NDArray[Any]
    gate_up_scale: Floats
    down: NDArray[Any]
    down_scale: Floats
    down_bias: Floats
    norm_in: Floats
    norm_post: Floats
    query_norm: Floats
    key_norm: Floats


class HeadWeights(NamedTuple):
    """The output embedding: (vocab, width), (vocab,), (vocab,)."""

    weight: NDArray[Any]
    scale: Floats
    bias: Floats


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


def stack_layers(model: PreTrainedModel) -> LayerWeights:
    """Raises AttributeError where the model does not fit."""
    layers: list[Any] = list(model.model.layers)
    attentions = [layer.self_attn for layer in layers]
    mlps = [layer.mlp for layer in layers]
    qkv = _stack([[item.q_proj, item.k_proj, item.v_proj] for item in attentions])
    out = _stack([[item.o_proj] for item in attentions])
    gate_up = _stack([[item.gate_proj, item.up_proj] for item in mlps])
    down = _stack([[item.down_proj] for item in mlps])
    _own_the_rest(model, layers)
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


def _own_the_rest(model: PreTrainedModel, layers: list[Any]) -> None:
    """Copy what was not stacked: while one tensor is a view of the mapped file, all that was read
    of the file stays resident."""
    stacked = {
        id(module.weight)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, torch.nn.Linear)
    }
    for parameter in model.parameters():
        if id(parameter) not in stacked:
            parameter.data = parameter.data.clone()


def head_weights(model: PreTrainedModel) -> HeadWeights:
    head: Any = model.lm_head
    weight, scale, bias = _stack([[head]])
    return HeadWeights(weight[0], scale[0], bias[0])


@torch.no_grad()
def _stack(groups: list[list[torch.nn.Module]]) -> tuple[NDArray[Any], Floats, Floats]:
    """Weights, scales and biases (groups, outputs of a group, inputs); the modules become views."""
    modules = [module for group in groups for module in group]
    if len(modules) == 1:
        weight = _weight(modules[0])[None]  # nothing to join: a tied embedding stays tied
    else:
        outputs = sum(_weight(item).shape[0] for item in groups[0])
        first = _weight(modules[0])
        weight = torch.empty(len(groups), outputs, first.shape[1], dtype=first.dtype)
        for index, group in enumerate(groups):
            start = 0
            for module in group:
                # One at a time: the originals and the copy of one module are all that is held.
                own = _weight(module).data
                part = weight[index, start : start + len(own)]
                part.copy_(own)
                _weight(module).data = part
                start += len(own)
    scale = torch.stack([torch.cat([scale_of(item) for item in group]) for group in groups])
    bias = torch.stack([torch.cat([bias_of(item) for item in group]) for group in groups])
    return weight.detach().numpy(), scale.numpy(), bias.detach().numpy()


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def scale_of(module: torch.nn.Module) -> torch.Tensor:
    """(outputs,): ones where the weights are not coded."""
    if isinstance(module, Int8Linear):
        return module.scale
    return torch.ones(_weight(module).shape[0])


def bias_of(module: torch.nn.Module) -> torch.Tensor:
    """(outputs,): zeros where there is none."""
    bias = module.bias
    if isinstance(bias, torch.Tensor):
        return bias
    return torch.zeros(_weight(module).shape[0])


def _norms(modules: list[Any]) -> Floats:
    if modules[0] is None:
        return np.empty((len(modules), 0), np.float32)
    stacked: Floats = torch.stack([module.weight for module in modules]).detach().numpy()
    return stacked
