"""Anthropic's and OpenAI's words for why a prompt does not go on from an earlier one.

Owns the two translations: https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics
and https://platform.openai.com/docs/api-reference/responses/object. Knows nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from service.diagnostics.prompt_comparison import Changed, PromptComparison
from service.schemas.message_bodies import CacheMissReason, Diagnostics
from service.schemas.response_bodies import PromptCacheDiagnostics

__all__ = ["anthropic_diagnostics", "openai_diagnostics"]

_ANTHROPIC: Mapping[Changed, str] = MappingProxyType(
    {
        Changed.MODEL: "model_changed",
        Changed.TOOLS: "tools_changed",
        Changed.SYSTEM: "system_changed",
        Changed.MESSAGES: "messages_changed",
    }
)
_OPENAI: Mapping[Changed, str] = MappingProxyType(
    {
        Changed.MODEL: "model_changed",
        Changed.TOOLS: "tools_changed",
        Changed.SYSTEM: "input_changed",
        Changed.MESSAGES: "input_changed",
    }
)


def anthropic_diagnostics(found: PromptComparison | None) -> Diagnostics | None:
    """None where nothing was to be compared, or nothing has changed."""
    if found is None or found.changed is Changed.NOTHING:
        return None
    kind = _ANTHROPIC.get(found.changed)
    if kind is not None:
        return Diagnostics(CacheMissReason(kind, found.num_missed))
    is_gone = found.changed is Changed.NOT_FOUND
    return Diagnostics(CacheMissReason("previous_message_not_found" if is_gone else "unavailable"))


def openai_diagnostics(found: PromptComparison) -> PromptCacheDiagnostics:
    reason = _OPENAI.get(found.changed)
    if reason is not None:
        return PromptCacheDiagnostics(
            type="cache_miss",
            reason=reason,
            cache_missed_tokens=found.num_missed,
            comparison_reusable_tokens=found.num_common,
        )
    if found.changed is Changed.NOTHING:
        return PromptCacheDiagnostics(type="cache_hit")
    is_gone = found.changed is Changed.NOT_FOUND
    return PromptCacheDiagnostics(
        type="comparison_response_not_found" if is_gone else "unavailable"
    )
