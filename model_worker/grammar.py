"""Grammars that bound an answer: compiled for a model's tokenizer, and followed token by token.

Owns the one tokenizer that the library needs, made from the files that the model's card carries,
and the state of each answer. Knows nothing of logits, of requests or of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from model_worker.grammar_source import grammar_limits, grammar_source, one_line
from model_worker.sampling_params import Grammar

MaskWords = NDArray[np.uint32]
"""(vocab / 32, rounded up): token i is allowed where bit i % 32 of word i // 32 is set."""


class GrammarError(Exception):
    """Says in one line what is wrong with a grammar, for its author."""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def no_grammars(grammar: Grammar) -> TokenMatcher:
    """In place of a compiler, where there is no tokenizer to compile for."""
    raise GrammarError("this worker follows none")


class TokenMatcher:
    """What may come next in one answer. Follows the tokens that became part of it, and no others:
    those that are tried on the way are taken back."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and nothing can follow it but its end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Why nothing further can be said of this answer: its grammar costs more than it may."""
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def copy(self) -> TokenMatcher:
        """Another answer, which begins where this one stands."""
        return TokenMatcher(self._matcher.deep_copy())

    def advance(self, token_id: int) -> None:
        """``token_id`` has become part of the answer."""
        self._matcher.consume_token(token_id)

    def fill(self, masks: NDArray[np.uint32], drafts: Sequence[int]) -> None:
        """What may come next, and then what after each of ``drafts``, into ``masks`` (1 + drafts,
        words). Rows behind a draft that is not allowed stay as they are."""
        num_tried = 0
        self._fill(masks[0])
        for row, draft in enumerate(drafts, 1):
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([draft]):
                break
            num_tried += 1
            self._fill(masks[row])
        if num_tried:
            self._matcher.rollback(num_tried)

    def _fill(self, mask: MaskWords) -> None:
        assert mask.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class GrammarCompiler:
    """Compiles for one tokenizer, ``tokenizer_json`` being what a tokenizer.json holds.

    ``vocab_size`` is the model's, which may have ids that no text has: these are never allowed.
    """

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> TokenMatcher:
        """At the beginning of an answer; to be copied for each. From one thread at a time, and the
        first call reads the tokenizer, which takes a second. Raises GrammarError."""
        try:
            source = grammar_source(grammar)
        except ValueError as error:
            raise GrammarError(one_line(str(error))) from error
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=grammar_limits())
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return TokenMatcher(matcher)

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(
                self._tokenizer_json.decode(),
                n_vocab=self._vocab_size,
                eos_token=self._eos_token_ids,
            )
        except ValueError as error:
            raise GrammarError(
                f"this model's tokenizer cannot follow a grammar: {one_line(str(error))}"
            ) from error
