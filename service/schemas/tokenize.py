"""The bodies of /tokenize and /detokenize, as vLLM has them; llama.cpp's names are taken too.

Owns their fields and what may stand together. Knows nothing of tokenizers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from service.errors import InvalidRequest
from service.request_fields import Endpoint, keep_acting
from service.schemas.chat import ChatRequest, chat_request
from service.schemas.parsing import convert, parse_object

__all__ = [
    "CHAT_FIELDS",
    "Detokenize",
    "Detokenized",
    "Tokenize",
    "Tokenized",
    "parse_detokenize",
    "parse_tokenize",
]

CHAT_FIELDS = frozenset(
    {
        *("messages", "tools", "tool_choice", "add_generation_prompt"),
        *("continue_final_message", "chat_template_kwargs"),
    }
)


class Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a text (``prompt`` or ``content``), or, with ``messages``, of a conversation."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool = False
    with_pieces: bool = False

    @property
    def text(self) -> str | None:
        return self.prompt if self.prompt is not None else self.content

    @property
    def adds_special_tokens(self) -> bool:
        """True unless told otherwise, by either name."""
        given = self.add_special_tokens
        given = self.add_special if given is None else given
        return given is not False

    @property
    def has_pieces(self) -> bool:
        return self.return_token_strs or self.with_pieces


class Tokenized(msgspec.Struct, frozen=True):
    """``token_strs`` has a text for each id, a part of a character as ``\\xf0``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """``prompt`` and ``content`` are the same text, by the names of vLLM and of llama.cpp."""

    prompt: str
    content: str


def parse_tokenize(body: bytes, model: str) -> tuple[Tokenize, ChatRequest | None]:
    """The body, and the conversation where it has one; ``model`` is the one to take where none is
    named. Raises InvalidRequest naming the field at fault."""
    fields = {name: value for name, value in parse_object(body).items() if value is not None}
    chat_fields = {name: fields.pop(name) for name in CHAT_FIELDS & fields.keys()}
    given = convert(fields, Tokenize)
    if (given.text is None) == ("messages" not in chat_fields):
        raise InvalidRequest("prompt: give either prompt or messages.", param="prompt")
    if not chat_fields:
        return given, None
    if given.text is not None:
        name = sorted(chat_fields)[0]
        raise InvalidRequest(f"{name}: only together with messages.", param=name)
    asked = {"model": given.model or model, **chat_fields}
    return given, chat_request(keep_acting(asked, Endpoint.CHAT))


def parse_detokenize(body: bytes) -> Detokenize:
    """Raises InvalidRequest naming the field at fault."""
    fields: dict[str, Any] = parse_object(body)
    return convert({name: value for name, value in fields.items() if value is not None}, Detokenize)
