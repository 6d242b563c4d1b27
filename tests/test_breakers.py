"""What breaks prefixes, added up."""

from __future__ import annotations

from service.diagnostics.breakers import find_breakers
from service.diagnostics.explanation import Explanation, Kind, Reason
from service.diagnostics.trace import RequestTrace, TracedPrompt


def told(
    number: int, kind: Kind | None, field: str, lost: int, tenant: str = "acme"
) -> tuple[RequestTrace, Explanation]:
    reason = Reason.HIT if kind is None else Reason.DIVERGED
    trace = RequestTrace(TracedPrompt(request_id=f"r{number}", tenant=tenant), started_at=number)
    return trace, Explanation(
        reason=reason,
        num_prompt_tokens=2000,
        num_matched_tokens=10,
        kind=kind,
        field=field,
        num_lost_tokens=lost,
    )


def test_by_tenant_kind_and_field_the_worst_first() -> None:
    found = find_breakers(
        [
            told(1, Kind.CLOCK, "messages[0].content", 1000),
            told(2, None, "", 0),
            told(3, Kind.CLOCK, "messages[0].content", 1361),
            told(4, Kind.EDITED_MESSAGE, "messages[3].content", 50),
            told(5, Kind.EDITED_MESSAGE, "messages[7].content", 60),
            told(6, Kind.REORDERED_TOOLS, "tools[2]", 5000, "globex"),
            told(7, Kind.EDITED_MESSAGE, "messages[9].content", 0),
            told(8, None, "", 0, "globex"),
        ]
    )
    assert [(each.tenant, each.kind, each.field, each.num_requests) for each in found] == [
        ("globex", Kind.REORDERED_TOOLS, "tools[*]", 1),
        ("acme", Kind.CLOCK, "messages[0].content", 2),
        ("acme", Kind.EDITED_MESSAGE, "messages[*].content", 2),
    ]
    clock = found[1]
    assert (clock.num_lost_tokens, clock.tokens_per_request) == (2361, 1180)
    assert (clock.share, clock.last_at, clock.request_id) == (2 / 6, 3, "r3")
    assert clock.suggestion == (
        "move the date or time in messages[0].content behind the static part, or into the last "
        "message: +1,180 tokens per request"
    )
    assert found[0].share == 0.5


def test_nothing_breaks_nothing() -> None:
    assert find_breakers([]) == []
    assert find_breakers([told(1, None, "", 0)]) == []


def test_every_kind_has_a_suggestion() -> None:
    for kind in Kind:
        assert told(1, kind, "tools[0]", 12)[1].suggestion.endswith(": +12 tokens per request")
    assert told(1, None, "", 0)[1].suggestion == ""
