"""Linear layers whose weights are int8 with a scale per output.

Owns the use of int8 in whole models; a weight is coded by kv_store's rule, output by output, and
float32 activations by row_codes', row by row, so that no row's result depends on those beside it.
Knows nothing of which model it is in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from model_worker.attention.kv_store import dequantize, quantize
from model_worker.row_codes import LARGEST_CODE

# Part of the fingerprint: what is stored was computed so, and by no other rule.
INT8_CODING = "int8 weights by output, float32 rows to 32767 steps"

# Outputs whose weights are decoded at once for many rows: the copy stays in the cache.
_OUTPUTS_AT_ONCE = 4096


class Int8Linear(torch.nn.Module):
    """y = x (weight * scale)^T + bias; ``weight`` int8 (outputs, inputs), ``scale`` (outputs,)."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:  # others are coarser as they are
            x = round_rows(x)
        # Decoded before the product: sums of weights up to 127 would leave float16's range.
        parts = [
            F.linear(x, dequantize(weight, scale, x.dtype))
            for weight, scale in zip(
                torch.split(self.weight, _OUTPUTS_AT_ONCE),
                torch.split(self.scale, _OUTPUTS_AT_ONCE),
                strict=True,
            )
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return output if self.bias is None else output + self.bias


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., inputs) as its codes tell it: integers times a scale per row."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(largest == 0, 0.0, LARGEST_CODE / largest)
    return torch.round(x * factor) * (largest / LARGEST_CODE)


def quantize_linears(model: torch.nn.Module) -> int:
    """Replace every linear layer of ``model``, the output embedding too; returns how many.

    An input embedding that is tied to the output keeps its own numbers: rows are looked up in it.
    """
    count = 0
    # Without the layers themselves: a list of these would hold them until the end.
    for module in [module for module in model.modules() if type(module) is not torch.nn.Linear]:
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, Int8Linear(child))
                count += 1
    return count
