"""Who asks for explanations, and what they are shown.

Owns the wall: a tenant sees its own requests alone, with their texts; an operator sees all of them,
and the texts of others only where the server was told to show them.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.diagnostics.breakers import PrefixBreaker
from service.diagnostics.explanation import Departed, Explanation, Texts
from service.diagnostics.trace import RequestTrace
from service.schemas import explain as written
from service.schemas.bodies import CachedTokens
from service.schemas.cache_explanation import CacheExplanation, DepartedView, TextsView

__all__ = ["Viewer"]


@dataclass(frozen=True, slots=True)
class Viewer:
    """``tenant`` is whose key it is; ``shows_texts``: those of others too, to an operator."""

    tenant: str
    is_operator: bool = False
    shows_texts: bool = False

    @property
    def scope(self) -> str | None:
        """Whose requests: None for everybody's."""
        return None if self.is_operator else self.tenant

    def request(self, trace: RequestTrace, told: Explanation | None) -> written.ExplainedRequest:
        record = trace.record()
        return written.ExplainedRequest(
            id=record.request_id,
            started_at=record.started_at,
            tenant=record.tenant,
            session_id=record.session or None,
            model=record.model,
            outcome=record.outcome,
            prompt_tokens=record.num_prompt_tokens,
            cached_tokens=record.num_cached_tokens,
            cached_tokens_by_tier=CachedTokens(
                record.num_device_tokens, record.num_host_tokens, record.num_disk_tokens
            ),
            completion_tokens=record.num_output_tokens,
            timeline=written.TimelineView(
                record.queue_s, record.load_s, record.prefill_s, record.decode_s, record.ttft_s
            ),
            explanation=None if told is None else self.explanation(trace, told),
        )

    def explanation(self, trace: RequestTrace, told: Explanation) -> CacheExplanation:
        if self.is_operator:
            told = told.for_operator
        may_see = trace.prompt.tenant == self.tenant or (self.is_operator and self.shows_texts)
        return CacheExplanation(
            request_id=trace.prompt.request_id,
            reason=told.reason.value,
            kind=None if told.kind is None else told.kind.value,
            prompt_tokens=told.num_prompt_tokens,
            matched_tokens=told.num_matched_tokens,
            first_divergent_token=told.token_index,
            field=told.field or None,
            tokens_lost=told.num_lost_tokens,
            compared_with=told.compared_with or None,
            evicted=_departed(told.departed),
            texts=_texts(told.texts) if may_see else None,
            suggestion=told.suggestion or None,
        )

    def breaker(self, found: PrefixBreaker) -> written.BreakerView:
        return written.BreakerView(
            tenant=found.tenant,
            kind=found.kind.value,
            field=found.field,
            requests=found.num_requests,
            share=found.share,
            tokens_lost=found.num_lost_tokens,
            tokens_per_request=found.tokens_per_request,
            last_at=found.last_at,
            example=found.request_id,
            suggestion=found.suggestion,
        )


def _departed(departed: Departed | None) -> DepartedView | None:
    if departed is None:
        return None
    return DepartedView(departed.cause, departed.tier, departed.at)


def _texts(texts: Texts | None) -> TextsView | None:
    return None if texts is None else TextsView(texts.before, texts.earlier, texts.now)
