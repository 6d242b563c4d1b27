"""What a run is told: where the others are installed, and what memory each server may take.

Owns the two shapes of a server that workloads ask for. Knows nothing of any one server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 32
NUM_THREADS = 2
F32_KV_BYTES_PER_TOKEN = 46_080  # of the demo model: 2 x 30 layers x 3 heads x 64 x 4 bytes
HOST_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ServerShape:
    """KV memory in tokens of float32, the same bytes for every server, and the longest request."""

    name: str
    kv_tokens: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * F32_KV_BYTES_PER_TOKEN

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE


WIDE = ServerShape("wide", 24_576, 8_192)
# Two of the four sessions of the workload `sessions_beyond`.
TIGHT = ServerShape("tight", 2_304, 2_048)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the others are and the model in the forms they load; None is what is not there."""

    model_folder: Path  # safetensors in float32, converted from the demo model's GGUF
    model_gguf: Path | None = None  # the demo model's file as it is, Q4_1
    f32_gguf: Path | None = None  # the same weights in float32
    vllm_python: Path | None = None
    llama_server: Path | None = None
    llama_slots: int = 4  # its own choice
    transformers_python: Path | None = None
