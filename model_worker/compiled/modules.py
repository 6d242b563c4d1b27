"""The linear layers of models that have no compiled decoder.

Owns the replacement of modules in a model that transformers otherwise runs as it is.
"""

from __future__ import annotations

import numpy as np
import torch

from model_worker.compiled.linear import linear
from model_worker.compiled.panels import pack, unpack
from model_worker.compiled.weights import bias_of, give_up_weight, scale_of, weight_of
from model_worker.int8_linear import Int8Linear


class StreamedLinear(torch.nn.Module):
    """The layer it is made from, float32 or int8, whose weights it takes over."""

    def __init__(self, layer: torch.nn.Linear | Int8Linear, *, is_shared: bool = False) -> None:
        """``is_shared``: others, as an input embedding, read the weights too and keep them."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._scale = scale_of(layer).numpy()
        self._bias = bias_of(layer).clone().numpy()  # a view would keep the mapped file in memory
        self._panels = pack(weight_of(layer))
        if not is_shared:
            give_up_weight(layer)

    @property
    def weight(self) -> torch.Tensor:
        """A copy: for models that look at the type of a layer's weights, or at them."""
        return unpack(self._panels, self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        output = torch.empty(*x.shape[:-1], self.out_features)
        linear(
            np.ascontiguousarray(x.reshape(rows, self.in_features).numpy()),
            self._panels.numpy(),
            self._scale,
            self._bias,
            output.view(rows, self.out_features).numpy(),
            False,
        )
        return output


def stream_linears(model: torch.nn.Module) -> int:
    """Replace the linear layers of a float32 model on the CPU; returns how many."""
    count = 0
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (torch.nn.Linear, Int8Linear):
                assert isinstance(child, torch.nn.Linear | Int8Linear)
                is_shared = id(child.weight) in embeddings
                setattr(module, name, StreamedLinear(child, is_shared=is_shared))
                count += 1
    # While one tensor is a view of the mapped file, all that was read of it stays resident.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return count
