"""The tokenizer adopted from a card: same ids as transformers', off the interpreter's lock."""

from __future__ import annotations

import hashlib
import threading
import time

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from model_worker.protocol import TokenizerFile
from service.tokenizer import ModelTokenizer, TokenizerError
from tests import models
from tests.gateway_kit import make_card, make_tokenizer, tokenizer_files

TEXT = "Naïve 猫 🦊 <|im_start|>user\nhello you</s>"


def test_ids_are_those_of_transformers(tmp_path: object) -> None:
    reference = AutoTokenizer.from_pretrained(models.save_tokenizer(str(tmp_path)))
    for add_special_tokens in (True, False):
        ids = make_tokenizer().encode(TEXT, add_special_tokens=add_special_tokens)
        assert ids.dtype == np.int32
        assert ids.tolist() == reference.encode(TEXT, add_special_tokens=add_special_tokens)


def test_decoding_leaves_out_special_tokens_and_ids_that_are_no_token() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("hello 猫", add_special_tokens=True).tolist()
    assert tokenizer.decode([*ids, models.EOS_TOKEN_ID, 10_000]) == "hello 猫"


def test_encoding_a_long_text_leaves_the_interpreter_to_others() -> None:
    tokenizer = make_tokenizer()
    text = "Shelf i holds i*7 jars of plum jam. " * 8000
    longest = 0.0
    is_done = threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    tokenizer.encode(text, add_special_tokens=False)
    took = time.perf_counter() - start
    is_done.set()
    watcher.join()
    assert longest < max(0.1, took / 2)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "no tokenizer.json"),
        ([TokenizerFile(name="../x", content=b"", sha256="")], "not a plain name"),
        ([TokenizerFile(name="tokenizer.json", content=b"{}", sha256="0")], "digest"),
    ],
)
def test_files_that_are_refused(files: list[TokenizerFile], reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        ModelTokenizer.from_card(msgspec.structs.replace(make_card(), tokenizer_files=files))


def test_a_broken_file_is_one_line() -> None:
    content = b'{"version": "broken"}'
    file = TokenizerFile(
        name="tokenizer.json", content=content, sha256=hashlib.sha256(content).hexdigest()
    )
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        ModelTokenizer.from_card(msgspec.structs.replace(make_card(), tokenizer_files=(file,)))


def test_tokenizer_json_alone_is_enough() -> None:
    files = [file for file in tokenizer_files(None) if file.name == "tokenizer.json"]
    card = msgspec.structs.replace(make_card(), tokenizer_files=tuple(files))
    assert ModelTokenizer.from_card(card).decode([300]) == make_tokenizer().decode([300])
