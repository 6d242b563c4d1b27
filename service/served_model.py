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
from service.conversation import Conversation
from service.errors import ContextLengthExceeded, InvalidRequest
from service.sessions.turn import ModelView, Turn
from service.tokenizer import ModelTokenizer
from service.tools.support import ToolSupport

__all__ = ["ServedModel"]

_T = TypeVar("_T")


class ServedModel:
    """``created`` is when it was adopted, in seconds since 1970; ``tools`` is None where its calls
    cannot be read."""

    def __init__(
        self,
        card: ModelCard,
        tokenizer: ModelTokenizer,
        created: int,
        threads: Executor,
        tools: ToolSupport | None = None,
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.created = created
        self.tools = tools
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
        self, conversation: Conversation, turn: Turn | None = None, *, is_bounded: bool = True
    ) -> NDArray[np.int32]:
        """``turn`` is the session's, which knows some of the ids already.

        Raises InvalidRequest if the template cannot express it, or, where it ``is_bounded``, if it
        is too long for an answer.
        """

        def work() -> NDArray[np.int32]:
            text = self.tokenizer.chat_template.apply(conversation)
            # The template writes the special tokens that belong there.
            return self._ids_of(text, False, turn)

        token_ids = await self._in_thread(work)
        return self._fitting(token_ids, "messages") if is_bounded else token_ids

    async def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        turn: Turn | None = None,
        is_bounded: bool = True,
    ) -> NDArray[np.int32]:
        """As :meth:`encode_chat`."""

        def work() -> NDArray[np.int32]:
            return self._ids_of(text, add_special_tokens, turn)

        token_ids = await self._in_thread(work)
        return self._fitting(token_ids, "prompt") if is_bounded else token_ids

    async def tokens_before(
        self, conversation: Conversation, marks: Sequence[str], num_tokens: int
    ) -> list[int]:
        """How much of a prompt stands before each of ``marks``, which are written into its
        ``conversation`` and come to nothing of its ``num_tokens`` tokens; 0 of a mark that the
        template left out.

        To the token where the text is cut beside an added token, else to within one or two.
        """

        def work() -> list[int]:
            text = self.tokenizer.chat_template.apply(conversation)
            ends = []
            for mark in marks:
                ends.append(max(0, text.find(mark)))
                text = text.replace(mark, "")
            return [self._tokens_up_to(text, end, num_tokens) for end in ends]

        return await self._in_thread(work)

    def _tokens_up_to(self, text: str, end: int, num_tokens: int) -> int:
        """Of the ``num_tokens`` of ``text``. Encodes the shorter part."""
        if end <= len(text) - end:
            count = len(self.tokenizer.encode(text[:end], add_special_tokens=False)) if end else 0
        else:
            rest = self.tokenizer.encode(text[end:], add_special_tokens=False)
            count = num_tokens - len(rest)
        return min(max(count, 0), num_tokens)

    def check_ids(self, token_ids: Sequence[int], turn: Turn | None = None) -> NDArray[np.int32]:
        """Ids that the client tokenized itself. Raises InvalidRequest."""
        # Too many are refused before they are looked at one by one.
        self._check_length(len(token_ids), "prompt")
        self.check_in_vocabulary(token_ids, "prompt")
        ids = np.asarray(token_ids, dtype=np.int32)
        return ids if turn is None else turn.ids_of_ids(ids)

    def check_in_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest naming the first id that is not."""
        size = self.card.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"{param}: token id {token_id} is outside the vocabulary of {size}.",
                    param=param,
                )

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
