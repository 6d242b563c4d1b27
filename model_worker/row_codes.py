"""How activations beside int8 weights are rounded: to integers, with one scale for each row.

One rule for the compiled layers and for torch's. Knows neither of them.
"""

from __future__ import annotations

# Numbers that one vector instruction multiplies: each of its eight lanes sums the products of two.
NUMBERS_AT_ONCE = 16


def largest_code(depth: int) -> int:
    """What a row's largest number becomes where ``depth`` products with int8 are summed.

    At most int16's, and small enough that each lane's sum stays within int32: up to a depth of
    4,096 the first is the limit, and at 14,336 a row still has 9,436 steps on either side of zero.
    """
    steps = (depth + NUMBERS_AT_ONCE - 1) // NUMBERS_AT_ONCE
    return min(32767, (2**31 - 1) // (steps * 2 * 127))
