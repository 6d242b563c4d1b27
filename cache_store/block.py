"""What one KV block is: how many tokens it holds and how many bytes they take.

Owns the arithmetic between tokens, blocks and bytes. Knows nothing of tensors, devices or of who
holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_DTYPE = "float32"
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV layout of one layer group: every layer in it has the same heads and the same type.

    ``block_size`` is in tokens. ``num_kv_heads`` is that of one rank. ``dtype`` is torch's name
    of the stored type, kept as text because this package does without torch. With "int8" each
    head's vector of a token, of K and of V, has a scale of SCALE_DTYPE beside it.

    Raises ValueError for a size that is not positive.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_element: int

    def __post_init__(self) -> None:
        for field in ("block_size", "num_layers", "num_kv_heads", "head_dim", "bytes_per_element"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")

    @property
    def scale_bytes(self) -> int:
        """Of the scale of one vector; 0 where numbers are stored as they are."""
        return _SCALE_BYTES if self.dtype == "int8" else 0

    @property
    def coding(self) -> str:
        """What a stored byte means: equal for two specs only if their blocks can be exchanged."""
        return f"{self.dtype}/{SCALE_DTYPE}" if self.scale_bytes else self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and the values of one token over all layers of the group."""
        bytes_per_vector = self.head_dim * self.bytes_per_element + self.scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * bytes_per_vector

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def num_blocks_in(self, num_bytes: int) -> int:
        """How many whole blocks fit into ``num_bytes`` of memory."""
        return max(0, num_bytes // self.bytes_per_block)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens need, the last one possibly partly filled."""
    return -(-num_tokens // block_size)
