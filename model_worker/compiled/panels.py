"""How the weights of a linear layer lie in memory: in panels of a few outputs, input by input.

Sums of outputs that lie side by side in a register need not be added up across it, and a panel is
read from its first byte to its last, for one row as for thousands. Owns the layout and the way into
it and back. Knows nothing of what is computed with it.

    float32: panels[p, i, j] is the weight of output 24 p + j for input i
    int8:    panels[p, i, 2 j + h] is that of 16 p + j for 2 i + h: a step takes two inputs at once

The outputs of the last panel that do not exist are zeros, and so is the odd input's neighbour.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Outputs of a panel: three or two vectors of eight. Products of integers need a register more.
FLOAT_PANEL, INTEGER_PANEL = 24, 16
INTEGERS_AT_ONCE = 2  # inputs of a step


def panels_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(panels, steps, numbers of a step)."""
    width, at_once = _width_and_inputs(dtype)
    return (-(-outputs // width), -(-inputs // at_once), width * at_once)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (outputs, inputs), float32 or int8, as panels."""
    outputs, inputs = weight.shape
    shape = panels_shape(outputs, inputs, weight.dtype)
    return pack_into(weight, torch.empty(shape, dtype=weight.dtype))


def pack_into(weight: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """Fills and returns ``panels``, which have the shape for ``weight``."""
    width, at_once = _width_and_inputs(weight.dtype)
    num_panels, steps, _ = panels.shape
    outputs, inputs = weight.shape
    by_output = panels.view(num_panels, steps, width, at_once).permute(0, 2, 1, 3)
    # What is whole is not copied twice.
    whole = outputs // width if inputs == steps * at_once else 0
    by_output[:whole].copy_(weight[: whole * width].view(whole, width, steps, at_once))
    rest = weight[whole * width :]
    padded = weight.new_zeros((num_panels - whole) * width, steps * at_once)
    padded[: len(rest), :inputs] = rest
    by_output[whole:].copy_(padded.view(-1, width, steps, at_once))
    return panels


def unpack(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """What was packed: (outputs, inputs)."""
    width, at_once = _width_and_inputs(panels.dtype)
    num_panels, steps, _ = panels.shape
    by_step = panels.view(num_panels, steps, width, at_once)
    whole = by_step.permute(0, 2, 1, 3).reshape(num_panels * width, -1)
    return whole[:outputs, :inputs]


def rows_of(panels: Floats, ids: NDArray[np.int64]) -> Floats:
    """The weights (ids, inputs) of some outputs: rows of an embedding that is tied."""
    return panels[ids // FLOAT_PANEL, :, ids % FLOAT_PANEL]


def _width_and_inputs(dtype: torch.dtype) -> tuple[int, int]:
    """Outputs of a panel, and inputs of a step."""
    return (INTEGER_PANEL, INTEGERS_AT_ONCE) if dtype == torch.int8 else (FLOAT_PANEL, 1)
