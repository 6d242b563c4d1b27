"""The model's tokenizer and chat template, adopted from the files in a worker's model card.

Owns loading, encoding and decoding. Encoding releases the interpreter's lock, so that it can run
in a thread beside the event loop. Knows nothing of requests, and needs no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import ModelCard, TokenizerFile
from service.chat_template import ChatTemplate
from service.conversation import Conversation, Ending
from service.sessions.splicer import AddedToken, Splicer
from service.vocabulary import Vocabulary

__all__ = ["ModelTokenizer", "TokenizerError", "do_without_torch", "preload"]

_log = logging.getLogger("headstart.gateway")


class TokenizerError(Exception):
    """The card's files make no usable tokenizer; the message is one line."""


def do_without_torch() -> None:
    """Keep transformers from importing torch where a worker's is installed: no tokenizer needs it,
    and it takes longer than all else that a gateway loads, and twice the memory.

    For a process that is a gateway and nothing else, before transformers is imported.
    """
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # the import system's word for what is not to be found
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is none


def preload() -> None:
    """Import what loading needs (seconds), so that it is there when a card arrives."""
    import transformers

    _ = transformers.AutoTokenizer


class ModelTokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        self.chat_template = ChatTemplate(self._render, source)
        self.splicer = Splicer(self._encode_texts, _added_tokens(self._backend), source or "")
        if not self.splicer.is_on:
            _log.warning("sessions re-encode every turn: %s", self.splicer.problem)
        self.vocabulary = Vocabulary(self._backend)
        self.first_ids = self._ids_before()

    @classmethod
    def from_card(cls, card: ModelCard) -> ModelTokenizer:
        """Raises TokenizerError. Reads nothing but the card's files, and runs no code of theirs."""
        with tempfile.TemporaryDirectory(prefix="headstart-tokenizer-") as name:
            folder = Path(name)
            for file in card.tokenizer_files:
                _write(folder, file)
            loaded = cls(_load(folder))
        loaded.chat_template.warm_up()
        return loaded

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Token ids as a 1-D int32 array. Releases the interpreter's lock while it works."""
        # Only the batch calls release the lock, and this one keeps no offsets.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.asarray(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; ids that are no token give nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_exactly(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens as they are written."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    @property
    def special_ids(self) -> dict[str, int]:
        """The tokens that :meth:`decode` leaves out, by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def decode_keeping(self, kept: Collection[int]) -> Callable[[Sequence[int]], str]:
        """As :meth:`decode`, but with the special tokens ``kept`` as they are written."""
        if not kept:
            return self.decode
        left_out = frozenset(self.special_ids.values()) - frozenset(kept)

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode_exactly([item for item in token_ids if item not in left_out])

        return decode

    def _ids_before(self) -> tuple[int, ...] | None:
        """What add_special_tokens puts before a text; None if it also puts something after it."""
        bare = self._backend.encode("x", add_special_tokens=False).ids
        whole = self._backend.encode("x", add_special_tokens=True).ids
        num_added = len(whole) - len(bare)
        return tuple(whole[:num_added]) if whole[num_added:] == bare else None

    def _encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _render(self, messages: list[dict[str, Any]], conversation: Conversation) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in conversation.tools] or None,
            tokenize=False,
            add_generation_prompt=conversation.ending is Ending.NEW_TURN,
            continue_final_message=conversation.ending is Ending.CONTINUED,
            **conversation.variables,
        )
        return text


def _added_tokens(backend: Any) -> list[AddedToken]:
    is_normalizing = backend.normalizer is not None
    return [
        AddedToken(
            token_id,
            token.content,
            is_raw=not (token.normalized and is_normalizing),
            takes_left=token.lstrip,
            takes_right=token.rstrip,
            is_whole_word=token.single_word,
        )
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
    ]


def _write(folder: Path, file: TokenizerFile) -> None:
    if Path(file.name).name != file.name or file.name.startswith("."):
        raise TokenizerError(f"tokenizer file name {file.name!r} is not a plain name")
    if hashlib.sha256(file.content).hexdigest() != file.sha256:
        raise TokenizerError(f"tokenizer file {file.name} does not match its digest")
    (folder / file.name).write_bytes(file.content)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        raise TokenizerError("the worker sent no tokenizer.json")
    try:
        if (folder / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        else:
            fast: Any = PreTrainedTokenizerFast
            tokenizer = fast(tokenizer_file=str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises anything, from KeyError to OSError
        raise TokenizerError(
            f"the tokenizer's files cannot be loaded ({type(error).__name__})"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError("only fast tokenizers (tokenizer.json) are supported")
    return tokenizer
