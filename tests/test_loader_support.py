"""Which models are refused, with which reason, and up to which length the others are served."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from model_worker.loader import ModelLoadError, check_supported, model_limit, resolve_max_model_len
from tests.models import FAMILIES

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
# name -> (heads, kv heads, head size, layers)
LAYOUTS = {
    "llama": (4, 2, 16, 3),
    "llama-mha": (4, 4, 16, 2),
    "llama-mqa": (4, 1, 16, 2),
    "qwen3": (4, 2, 32, 3),
    "phi3": (4, 4, 16, 2),
    "gemma": (4, 1, 32, 2),
    "olmo2": (4, 4, 16, 3),
    "gpt-neox": (4, 4, 16, 3),
}


def refusal(config: PretrainedConfig, max_model_len: int = 16) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_supported(config, max_model_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config_of(name: str, **fields: Any) -> PretrainedConfig:
    built: PretrainedConfig = getattr(transformers, name)(**fields)
    return built


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_supported(name: str) -> None:
    layout = check_supported(FAMILIES[name].config(), FAMILIES[name].max_model_len)

    shape = (layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.num_layers)
    assert shape == LAYOUTS.get(name, shape)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (("T5Config", {}), "encoder-decoder"),
        (("WhisperConfig", {}), "encoder-decoder"),
        (("BertConfig", {}), "bidirectional"),
        (("BertConfig", {"architectures": ["BertForMaskedLM"]}), "BertForMaskedLM is not a causal"),
        (("ModernBertConfig", {}), "an encoder attends to later tokens"),
        (("LlamaConfig", {**SMALL, "architectures": ["LlamaModel"]}), "LlamaModel is not a causal"),
        (("LlamaConfig", {**SMALL, "is_causal": False}), "bidirectional"),
        (("MambaConfig", {}), "keys and values per token"),
        (("Mamba2Config", {}), "keys and values per token"),
        (("JambaConfig", {}), "keys and values per token"),
        (("FalconH1Config", {}), "keys and values per token"),
        (("Qwen3NextConfig", {}), "linear_attention"),
        (("Lfm2Config", {}), "keys and values per token"),
        (("RwkvConfig", {}), "keys and values per token"),
        (("RecurrentGemmaConfig", {}), "keys and values per token"),
        (("LlavaConfig", {}), "multimodal"),
        (("Qwen2VLConfig", {}), "multimodal"),
        (("Gemma3Config", {}), "multimodal"),
        (("Llama4Config", {}), "multimodal"),
        (("BloomConfig", {}), "attention interface"),
        (("MptConfig", {}), "attention interface"),
        (("FalconConfig", {"alibi": True}), "position bias"),
        (("Gemma2Config", {**SMALL}), "soft-capping"),
        (("GptOssConfig", {**SMALL, "num_local_experts": 4}), "attention sinks"),
        (("DeepseekV3Config", {"num_hidden_layers": 1}), "keys and values differ in shape"),
        (("DiffLlamaConfig", {**SMALL}), "call attention 8 times"),
        (
            ("LlamaConfig", {**SMALL, "quantization_config": {"quant_method": "gptq"}}),
            "quantized with gptq",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_refused_with_the_reason(config: tuple[str, dict[str, Any]], reason: str) -> None:
    name, fields = config
    assert reason in refusal(config_of(name, **fields))


@pytest.mark.parametrize("name", ["MixtralConfig", "OlmoeConfig", "GPT2Config"])
def test_other_decoders_pass_the_dry_run(name: str) -> None:
    fields = {**SMALL, "num_local_experts": 4} if name == "MixtralConfig" else {**SMALL}
    if name == "GPT2Config":
        fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}

    assert check_supported(config_of(name, **fields), 16).head_dim == 16


def test_soft_capping_is_seen_by_the_dry_run_whatever_the_field_is_called() -> None:
    config = Gemma2Config(**SMALL, attn_logit_softcapping=None)
    assert check_supported(config, 16).num_layers == 4

    config.attn_logit_softcapping = 50.0
    assert "soft-capping" in refusal(config)


def test_mistral_is_served_while_its_window_is_not_shorter() -> None:
    config = MistralConfig(**SMALL, sliding_window=128)

    assert check_supported(config, 128).sliding_window == 128
    assert "sliding window of 128 tokens is shorter than --max-model-len 129" in refusal(
        config, 129
    )


def test_window_of_some_layers_counts_only_if_it_is_used() -> None:
    fields = {**SMALL, "sliding_window": 100, "max_window_layers": 1}

    assert check_supported(Qwen2Config(**fields, use_sliding_window=False), 4096).num_layers == 4
    assert "sliding window of 100 tokens" in refusal(
        Qwen2Config(**fields, use_sliding_window=True), 101
    )


def test_chunked_attention_shorter_than_the_context_is_refused() -> None:
    config = config_of("Llama4TextConfig", **SMALL, num_local_experts=4, attention_chunk_size=64)

    assert "attention chunk of 64 tokens" in refusal(config, 65)


def test_dynamic_rope_is_refused() -> None:
    config = LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    assert "'dynamic' is not served" in refusal(config)


def test_length_over_the_limit_names_both() -> None:
    config = LlamaConfig(**SMALL, max_position_embeddings=256)

    message = refusal(config, 257)

    assert message == "--max-model-len 257 is over the model's limit of 256 tokens"


def test_length_defaults_to_the_limit() -> None:
    assert resolve_max_model_len(LlamaConfig(max_position_embeddings=256), None) == 256
    assert resolve_max_model_len(LlamaConfig(max_position_embeddings=256), 200) == 200


@pytest.mark.parametrize("length", [0, -1])
def test_length_must_be_positive(length: int) -> None:
    with pytest.raises(ModelLoadError, match="at least 1"):
        resolve_max_model_len(LlamaConfig(), length)


def test_limit_of_a_yarn_model_that_keeps_its_length_from_before() -> None:
    config = Qwen2Config(
        **SMALL,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 10000.0,
        },
    )
    assert model_limit(config) == 1024


def test_the_dry_run_leaves_no_attention_function_behind() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = set(ALL_ATTENTION_FUNCTIONS)
    check_supported(FAMILIES["llama"].config(), 16)
    refusal(Gemma2Config(**SMALL))

    assert set(ALL_ATTENTION_FUNCTIONS) == before
