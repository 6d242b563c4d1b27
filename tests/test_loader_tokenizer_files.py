"""The files a gateway gets suffice to tokenize as the model's own folder does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PretrainedConfig

from model_worker.loader import ModelLoadError
from model_worker.loader.tokenizer_files import find_eos_token_ids, read_tokenizer_files
from model_worker.protocol import TokenizerFile
from tests.models import TURN_END_TOKEN_ID, VOCAB_SIZE, build_tokenizer, save_model, save_tokenizer

TEXT = "hello 12  worlds\n\n3 — naïve 😀 日本語 \x00\x7f<|im_end|>"
MESSAGES = [{"role": "system", "content": "the"}, {"role": "user", "content": TEXT}]

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
text, messages = json.load(sys.stdin)
chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print(json.dumps([tokenizer.encode(text), chat]))
"""


def write(files: Sequence[TokenizerFile], folder: Path) -> Path:
    folder.mkdir()
    for file in files:
        (folder / file.name).write_bytes(file.content)
    return folder


def test_files_and_their_digests(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")

    files = read_tokenizer_files(folder)

    assert [file.name for file in files] == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for file in files:
        assert file.content == (folder / file.name).read_bytes()
        assert file.sha256 == hashlib.sha256(file.content).hexdigest()


def test_they_suffice_without_torch(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    copy = write(read_tokenizer_files(folder), tmp_path / "copy")

    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(copy)],
        input=json.dumps([TEXT, MESSAGES]),
        capture_output=True,
        text=True,
        check=True,
    )

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids, chat = json.loads(result.stdout)
    assert ids == tokenizer.encode(TEXT)
    assert ids[0] == 0
    assert (
        chat
        == "<s>"
        + "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in MESSAGES
        )
        + "<|im_start|>assistant\n"
    )


def test_tiny_tokenizer_decodes_every_id_and_every_text() -> None:
    tokenizer = build_tokenizer()
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), 0x1F600, 0x10FFFF]))

    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(tokenizer.id_to_token(token_id) for token_id in range(VOCAB_SIZE))
    ids = tokenizer.encode(everything, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == everything


def test_older_formats_are_converted(tmp_path: Path) -> None:
    model = json.loads(build_tokenizer().to_str())["model"]
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))

    copy = write(read_tokenizer_files(folder), tmp_path / "copy")

    assert (copy / "tokenizer.json").is_file()
    ids = AutoTokenizer.from_pretrained(str(copy)).encode("the world 12", add_special_tokens=False)
    assert ids == build_tokenizer().encode("the world 12", add_special_tokens=False).ids


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    with pytest.raises(ModelLoadError, match="tokenizer"):
        read_tokenizer_files(tmp_path)


def test_ends_are_gathered_from_every_place(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    files = read_tokenizer_files(tmp_path)

    assert find_eos_token_ids(PretrainedConfig(eos_token_id=5), files) == (
        TURN_END_TOKEN_ID,
        5,
        7,
        9,
    )
    assert find_eos_token_ids(PretrainedConfig(eos_token_id=[5, 7]), files[:0]) == (5, 7)


def test_an_end_written_as_an_object(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    fields = {"eos_token": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))

    assert find_eos_token_ids(PretrainedConfig(), read_tokenizer_files(tmp_path)) == (
        TURN_END_TOKEN_ID,
    )


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    files = read_tokenizer_files(tmp_path)

    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not JSON"):
        find_eos_token_ids(PretrainedConfig(), files)
