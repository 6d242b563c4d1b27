"""The registered prefixes as token ids: what all prompts that begin so have in common.

Owns the way from a text or from messages to ids. A tokenizer may join the end of a text with what
follows it, so the ids are those that several continuations agree on. Knows nothing of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from service.conversation import Conversation
from service.errors import InvalidRequest
from service.schemas.chat import AssistantMessage, Message, UserMessage
from service.schemas.parsing import convert
from service.sessions.branches import num_common_tokens
from service.tenants.tenant_file import SharedPrefix
from service.tokenizer import ModelTokenizer

__all__ = ["shared_token_ids"]

_CONTINUATIONS = ("A", "b7", " c", "\n\nD", "1", ".", "é")

TokenIds = NDArray[np.int32]  # 1-D


def shared_token_ids(
    tokenizer: ModelTokenizer, prefixes: Sequence[SharedPrefix]
) -> tuple[list[TokenIds], list[str]]:
    """The ids of all that can be expressed, each once, and what is wrong with the others, by its
    place. Takes as long as encoding does: for a thread."""
    found: dict[bytes, TokenIds] = {}
    problems: list[str] = []
    for index, prefix in enumerate(prefixes):
        try:
            for token_ids in _ids_of(tokenizer, prefix, f"shared.prefixes[{index}]"):
                found.setdefault(token_ids.tobytes(), token_ids)
        except InvalidRequest as error:
            problems.append(f"shared.prefixes[{index}]: {error.message.rstrip('.')}")
    return [token_ids for token_ids in found.values() if len(token_ids)], problems


def _ids_of(tokenizer: ModelTokenizer, prefix: SharedPrefix, path: str) -> Iterator[TokenIds]:
    """Of a text with and without what the tokenizer puts before it."""
    if prefix.messages is not None:
        messages = convert(prefix.messages, list[Message], f"{path}.messages")
        chats = [Conversation([*messages, _next(messages, text)]) for text in _CONTINUATIONS]
        texts = [tokenizer.chat_template.apply(chat) for chat in chats]
        yield _common_ids(tokenizer, texts, add_special_tokens=False)
        return
    assert prefix.text is not None
    texts = [prefix.text + text for text in _CONTINUATIONS]
    for add_special_tokens in (True, False):
        yield _common_ids(tokenizer, texts, add_special_tokens=add_special_tokens)


def _next(messages: Sequence[Message], text: str) -> Message:
    """Some templates want the roles to alternate."""
    if messages and isinstance(messages[-1], UserMessage):
        return AssistantMessage(content=text)
    return UserMessage(content=text)


def _common_ids(
    tokenizer: ModelTokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> TokenIds:
    first, *others = (
        tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
    )
    return first[: min(num_common_tokens(first, other) for other in others)]
