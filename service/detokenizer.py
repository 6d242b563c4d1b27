"""Token ids of one answer in, text out, as soon as it is certain.

Owns the few tokens whose text may still change. Never gives out half a character: a token that
ends inside one is held until the rest arrives. Knows nothing of stop strings or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]

_UNFINISHED = "\ufffd"
# A character has at most four bytes, so a tail that stays unfinished for longer is not text.
_MAX_PENDING = 8
# Any four tokens hold the whole of a character that is still unfinished (at most three bytes).
_TAIL = 4
_MAX_CONTEXT = 16


class Detokenizer:
    """Incremental decoding in time linear in the number of tokens.

    ``decode`` turns token ids into text and leaves out special tokens. It is always asked for a
    short window: the tokens of the last piece given out (context, since a decoder may treat the
    start of a text differently) and those after it. ``context_ids`` are the last tokens of the
    prompt where the answer continues its text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._window = list(context_ids)
        self._num_context = len(self._window)
        self._num_sent = 0  # characters of the window's text already given out
        if self._window:
            text = decode(self._window)
            if text.endswith(_UNFINISHED):  # the prompt ends inside a character
                self._window, self._num_context = [], 0
            else:
                self._num_sent = len(text)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty, never half a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_UNFINISHED):
            return self._give_out(text)
        if len(self._window) - self._num_context <= _MAX_PENDING:
            return ""
        return self._give_out_all_but_last(text)

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD if the answer ends inside a character."""
        rest = self._decode(self._window)[self._num_sent :]
        self._window, self._num_context, self._num_sent = [], 0, 0
        return rest

    def _give_out(self, text: str) -> str:
        piece = text[self._num_sent :]
        if piece or len(self._window) > _MAX_CONTEXT:
            del self._window[: self._num_context]
            self._num_sent = len(self._decode(self._window))
        else:
            self._num_sent = len(text)  # a special token: the text before it stays the context
        self._num_context = len(self._window)
        return piece

    def _give_out_all_but_last(self, text: str) -> str:
        """Bytes that are no text: all but the last U+FFFD, which may still become a character.

        A leading byte starts a character whatever stands before it, so the window's last
        character is the same when its tokens are decoded without the earlier ones.
        """
        piece = text[self._num_sent : -1]
        del self._window[:-_TAIL]
        self._num_context = 0
        self._num_sent = len(self._decode(self._window)) - 1
        return piece
