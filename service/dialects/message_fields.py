"""The table of request fields of Anthropic's Messages API.

Owns the rows of /v1/messages. What becomes of a row is service.request_fields' business.
"""

from __future__ import annotations

from service.request_fields import FieldKind, FieldTable, RequestField

__all__ = ["COUNTED_FIELDS", "MESSAGE_FIELDS"]


def _acts(name: str, note: str) -> RequestField:
    return RequestField(name, FieldKind.ACTS, note=note)


def _harmless(name: str, note: str) -> RequestField:
    return RequestField(name, FieldKind.HARMLESS, note=note)


def _refused(name: str, *inert: object, note: str = "") -> RequestField:
    return RequestField(name, FieldKind.REFUSED, note=note, inert=inert)


MESSAGE_FIELDS: tuple[RequestField, ...] = (
    _acts("model", "required; one of the served names"),
    _acts("messages", "required; content is text, or blocks of text, tool_use and tool_result"),
    _acts("max_tokens", "required; 0 only computes the prompt's KV"),
    _acts("system", "a text, or text blocks; the conversation's first message"),
    _acts("stream", "true answers with server-sent events"),
    _acts("stop_sequences", "up to 16, each of up to 512 characters"),
    _acts("temperature", "0 to 1, default 1; 0 is greedy"),
    _acts("top_p", "above 0, to 1"),
    _acts("top_k", "0 is off"),
    _acts("tools", "name, description, input_schema; other types than custom are refused"),
    _acts("tool_choice", "auto, any, tool or none; disable_parallel_tool_use"),
    _acts("output_config", "format: an answer that obeys a json_schema"),
    _acts("cache_control", "a breakpoint at the end of the conversation; blocks have it too"),
    _acts("cache_salt", "requests share cached prefixes only with the same salt"),
    _acts("session_id", "as the header X-Session-ID: whose history this request goes on with"),
    _acts("priority", "-10 to 10, of its cached blocks; default 0"),
    _acts("retention", "seconds that its cached blocks count as used later; at least the ttl"),
    _acts("prompt_cache_key", "requests of one key go to one worker while loads are equal"),
    _acts("seed", "64-bit; the same seed draws the same numbers whatever the batch"),
    _acts("ignore_eos", "true goes on past the end-of-sequence token"),
    _harmless("metadata", "user_id is a label of the caller's"),
    _harmless("service_tier", "there is one tier"),
    _refused("thinking", {"type": "disabled"}),
    _refused("container"),
    _refused("context_management"),
    _refused("diagnostics", {"previous_message_id": None}),
    _refused("mcp_servers", []),
    _refused("inference_geo"),
    _refused("speed", "standard"),
    _refused("output_format", note="see output_config"),
)

_ONLY_ANSWERED = frozenset(
    {
        *("max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k"),
        *("cache_salt", "session_id", "priority", "retention", "prompt_cache_key"),
        *("seed", "ignore_eos", "metadata", "service_tier"),
    }
)

# Of /v1/messages/count_tokens: what a prompt's tokens depend on.
COUNTED_FIELDS = FieldTable(row for row in MESSAGE_FIELDS if row.name not in _ONLY_ANSWERED)
