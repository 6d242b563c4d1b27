"""The linear layers of models that have no compiled decoder.

Owns the replacement of modules in a model that transformers otherwise runs as it is.
"""

from __future__ import annotations

import numpy as np
import torch

from model_worker.compiled.linear import linear
from model_worker.compiled.weights import bias_of, scale_of
from model_worker.int8_linear import Int8Linear


class StreamedLinear(torch.nn.Module):
    """The layer it was made from, float32 or int8, whose weights it shares."""

    def __init__(self, layer: torch.nn.Linear | Int8Linear) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._weight = layer.weight.detach().numpy()
        self._scale, self._bias = scale_of(layer).numpy(), bias_of(layer).detach().numpy()

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        output = torch.empty(*x.shape[:-1], self.out_features)
        linear(
            np.ascontiguousarray(x.reshape(rows, self.in_features).numpy()),
            self._weight,
            self._scale,
            self._bias,
            output.view(rows, self.out_features).numpy(),
            False,
        )
        return output


def stream_linears(model: torch.nn.Module) -> int:
    """Replace the linear layers of a float32 model on the CPU; returns how many."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (torch.nn.Linear, Int8Linear):
                assert isinstance(child, torch.nn.Linear | Int8Linear)
                setattr(module, name, StreamedLinear(child))
                count += 1
    return count
