"""What a difference looks like: clocks, ids, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from service.conversation import Conversation
from service.diagnostics.explanation import Kind
from service.diagnostics.kinds import kind_of
from service.schemas.chat import SystemMessage, UserMessage


def kind(earlier: str, now: str, field: str = "messages[0].content") -> Kind:
    """Of two system prompts."""
    at = next(i for i, (a, b) in enumerate(zip(earlier, now, strict=False)) if a != b)
    one, other = (Conversation([SystemMessage(text)]) for text in (now, earlier))
    return kind_of(now, earlier, at, field, one, other)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("You help Alice.", "You help Bob."),
        ("Answer in two lines.", "Answer in ten lines."),
        ("You may book, modify or cancel.", "You may book, change or cancel."),
        ("Version two-a of the rules", "Version two-b of the rules"),
        ("Sunny weather in Oslo", "Rainy weather in Oslo"),
        ("May I help?", "Can I help?"),
        ("decade", "facade"),
    ],
)
def test_words_are_neither(earlier: str, now: str) -> None:
    assert kind(earlier, now) is Kind.EDITED_MESSAGE


@pytest.mark.parametrize(
    ("earlier", "now", "expected"),
    [
        ("At 12:03 it was 17.", "At 12:03 it was 18.", Kind.ID),
        ("No 17 at 12:03.", "No 17 at 12:04.", Kind.CLOCK),
        ("2026-11-30 and Alice", "2026-11-30 and Bob", Kind.EDITED_MESSAGE),
        (
            "id 550e8400-e29b-41d4-a716-446655440000",
            "id 650e8400-e29b-41d4-a716-446655440000",
            Kind.ID,
        ),
        (
            "id 12345678-2222-3333-4444-446655440000",
            "id 12345679-2222-3333-4444-446655440000",
            Kind.ID,
        ),
        ("line\n10:00\nline", "line\n10:01\nline", Kind.CLOCK),
        ("x" * 1000 + " 10:00", "x" * 1000 + " 11:00", Kind.CLOCK),
    ],
)
def test_where_it_differs_counts(earlier: str, now: str, expected: Kind) -> None:
    assert kind(earlier, now) is expected


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_tools() -> None:
    one, other = [tool("a1"), tool("a2")], [tool("a2"), tool("a1")]

    def of(now: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> Kind:
        sides = Conversation([], tools=now), Conversation([], tools=earlier)
        return kind_of("a1 x", "a2 x", 1, "tools[0]", *sides)

    assert of(one, other) is Kind.REORDERED_TOOLS
    assert of([tool("a", x=1, y=2)], [tool("a", y=2, x=1)]) is Kind.REORDERED_TOOLS
    assert of(one, [*other, tool("c")]) is Kind.EDITED_TOOLS
    sides = Conversation([], tools=one), Conversation([], tools=[tool("c")])
    assert kind_of("look", "find", 0, "tools[0]", *sides) is Kind.EDITED_TOOLS


def test_the_same_messages_in_other_tokens_are_the_templates_doing() -> None:
    same = Conversation([SystemMessage("a"), UserMessage("b")])
    assert kind_of("ab", "ac", 1, "messages[1].content", same, same) is Kind.TEMPLATE
    assert kind_of("ab", "ac", 1, "template", same, same) is Kind.TEMPLATE
    assert kind_of("ab", "ac", 1, "prompt", None, None) is Kind.EDITED_PROMPT
