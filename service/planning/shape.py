"""What a model's configuration says of its size: its shape, its weights by formula, its refusals.

Owns the formulas and which kinds of models they hold for. No weight is read and PyTorch is not
needed. A model that the server would refuse is refused here with the same reason; whether one is
served for certain, only a start says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "ModelShape", "ShapeError", "shape_of"]

# Decoders with gated feed-forward layers, whose weights the formulas below count to the last one.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "granite", "olmo2", "smollm3"),
    *("mixtral", "qwen3_moe"),
)
_DTYPES = ("float32", "bfloat16", "float16")


class ShapeError(Exception):
    """This model cannot be planned for; one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """``num_weights`` are all, ``num_dense_weights`` those that every token is multiplied with,
    ``num_head_weights`` those that every drawn token is. ``num_experts`` is per sparse layer, 0 for
    none; each token uses ``num_active_experts`` of them, of ``expert_weights`` weights each."""

    name: str
    model_type: str
    dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int | None
    num_weights: int
    num_dense_weights: int
    num_head_weights: int
    num_sparse_layers: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    expert_weights: int = 0

    @property
    def num_active_weights(self) -> int:
        """That one token is multiplied with."""
        active = self.num_sparse_layers * self.num_active_experts * self.expert_weights
        return self.num_dense_weights + active


def shape_of(name: str, config: Any, context: int, num_weights: int | None = None) -> ModelShape:
    """``config`` is transformers' configuration. ``num_weights`` goes before the formula, where
    they were counted. Raises ShapeError for a model that is not served with ``context`` tokens, and
    for one whose weights the formulas do not count."""
    for objection in (_other_state(config), _window(config, context), _length(config, context)):
        if objection is not None:
            raise ShapeError(objection)
    if config.model_type not in FAMILIES:
        raise ShapeError(
            f"the weights of a {config.model_type} model cannot be counted from its configuration; "
            f"those of {', '.join(FAMILIES)} can"
        )
    head_dim = getattr(config, "head_dim", None)
    head_dim = int(head_dim or config.hidden_size // config.num_attention_heads)
    attention = _attention_weights(config, head_dim)
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    num_sparse, num_experts, active, expert, router = _experts(config)
    feed_forward = 3 * hidden * int(config.intermediate_size)
    if getattr(config, "mlp_bias", False):
        feed_forward += 2 * int(config.intermediate_size) + hidden
    dense = layers * attention + num_sparse * router + (layers - num_sparse) * feed_forward + hidden
    embedding = int(config.vocab_size) * hidden
    ends = embedding if config.tie_word_embeddings else 2 * embedding
    counted = dense + num_sparse * num_experts * expert + ends
    return ModelShape(
        name=name,
        model_type=config.model_type,
        dtype=_dtype(config),
        num_layers=layers,
        num_heads=int(config.num_attention_heads),
        num_kv_heads=int(config.num_key_value_heads or config.num_attention_heads),
        head_dim=head_dim,
        max_model_len=_limit(config),
        num_weights=counted if num_weights is None else num_weights,
        num_dense_weights=dense,
        num_head_weights=embedding,
        num_sparse_layers=num_sparse,
        num_experts=num_experts,
        num_active_experts=active,
        expert_weights=expert,
    )


def _attention_weights(config: Any, head_dim: int) -> int:
    """Of one layer, its norms included."""
    hidden = int(config.hidden_size)
    queries = int(config.num_attention_heads) * head_dim
    keys = int(config.num_key_value_heads or config.num_attention_heads) * head_dim
    weights = 2 * hidden * queries + 2 * hidden * keys + 2 * hidden
    kind = config.model_type
    if kind == "qwen2" or getattr(config, "attention_bias", False):
        weights += queries + 2 * keys
        weights += 0 if kind == "qwen2" else hidden
    if kind in ("qwen3", "qwen3_moe"):
        weights += 2 * head_dim
    elif kind == "olmo2":
        weights += queries + keys
    return weights


def _experts(config: Any) -> tuple[int, int, int, int, int]:
    """Sparse layers, experts in each, those that a token uses, weights of one, of the router."""
    hidden = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    if config.model_type == "mixtral":
        count = int(config.num_local_experts)
        expert = 3 * hidden * int(config.intermediate_size)
        return layers, count, int(config.num_experts_per_tok), expert, hidden * count
    if config.model_type == "qwen3_moe":
        count, step = int(config.num_experts), int(config.decoder_sparse_step)
        dense = set(config.mlp_only_layers or ())
        sparse = [i for i in range(layers) if i not in dense and count and (i + 1) % step == 0]
        expert = 3 * hidden * int(config.moe_intermediate_size)
        return len(sparse), count, int(config.num_experts_per_tok), expert, hidden * count
    return 0, 0, 0, 0, 0


def _other_state(config: Any) -> str | None:
    kind = config.model_type
    if rank := getattr(config, "kv_lora_rank", None):
        width = int(rank) + int(getattr(config, "qk_rope_head_dim", 0) or 0)
        return (
            f"{kind} keeps one compressed vector of {width} numbers per token and layer in place "
            "of keys and values (MLA), and is not served"
        )
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder; only decoders are served"
    if config.get_text_config() is not config:
        return f"{kind} is multimodal; only text is served"
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        named = ", ".join(sorted(map(str, others)))
        return f"some layers of {kind} keep a state that is not keys and values per token ({named})"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{kind} uses attention soft-capping, and is not served"
    return None


def _window(config: Any, context: int) -> str | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    is_sliding = (
        "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    )
    if not window or not is_sliding or int(window) >= context:
        return None
    return (
        f"its sliding window of {window} tokens is shorter than --context {context}: it is served "
        f"with --context {window} or less"
    )


def _length(config: Any, context: int) -> str | None:
    limit = _limit(config)
    if limit is None or context <= limit:
        return None
    return f"--context {context} is over the model's limit of {limit} tokens"


def _limit(config: Any) -> int | None:
    """The model's own; yarn may have it in front of stretching."""
    value = getattr(config, "max_position_embeddings", None)
    if not isinstance(value, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return value
    original = rope.get("original_max_position_embeddings") or 0
    return max(value, int(original * (rope.get("factor") or 1.0)))


def _dtype(config: Any) -> str:
    said = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return said if said in _DTYPES else "bfloat16"
