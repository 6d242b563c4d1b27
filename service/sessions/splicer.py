"""Where the text of a prompt may be cut so that its pieces, encoded apart, give the same ids.

Owns the knowledge of one tokenizer's added tokens: which of them are safe to cut at, before or
after, proved on samples when the tokenizer is loaded. Knows nothing of histories or sessions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AddedToken", "Boundary", "Splicer"]

EncodeBatch = Callable[[Sequence[str]], Sequence[NDArray[np.int32]]]

_MAX_TOKENS = 128  # a vocabulary may reserve thousands that no template ever writes
# What may stand to the left and to the right of a cut: spaces, line ends, digits, contractions,
# several scripts, and nothing at all.
_SIDES = (
    *(("", ""), ("hello", "world"), ("hello ", " world"), ("", " x"), ("x ", ""), ("1", "2")),
    *(("a\n", "\nb"), ("\n\n", "\n\n"), ("é", "猫"), ("  ", "  "), ("don", "'t"), (".", ".")),
    *(("<", ">"), ("user\n", "assistant\n"), ("the end", "The start."), ("🦊", "🚀 끝")),
)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One of the tokens that a tokenizer finds in a text before anything else."""

    token_id: int
    text: str
    is_raw: bool = True  # looked for in the text as it is, not in its normalized form
    takes_left: bool = False  # swallows white space before it
    takes_right: bool = False
    is_whole_word: bool = False  # found only between other characters than letters


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place in a text, in characters, and the same place in its ids."""

    num_chars: int
    num_tokens: int


class Splicer:
    """``encode`` gives the ids of several texts, without anything added around them.

    ``preferred`` is text that names the tokens of most use, such as a chat template.
    """

    def __init__(
        self, encode: EncodeBatch, added_tokens: Sequence[AddedToken], preferred: str = ""
    ) -> None:
        self._texts = {token.token_id: token.text for token in added_tokens}
        usable = _usable(added_tokens)
        usable.sort(key=lambda token: (token.text not in preferred, token.token_id))
        del usable[_MAX_TOKENS:]
        can_start = [token for token in usable if not token.takes_left]
        can_end = [token for token in usable if not token.takes_right]
        probes = _Probes(encode)
        self._starts = _texts(can_start) if probes.start_apart(can_start) else ()
        self._ends = _texts(can_end) if probes.end_apart(can_end) else ()
        self.problem = _problem(usable, self._starts, self._ends)
        found = [token for token in usable if token.text in {*self._starts, *self._ends}]
        self._ids = {token.text: token.token_id for token in found}
        self._sorted_ids = np.sort(np.array([*self._ids.values()], dtype=np.int32))
        self._pattern = (
            re.compile("|".join(re.escape(text) for text in self._ids)) if found else None
        )

    @property
    def is_on(self) -> bool:
        """Whether there is any place to cut at; else ``problem`` says why in one line."""
        return not self.problem

    def text_of(self, token_id: int) -> str | None:
        """How an added token is written; None for any other id."""
        return self._texts.get(token_id)

    def is_boundary(self, text: str, num_chars: int) -> bool:
        """Whether ``text`` may be cut there: encoded apart, its two parts give the same ids."""
        if num_chars == 0:
            return True
        is_start = bool(self._starts) and text.startswith(self._starts, num_chars)
        return is_start or (bool(self._ends) and text.endswith(self._ends, 0, num_chars))

    def boundaries(self, text: str, token_ids: NDArray[np.int32]) -> list[Boundary]:
        """The places to cut ``text`` at, one for each added token in it, in order.

        None at all where the added tokens among its ids are not those written in it: a text may
        give, once normalized, the id of a token that does not stand in it.
        """
        if self._pattern is None:
            return []
        matches = list(self._pattern.finditer(text))
        at = np.flatnonzero(np.isin(token_ids, self._sorted_ids))
        if [self._ids[match[0]] for match in matches] != token_ids[at].tolist():
            return []
        return [
            Boundary(match.end(), index + 1)
            if match[0] in self._ends
            else Boundary(match.start(), index)
            for match, index in zip(matches, at.tolist(), strict=True)
        ]


class _Probes:
    """Samples with each added token in them, encoded whole and in two pieces."""

    def __init__(self, encode: EncodeBatch) -> None:
        self._encode = encode

    def start_apart(self, tokens: Sequence[AddedToken]) -> bool:
        return self._all_apart([(left, middle + right) for left, middle, right in _samples(tokens)])

    def end_apart(self, tokens: Sequence[AddedToken]) -> bool:
        return self._all_apart([(left + middle, right) for left, middle, right in _samples(tokens)])

    def _all_apart(self, cuts: Sequence[tuple[str, str]]) -> bool:
        wholes = self._encode([left + right for left, right in cuts])
        lefts = self._encode([left for left, _ in cuts])
        rights = self._encode([right for _, right in cuts])
        return all(
            np.array_equal(whole, np.concatenate((left, right)))
            for whole, left, right in zip(wholes, lefts, rights, strict=True)
        )


def _samples(tokens: Sequence[AddedToken]) -> list[tuple[str, str, str]]:
    samples = []
    for index, token in enumerate(tokens):
        samples += [(left, token.text, right) for left, right in _SIDES]
        other = tokens[(index + 1) % len(tokens)].text
        samples += [("x" + other, token.text, "y"), ("x", token.text, other + " y")]
    return samples


def _usable(tokens: Sequence[AddedToken]) -> list[AddedToken]:
    """Those whose every occurrence in a text is found, whatever stands around it: no other added
    token can be part of it, contain it or overlap its ends."""
    texts = [token.text for token in tokens]
    known = set(texts)
    heads = {text[:size] for text in texts for size in range(1, len(text))}
    tails = {text[-size:] for text in texts for size in range(1, len(text))}
    joined = "\0".join(texts)
    return [
        token
        for token in tokens
        if token.is_raw
        and not token.is_whole_word
        and token.text.strip()
        and joined.count(token.text) == 1
        and not any(token.text[-size:] in heads for size in range(1, len(token.text)))
        and not any(token.text[:size] in tails for size in range(1, len(token.text)))
        and not _inner_texts(token.text) & known
    ]


def _inner_texts(text: str) -> set[str]:
    size = len(text)
    return {text[i:j] for i in range(size) for j in range(i + 1, size + 1) if j - i < size}


def _texts(tokens: Sequence[AddedToken]) -> tuple[str, ...]:
    return tuple(token.text for token in tokens)


def _problem(usable: Sequence[AddedToken], starts: Sequence[str], ends: Sequence[str]) -> str:
    if starts or ends:
        return ""
    if not usable:
        return "the tokenizer has no added token to cut at"
    return "the tokenizer encodes a text's pieces differently from the whole"
