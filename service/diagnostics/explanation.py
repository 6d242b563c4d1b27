"""Why a request did not find more in the cache: the words for it, and what is told.

Owns the reasons, in the order of precedence, and the form of an explanation. Knows nothing of how a
reason is found.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Departed", "Explanation", "Kind", "Reason", "Texts"]


class Reason(StrEnum):
    """The first that is true, of those below the first two."""

    HIT = "hit"  # all that could be there was; what follows is new text
    COMPUTED_WHOLE = "computed_whole"  # the prompt's logprobs were asked for, which no cache has
    COLD = "cold"  # nothing like it has been asked before
    SALT_DIFFERS = "salt_differs"  # stored behind another cache_salt of the tenant's
    TENANT_DIFFERS = "tenant_differs"  # another tenant has it: told to operators only
    MODEL_CHANGED = "model_changed"
    BELOW_ONE_BLOCK = "below_one_block"  # too little in common to be worth a block
    OTHER_WORKER = "other_worker"  # another worker has it
    EXPIRED = "expired"  # its session was deleted, or its time ran out
    EVICTED = "evicted"
    DIVERGED = "diverged"  # from an earlier prompt, whose text goes on behind the difference


class Kind(StrEnum):
    """What a divergence is."""

    CLOCK = "clock"  # a date or a time
    ID = "id"  # an id or a counter
    REORDERED_TOOLS = "reordered_tools"  # the same tools, or the same schema, in another order
    EDITED_TOOLS = "edited_tools"
    EDITED_MESSAGE = "edited_message"
    EDITED_PROMPT = "edited_prompt"  # of /v1/completions
    TEMPLATE = "template"  # the same messages, written in other tokens


@dataclass(frozen=True, slots=True)
class Departed:
    """When (seconds since 1970, None if that is not known), from which tier and by what: capacity,
    tenant_cap, dropped, reset, lost, restart or unknown."""

    cause: str
    tier: str = ""
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """Around the first divergent token: what is common before it, and what stood there then and
    now, up to where the texts are equal again or at most some forty tokens."""

    before: str
    earlier: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``token_index`` is that of the first token that was missed or differs, None where none is;
    ``field`` the part of the request it falls in, as the client calls it, or ``template``.
    ``num_lost_tokens`` might have come from the cache. ``compared_with`` is the request that had
    them. ``reason_of_all`` is what an operator is told, who sees the requests of all tenants."""

    reason: Reason
    num_prompt_tokens: int
    num_matched_tokens: int
    kind: Kind | None = None
    token_index: int | None = None
    field: str = ""
    num_lost_tokens: int = 0
    compared_with: str = ""
    departed: Departed | None = None
    texts: Texts | None = dataclasses.field(default=None, repr=False)
    reason_of_all: Reason | None = None

    @property
    def for_operator(self) -> Explanation:
        """As it is told to one who sees the requests of all tenants."""
        if self.reason_of_all is None:
            return self
        return dataclasses.replace(self, reason=self.reason_of_all)

    @property
    def suggestion(self) -> str:
        """What to change; empty where nothing can be."""
        return self.suggestion_for(self.field, self.num_lost_tokens)

    def suggestion_for(self, field: str, num_tokens: int) -> str:
        """The same where it is ``field``, and ``num_tokens`` are lost by each request."""
        words = _SUGGESTIONS.get(self.kind or self.reason, "")
        gain = f": +{num_tokens:,} tokens per request" if num_tokens else ""
        return words.format(field=field or "the prompt") + gain if words else ""


_SUGGESTIONS: dict[Kind | Reason, str] = {
    Kind.CLOCK: "move the date or time in {field} behind the static part, or into the last message",
    Kind.ID: "move the id in {field} behind the static part, or leave it out",
    Kind.REORDERED_TOOLS: "send tools and their schemas in one order, or serve with "
    "--canonical-tools",
    Kind.EDITED_TOOLS: "send the same tools throughout; tool_choice says which may be called",
    Kind.EDITED_MESSAGE: "move what changes in {field} behind the static part, and append to a "
    "conversation rather than change it",
    Kind.EDITED_PROMPT: "move what changes in {field} behind the static part",
    Kind.TEMPLATE: "name the session (X-Session-ID), so that the ids that were served are kept",
    Reason.SALT_DIFFERS: "use one cache_salt for what may be shared",
    Reason.EVICTED: "give the cache more memory or a lower tier, or ask for retention",
    Reason.EXPIRED: "give the session a longer ttl",
    Reason.OTHER_WORKER: "name the session (X-Session-ID) or a prompt_cache_key",
}
