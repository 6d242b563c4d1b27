"""The linear layers of models that have no compiled decoder: streamed where a step has few tokens.

Owns the replacement of modules in a model that transformers otherwise runs as it is.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from model_worker.compiled.linear import linear
from model_worker.int8_linear import Int8Linear

# From about here on a BLAS gets more out of the cores than it loses by packing the weights.
MAX_FEW_ROWS = 48


class StreamedLinear(torch.nn.Module):
    """The layer it was made from, float32 or int8, whose weights it shares."""

    def __init__(self, layer: torch.nn.Linear | Int8Linear) -> None:
        super().__init__()
        outputs = layer.out_features
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, outputs
        self._weight = layer.weight.detach().numpy()
        scale = layer.scale if isinstance(layer, Int8Linear) else torch.ones(outputs)
        bias = torch.zeros(outputs) if layer.bias is None else layer.bias
        self._scale, self._bias = scale.numpy(), bias.detach().numpy()

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if rows > MAX_FEW_ROWS:
            if isinstance(self.layer, Int8Linear):
                output: torch.Tensor = self.layer(x)
                return output
            return F.linear(x, self.layer.weight, self.layer.bias)
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
