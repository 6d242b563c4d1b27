"""How activations beside int8 weights are rounded: to integers, with one scale for each row.

One rule for the compiled layers and for torch's. Knows neither of them.
"""

from __future__ import annotations

# What a row's largest number becomes: all that int16 holds. Sums of products with int8 weights are
# then within int32 for some five hundred inputs, so nobody sums more at once.
LARGEST_CODE = 32767
