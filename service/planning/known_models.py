"""The shapes of some well-known models, so that a plan needs neither files nor a connection.

Owns the table, from the models' published configurations. Knows nothing of what is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["KNOWN_MODELS"]

_LLAMA_3: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN_3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _sized(
    base: Mapping[str, Any], layers: int, hidden: int, heads: int, inner: int, **others: Any
) -> Mapping[str, Any]:
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **others,
    }


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "demo": {  # SmolLM2-135M-Instruct
            "model_type": "llama",
            "vocab_size": 49_152,
            "max_position_embeddings": 8_192,
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1_536,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        "Llama-3.2-1B": _sized(
            _LLAMA_3, 16, 2_048, 32, 8_192, head_dim=64, tie_word_embeddings=True
        ),
        "Llama-3.2-3B": _sized(_LLAMA_3, 28, 3_072, 24, 8_192, tie_word_embeddings=True),
        "Llama-3.1-8B": _sized(_LLAMA_3, 32, 4_096, 32, 14_336),
        "Llama-3.1-70B": _sized(_LLAMA_3, 80, 8_192, 64, 28_672),
        "Llama-3.1-405B": _sized(_LLAMA_3, 126, 16_384, 128, 53_248),
        "Mistral-7B-v0.3": _sized(
            {**_LLAMA_3, "model_type": "mistral", "sliding_window": None},
            *(32, 4_096, 32, 14_336),
            vocab_size=32_768,
            max_position_embeddings=32_768,
        ),
        "Mixtral-8x7B": _sized(
            {**_LLAMA_3, "model_type": "mixtral", "sliding_window": None},
            *(32, 4_096, 32, 14_336),
            vocab_size=32_000,
            max_position_embeddings=32_768,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "Qwen3-8B": _sized(_QWEN_3, 36, 4_096, 32, 12_288),
        "Qwen3-32B": _sized(_QWEN_3, 64, 5_120, 64, 25_600),
        "Qwen3-30B-A3B": _sized(
            {**_QWEN_3, "model_type": "qwen3_moe"},
            *(48, 2_048, 32, 6_144),
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
    }
)
