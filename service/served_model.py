"""The model that is served: the card adopted from the workers, its tokenizer, its names.

Owns the preparation of a prompt in a thread: template, tokenizing, the check against the context.
Knows nothing of workers' links or of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from model_worker.protocol import ModelCard
from service.errors import ContextLengthExceeded, InvalidRequest
from service.schemas.chat import Message
from service.sessions.turn import ModelView, Turn
from service.tokenizer import ModelTokenizer

__all__ = ["ServedModel"]

_T = TypeVar("_T")


class ServedModel:
    """``created`` is when it was adopted, in seconds since 1970."""

    def __init__(
        self, card: ModelCard, tokenizer: ModelTokenizer, created: int, threads: Executor
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.created = created
        self._threads = threads

    @property
    def names(self) -> tuple[str, ...]:
        return self.card.served_model_names or (self.card.model,)

    @property
    def system_fingerprint(self) -> str:
        return f"fp_{self.card.fingerprint[:12]}"

    @property
    def view(self) -> ModelView:
        return ModelView(self.card.fingerprint, self.card.block_size, self.tokenizer)

    async def encode_chat(
        self, messages: Sequence[Message], turn: Turn | None = None
    ) -> NDArray[np.int32]:
        """``turn`` is the session's, which knows some of the ids already.

        Raises InvalidRequest if the template cannot express it, or if it is too long.
        """

        def work() -> NDArray[np.int32]:
            text = self.tokenizer.chat_template.apply(messages)
            # The template writes the special tokens that belong there.
            return self._ids_of(text, False, turn)

        return self._fitting(await self._in_thread(work), "messages")

    async def encode_text(
        self, text: str, *, add_special_tokens: bool, turn: Turn | None = None
    ) -> NDArray[np.int32]:
        def work() -> NDArray[np.int32]:
            return self._ids_of(text, add_special_tokens, turn)

        return self._fitting(await self._in_thread(work), "prompt")

    def check_ids(self, token_ids: Sequence[int], turn: Turn | None = None) -> NDArray[np.int32]:
        """Ids that the client tokenized itself. Raises InvalidRequest."""
        # Too many are refused before they are looked at one by one.
        self._check_length(len(token_ids), "prompt")
        size = self.card.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"prompt: token id {token_id} is outside the vocabulary of {size}.",
                    param="prompt",
                )
        ids = np.asarray(token_ids, dtype=np.int32)
        return ids if turn is None else turn.ids_of_ids(ids)

    def max_tokens(self, requested: int | None, num_prompt_tokens: int) -> int:
        """As requested, but never past the end of the context; None asks for all the rest."""
        rest = self.card.max_model_len - num_prompt_tokens
        return rest if requested is None else min(requested, rest)

    def _ids_of(self, text: str, add_special_tokens: bool, turn: Turn | None) -> NDArray[np.int32]:
        if turn is not None:
            return turn.ids_of_text(text, add_special_tokens=add_special_tokens)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _fitting(self, token_ids: NDArray[np.int32], param: str) -> NDArray[np.int32]:
        self._check_length(len(token_ids), param)
        return token_ids

    def _check_length(self, size: int, param: str) -> None:
        limit = self.card.max_model_len
        if size == 0:
            raise InvalidRequest(f"{param}: gives no token at all.", param=param)
        if size > limit - 1:
            raise ContextLengthExceeded(
                f"The prompt has {size} tokens; this model's context is {limit} tokens, of which "
                "at least 1 is left to the answer.",
                param=param,
            )
