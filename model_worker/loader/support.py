"""Whether a model can be served with a prefix cache, and up to which length.

Owns the refusals: what is told from the configuration first, since that gives the plainest reason,
then what the dry run of the attention layers shows. Knows nothing of weights, devices or memory.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PretrainedConfig

from model_worker.loader.attention_layout import (
    AttentionLayout,
    causal_model_class,
    probe_attention,
)
from model_worker.loader.errors import ModelLoadError
from model_worker.loader.rope import check_rope, rope_parameters

_LENGTH_ATTRIBUTES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
_STATE_ATTRIBUTES = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_d_conv",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "lru_width",
    "attention_hidden_size",
    "time_step_rank",
)
_SOFTCAP_ATTRIBUTES = ("attn_logit_softcapping", "attention_logit_softcapping")
_MODALITIES = ("vision", "audio", "image", "video", "speech", "mm", "perceiver")
_PER_TOKEN_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def model_limit(config: PretrainedConfig) -> int | None:
    """Tokens of context that the model itself allows, or None if its configuration names none."""
    for attribute in _LENGTH_ATTRIBUTES:
        value = getattr(config, attribute, None)
        if isinstance(value, int) and value > 0:
            return max(value, _yarn_length(config))
    return None


def resolve_max_model_len(config: PretrainedConfig, requested: int | None) -> int:
    """``requested``, or the model's limit if None. Raises ModelLoadError if over the limit."""
    limit = model_limit(config)
    if requested is None:
        if limit is None:
            raise ModelLoadError("The model's configuration names no length: set --max-model-len")
        return limit
    if requested < 1:
        raise ModelLoadError(f"--max-model-len must be at least 1, not {requested}")
    if limit is not None and requested > limit:
        raise ModelLoadError(
            f"--max-model-len {requested} is over the model's limit of {limit} tokens"
        )
    return requested


def check_supported(config: PretrainedConfig, max_model_len: int) -> AttentionLayout:
    """The attention layout of a model that can be served with ``max_model_len`` tokens.

    Raises ModelLoadError with one clear reason for anything else.
    """
    resolve_max_model_len(config, max_model_len)
    for objection in _OBJECTIONS:
        reason = objection(config)
        if reason is not None:
            raise ModelLoadError(f"Models of type {config.model_type} are not served: {reason}")
    check_rope(config)
    _check_windows(config, max_model_len)
    layout = probe_attention(config)
    if layout.sliding_window is not None and layout.sliding_window < max_model_len:
        raise _window_error("sliding window", layout.sliding_window, max_model_len)
    return layout


def _encoder_decoder(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "this is an encoder-decoder; only decoders are"
    return None


def _multimodal(config: PretrainedConfig) -> str | None:
    names = [
        name
        for name in config.to_dict()
        if name.endswith("_config") and name.startswith(_MODALITIES)
    ]
    if names or config.get_text_config() is not config:
        return "this is a multimodal model; only text is"
    return None


def _hybrid(config: PretrainedConfig) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _PER_TOKEN_LAYERS
    if kinds:
        named = ", ".join(sorted(str(kind) for kind in kinds))
        return f"some layers keep a state that is not keys and values per token ({named})"
    if any(getattr(config, name, None) for name in _STATE_ATTRIBUTES):
        return "it is a state-space or hybrid model, whose state is not keys and values per token"
    if getattr(config, "num_kv_shared_layers", None):
        return "some layers share the keys and values of others"
    return None


def _not_causal(config: PretrainedConfig) -> str | None:
    model_class = causal_model_class(config)
    if model_class is None:
        return "this is not a causal language model; an encoder attends to later tokens too"
    declared = list(getattr(config, "architectures", None) or ())
    if declared and model_class.__name__ not in declared:
        return f"{declared[0]} is not a causal language model ({model_class.__name__} would be)"
    if getattr(config, "is_causal", True) is False or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "it attends to later tokens (it is bidirectional)"
    return None


def _quantized(config: PretrainedConfig) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return f"its weights are quantized with {method or 'an unknown method'}; give the plain ones"


def _altered_attention(config: PretrainedConfig) -> str | None:
    if any(getattr(config, name, None) for name in _SOFTCAP_ATTRIBUTES):
        return "it uses attention soft-capping, which paged attention does not honour"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) in {
        "alibi",
        "relative_key",
        "relative_key_query",
    }:
        return "it uses a position bias (such as ALiBi), which paged attention does not honour"
    return None


_OBJECTIONS: tuple[Callable[[PretrainedConfig], str | None], ...] = (
    _encoder_decoder,
    _multimodal,
    _hybrid,
    _not_causal,
    _quantized,
    _altered_attention,
)


def _check_windows(config: PretrainedConfig, max_model_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind, attribute, name in (
        ("sliding_attention", "sliding_window", "sliding window"),
        ("chunked_attention", "attention_chunk_size", "attention chunk"),
    ):
        size = getattr(config, attribute, None)
        if kind in kinds and isinstance(size, int) and size < max_model_len:
            raise _window_error(name, size, max_model_len)


def _window_error(name: str, size: int, max_model_len: int) -> ModelLoadError:
    return ModelLoadError(
        f"The model's {name} of {size} tokens is shorter than --max-model-len {max_model_len}: "
        f"it is served with --max-model-len {size} or less"
    )


def _yarn_length(config: PretrainedConfig) -> int:
    """Configurations stretched by yarn may keep the length from before in their plain field."""
    parameters = rope_parameters(config)
    if parameters.get("rope_type") != "yarn":
        return 0
    original = parameters.get("original_max_position_embeddings") or 0
    return int(original * (parameters.get("factor") or 1.0))
