"""What kind of difference it is: a clock, an id, tools in another order, another message.

Owns the patterns. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.conversation import Conversation
from service.diagnostics.explanation import Kind

__all__ = ["TEMPLATE_FIELD", "kind_of"]

TEMPLATE_FIELD = "template"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_CLOCK = re.compile(
    r"(?<![\w-])\d{4}-\d{1,2}-\d{1,2}(?![\w-]*-[0-9a-f]{4})"
    r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?)?(?:Z|\s?[+-]\d{2}:?\d{2})?"
    r"|\d{1,4}[/.]\d{1,2}[/.]\d{2,4}"
    r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[ap]\.?m\b\.?)?"
    r"|\d{1,2}\s?[ap]m\b"
    rf"|\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})?"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b",  # seconds or milliseconds since 1970
    re.IGNORECASE,
)
_ID = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a UUID
    r"|\d+"
    r"|(?=[0-9a-f]*\d)[0-9a-f]{6,}"
    r"|(?=(?:\D*\d){2})[0-9A-Za-z_-]{8,}",
    re.IGNORECASE,
)
_IN_WORD = re.compile(r"[0-9A-Za-z_-]")
_MAX_LINE = 400  # characters that are looked at on each side


def kind_of(
    text: str,
    other: str,
    at: int,
    field: str,
    conversation: Conversation | None,
    other_conversation: Conversation | None,
) -> Kind:
    """Of the texts that first differ ``at`` that character, in ``field`` (as the chat request calls
    it) of two prompts."""
    is_in_tools = field.startswith("tools")
    if is_in_tools and _are_reordered(conversation, other_conversation):
        return Kind.REORDERED_TOOLS
    if _spans(_CLOCK, text, at) and _spans(_CLOCK, other, at):
        return Kind.CLOCK
    if _is_id(text, at) and _is_id(other, at):
        return Kind.ID
    if is_in_tools:
        return Kind.EDITED_TOOLS
    if field == TEMPLATE_FIELD or _is_same_message(field, conversation, other_conversation):
        return Kind.TEMPLATE
    return Kind.EDITED_MESSAGE if conversation is not None else Kind.EDITED_PROMPT


def _spans(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether a match has the character ``at`` in it, or ends right there."""
    line, place = _line(text, at)
    return any(match.start() <= place <= match.end() for match in pattern.finditer(line))


def _line(text: str, at: int) -> tuple[str, int]:
    """The line that ``at`` is in, and where in it."""
    start = max(text.rfind("\n", 0, at) + 1, at - _MAX_LINE)
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return text[start : min(end, at + _MAX_LINE)], at - start


def _is_id(text: str, at: int) -> bool:
    line, place = _line(text, at)
    start = end = place
    while start > 0 and _IN_WORD.match(line[start - 1]):
        start -= 1
    while end < len(line) and _IN_WORD.match(line[end]):
        end += 1
    word = line[start:end]
    return _ID.fullmatch(word) is not None or any(
        _ID.fullmatch(part) and part.isdecimal() and start + first <= place <= start + last
        for part, first, last in _parts(word)
    )


def _parts(word: str) -> list[tuple[str, int, int]]:
    """Of a word such as ticket-18: its pieces, and where each begins and ends."""
    return [(m[0], m.start(), m.end()) for m in re.finditer(r"[^_-]+", word)]


def _are_reordered(one: Conversation | None, other: Conversation | None) -> bool:
    if one is None or other is None:
        return False
    is_other = [json.dumps(tool) for tool in one.tools] != [json.dumps(t) for t in other.tools]
    return is_other and _in_one_order(one.tools) == _in_one_order(other.tools)


def _in_one_order(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(json.dumps(tool, sort_keys=True) for tool in tools)


def _is_same_message(field: str, one: Conversation | None, other: Conversation | None) -> bool:
    """Whether both have the same message there, and the same before it."""
    found = re.match(r"messages\[(\d+)\]", field)
    if one is None or other is None or found is None:
        return False
    end = int(found[1]) + 1
    return list(one.messages[:end]) == list(other.messages[:end])
