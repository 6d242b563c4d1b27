"""What a span says of a request: figures and names, and nothing of its text.

Owns the names of attributes: those of OpenTelemetry's semantic conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai) where there is one, ``headstart.``
and a name of ours where not. A session goes by a digest, since its label may be a person's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from opentelemetry.util.types import AttributeValue

from service.diagnostics.trace import RequestTrace
from service.sessions.identity import session_digest

__all__ = ["operation_of", "request_attributes"]

_OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/messages": "chat",
        "/v1/responses": "chat",
        "/v1/completions": "text_completion",
    }
)
_NO_REASONS = frozenset({"running", "abort", "error"})  # outcomes that are no reason of the model's


def operation_of(route: str) -> str | None:
    """``gen_ai.operation.name`` of what a route does; None where it generates nothing."""
    return _OPERATIONS.get(route)


def request_attributes(traces: Sequence[RequestTrace]) -> dict[str, AttributeValue]:
    """Of one HTTP request, whose prompts and choices are ``traces``; none for none.

    Tokens are sums. A prompt counts once, however many choices were asked for; the outcome is that
    of the first choice which went wrong, else of the first.
    """
    if not traces:
        return {}
    every = [trace.record() for trace in traces]
    prompts = [trace.record() for trace in traces if trace.is_listed]
    first = every[0]
    outcome = next((each.outcome for each in every if each.outcome in _NO_REASONS), first.outcome)
    found: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "headstart",
        "gen_ai.request.model": first.model,
        "gen_ai.usage.input_tokens": sum(each.num_prompt_tokens for each in prompts),
        "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in every),
        "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens for each in prompts),
        "headstart.cached_tokens.device": sum(each.num_device_tokens for each in prompts),
        "headstart.cached_tokens.host": sum(each.num_host_tokens for each in prompts),
        "headstart.cached_tokens.disk": sum(each.num_disk_tokens for each in prompts),
        "headstart.outcome": outcome,
        "headstart.tenant": first.tenant,
    }
    reasons = [each.outcome for each in every if each.outcome not in _NO_REASONS]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    if first.session:
        found["gen_ai.conversation.id"] = session_digest(first.tenant, first.session)
    if first.worker_id:
        found["headstart.worker.id"] = first.worker_id
    waits = [each.ttft_s for each in every if each.ttft_s is not None]
    if waits:
        found["gen_ai.response.time_to_first_chunk"] = min(waits)
    return found
