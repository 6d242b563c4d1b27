"""The tokenizer inside a GGUF file, with the splitting rules that the file only names.

Owns the pre-tokenizers (how text is cut before merges) that transformers does not restore from
``tokenizer.ggml.pre``: with the wrong one the model sees ids it was not trained on, and answers
worse without any error. Refuses a file that names a rule unknown here.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.gguf_metadata import GGUFMetadata

# Digits one by one, then GPT-2's rule.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_GPT2_RULE = frozenset({"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"})
# Vocabularies in which a word that is itself a token is not built from merges.
_WHOLE_WORDS_FIRST = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"}
)


def convert_tokenizer(file: Path, metadata: GGUFMetadata) -> PreTrainedTokenizerFast:
    """The file's tokenizer with its own splitting rule. Raises ModelLoadError."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True
        )
    except Exception as error:  # whatever the conversion raises, the tokenizer is unusable
        raise ModelLoadError(f"Cannot read the tokenizer of {file}: {first_line(error)}") from error
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        _restore_splitting(tokenizer.backend_tokenizer, str(metadata.get("tokenizer.ggml.pre")))
    length = metadata.get_own("context_length")
    if length:
        tokenizer.model_max_length = int(length)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files into ``folder``, without traces of where it was read."""
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only", "name_or_path"):
        fields.pop(name, None)
    file.write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def _restore_splitting(tokenizer: Tokenizer, rule: str) -> None:
    if rule in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif rule not in _GPT2_RULE and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        # Rules that transformers knows have become a Sequence; this one fell through to GPT-2's.
        raise ModelLoadError(
            f"The GGUF file's tokenizer splits text by the rule {rule!r}, which is not known; "
            "give --model the safetensors form of this model"
        )
    if rule in _WHOLE_WORDS_FIRST and isinstance(tokenizer.model, models.BPE):
        tokenizer.model.ignore_merges = True
