"""Models of real shapes with random weights, built where they run: no file, no hub.

Owns the shapes, written down from the models' published configurations, and what the arithmetic of
a roofline needs of them. Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache_store.block import KVCacheSpec
from model_worker.loader import LoadedModel
from model_worker.loader.load import ATTENTION_IMPLEMENTATION
from model_worker.loader.rope import pin_rope
from model_worker.loader.support import check_supported

MAX_POSITIONS = 131072


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.2-1b": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "rope_parameters": _llama3_rope(32.0),
        },
        "llama-3.1-8b": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
            "rope_parameters": _llama3_rope(8.0),
        },
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
            "tie_word_embeddings": False,
            "rope_parameters": _llama3_rope(8.0),
        },
    }
)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """``decode_weight_bytes``: all that a decode step reads of the weights; the table of embeddings
    is read by row, unless it is the head as well. ``linear_weights``: numbers in the linear layers
    that a prefill multiplies each token by; the head, which sees one row, is not among them."""

    decode_weight_bytes: int
    linear_weights: int
    kv_bytes_per_token: int
    attention_width: int  # layers x heads x head_dim

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes that a step of ``batch`` sequences of ``context`` tokens has to read."""
        return self.decode_weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_operations(self, num_tokens: int) -> int:
        """Multiplications and additions of a prompt from its first token: linear layers, and
        causal attention, which is half of the square."""
        return 2 * self.linear_weights * num_tokens + 2 * self.attention_width * num_tokens**2


def model_cost(loaded: LoadedModel) -> ModelCost:
    model, layout = loaded.model, loaded.layout
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())  # what is tied counts once
    linear = total - head.numel() - (0 if head is embedding else embedding.numel())
    return ModelCost(
        decode_weight_bytes=(linear + head.numel()) * loaded.dtype.itemsize,
        linear_weights=linear,
        kv_bytes_per_token=loaded.kv_spec.bytes_per_token,
        attention_width=layout.num_layers * layout.num_heads * layout.head_dim,
    )


def random_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    block_size: int,
    kv_cache_dtype: str,
    seed: int,
) -> LoadedModel:
    """A model of SHAPES with weights drawn on ``device``; nothing of it is a real answer."""
    config = LlamaConfig(
        **SHAPES[name],
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    layout = check_supported(config, max_model_len)
    torch.manual_seed(seed)
    config._attn_implementation = ATTENTION_IMPLEMENTATION
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.requires_grad_(False).eval()
    pin_rope(model, max_model_len)
    stored = torch.int8 if kv_cache_dtype == "int8" else dtype
    return LoadedModel(
        model=model,
        config=config,
        layout=layout,
        kv_spec=KVCacheSpec(
            block_size=block_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=str(stored).removeprefix("torch."),
            bytes_per_element=stored.itemsize,
        ),
        fingerprint=f"random:{name}:{seed}",
        tokenizer_files=(),
        eos_token_ids=(1,),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )
