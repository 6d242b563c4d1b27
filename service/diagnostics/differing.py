"""A divergence told to a person: in which field, of what kind, what it costs, and the text there.

Owns when a divergence is one that breaks a prefix rather than new text. Knows nothing of which
requests are compared.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from service.diagnostics.comparison import RUN, Divergence
from service.diagnostics.explanation import Kind, Texts
from service.diagnostics.field_map import FieldMap
from service.diagnostics.kinds import TEMPLATE_FIELD, kind_of
from service.diagnostics.trace import RequestTrace
from service.schemas.chat import (
    AssistantMessage,
    DeveloperMessage,
    SystemMessage,
    content_text,
)
from service.tokenizer import ModelTokenizer

__all__ = ["DescribedDivergence", "describe", "field_at"]

_SHOWN_BEFORE = 24  # tokens
_SHOWN = 40
_MOST_SHARE = 0.5
_STATIC = (SystemMessage, DeveloperMessage)
_CERTAIN = frozenset({Kind.CLOCK, Kind.ID, Kind.REORDERED_TOOLS})  # whatever comes behind


@dataclass(frozen=True, slots=True)
class DescribedDivergence:
    """``is_breaker``: the text around it is of the kind that is meant to stay the same."""

    field: str
    kind: Kind | None
    num_lost_tokens: int
    is_breaker: bool
    texts: Texts | None


@dataclass(frozen=True, slots=True)
class _Said:
    role: str
    text: str


class _Side:
    """One prompt as text, with its answer, and its parts."""

    def __init__(self, trace: RequestTrace, tokenizer: ModelTokenizer) -> None:
        self.ids = trace.served_ids.tolist()
        self._num_prompt = len(trace.prompt.token_ids)
        self.source = trace.prompt.source
        self.conversation = trace.prompt.source.conversation
        self._decode = tokenizer.decode_exactly
        self.text = self._decode(self.ids)
        self.fields = (
            None
            if self.conversation is None
            else FieldMap(self.text, self.conversation, tokenizer.chat_template)
        )

    def said_after(self, number: int) -> list[_Said]:
        """The messages behind message ``number``, and the answer."""
        messages = () if self.conversation is None else self.conversation.messages[number + 1 :]
        said = [_Said(str(m.__struct_config__.tag), content_text(m.content)) for m in messages]
        answer = self._decode(self.ids[self._num_prompt :])
        return [*said, _Said("assistant", answer)] if answer else said

    def place_of(self, index: int) -> int:
        """Where the token of that index begins, in characters."""
        return len(self._decode(self.ids[:index]))

    def shown(self, start: int, stop: int) -> str:
        return self._decode(self.ids[max(start, 0) : stop])

    def path_at(self, place: int) -> str:
        return self.source.field if self.fields is None else self.fields.path_at(place)

    def told(self, path: str) -> str:
        """As the client calls it."""
        name = self.source.path_of
        return path if name is None or path == TEMPLATE_FIELD else name(path)


def field_at(trace: RequestTrace, index: int, tokenizer: ModelTokenizer) -> str:
    """The part of the request that the token of that index belongs to, as the client calls it."""
    side = _Side(trace, tokenizer)
    return side.told(side.path_at(side.place_of(index)))


def describe(
    trace: RequestTrace,
    other: RequestTrace,
    divergence: Divergence,
    tokenizer: ModelTokenizer | None,
) -> DescribedDivergence:
    """Without a tokenizer, what can be said in numbers."""
    num_equal = divergence.num_equal
    if tokenizer is None:
        return DescribedDivergence("", None, num_equal, False, None)
    side, earlier = _Side(trace, tokenizer), _Side(other, tokenizer)
    place = _first_difference(side, earlier, divergence.index)
    path = _path_of(side, earlier, place)
    kind = kind_of(side.text, earlier.text, place, path, side.conversation, earlier.conversation)
    return DescribedDivergence(
        side.told(path),
        kind,
        num_equal,
        _is_breaker(side, earlier, path, kind, divergence),
        _texts(side, earlier, divergence),
    )


def _path_of(side: _Side, earlier: _Side, place: int) -> str:
    """Where the template's own text differs since another message comes, it is that message's."""
    path = side.path_at(place)
    if path != TEMPLATE_FIELD or side.conversation is None or earlier.conversation is None:
        return path
    assert side.fields is not None
    number = side.fields.next_message(place)
    mine, theirs = side.conversation.messages, earlier.conversation.messages
    if number is None or list(mine[: number + 1]) == list(theirs[: number + 1]):
        return path
    return f"messages[{number}].role" if list(mine[:number]) == list(theirs[:number]) else path


def _first_difference(side: _Side, earlier: _Side, index: int) -> int:
    """The character at which the texts part, at or behind the token of that index."""
    place = min(side.place_of(index), earlier.place_of(index))
    end = min(len(side.text), len(earlier.text))
    while place < end and side.text[place] == earlier.text[place]:
        place += 1
    return place


def _is_breaker(side: _Side, earlier: _Side, path: str, kind: Kind, divergence: Divergence) -> bool:
    """What is told once for all (system messages, tools, the template's own text, a bare prompt) is
    meant to stay, as far as some of it comes again behind the difference. What is said in a
    conversation is not, unless that goes on behind it as it did: most of what follows, an
    answer of the assistant's among it or before it."""
    conversation = side.conversation
    if conversation is None or side.fields is None or kind is Kind.TEMPLATE:
        return True
    number = _number_of(path)
    if number is None or isinstance(conversation.messages[number], _STATIC):
        if kind in _CERTAIN or _num_equal_in_static_text(side, divergence) >= RUN:
            return True
    elif isinstance(conversation.messages[number], AssistantMessage):
        return False
    return _goes_on(side, earlier, number or 0, kind)


def _number_of(path: str) -> int | None:
    """Of the message that it belongs to, if it does to one."""
    found = re.match(r"messages\[(\d+)\]", path)
    return None if found is None else int(found[1])


def _num_equal_in_static_text(side: _Side, divergence: Divergence) -> int:
    """Of the tokens that come again those before the first message of the conversation proper."""
    assert side.conversation is not None
    assert side.fields is not None
    said = (n for n, m in enumerate(side.conversation.messages) if not isinstance(m, _STATIC))
    start = side.fields.start_of(f"messages[{next(said, -1)}].")
    if start is None:
        return divergence.num_equal
    first = _token_at(side, start, divergence.index)
    return divergence.num_equal - divergence.num_equal_from(first)


def _goes_on(side: _Side, earlier: _Side, number: int, kind: Kind) -> bool:
    """Whether most of what was said after message ``number`` is said again, message by message, an
    answer of the assistant's among it. What two conversations have in common by chance is less."""
    mine, theirs = side.said_after(number), earlier.said_after(number)
    blocks = difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    common = [said for block in blocks for said in mine[block.a : block.a + block.size]]
    if not any(said.role == "assistant" and said.text for said in common):
        return False
    least = 1 if kind in _CERTAIN else 2
    return len(common) >= max(least, _MOST_SHARE * min(len(mine), len(theirs)))


def _token_at(side: _Side, place: int, guess: int) -> int:
    """The index of the first token that begins at or behind that character."""
    low, high = 0, len(side.ids)
    middle = min(max(guess, low), high)
    while low < high:
        if side.place_of(middle) < place:
            low = middle + 1
        else:
            high = middle
        middle = (low + high) // 2
    return low


def _texts(side: _Side, earlier: _Side, divergence: Divergence) -> Texts:
    index = divergence.index
    now_end = min(divergence.resumes_at or index + _SHOWN, index + _SHOWN)
    earlier_end = min(divergence.other_resumes_at or index + _SHOWN, index + _SHOWN)
    return Texts(
        before=side.shown(index - _SHOWN_BEFORE, index),
        earlier=earlier.shown(index, earlier_end),
        now=side.shown(index, now_end),
    )
