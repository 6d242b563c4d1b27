"""The table of request fields of Anthropic's Messages API.

Owns the rows of /v1/messages. What becomes of a row is service.request_fields' business.
"""

from __future__ import annotations

from service.request_fields import FieldTable, RequestField, acts, harmless, refused

__all__ = ["COUNTED_FIELDS", "MESSAGE_FIELDS"]


MESSAGE_FIELDS: tuple[RequestField, ...] = (
    acts("model", "required; one of the served names"),
    acts("messages", "required; content is text, or blocks of text, tool_use and tool_result"),
    acts("max_tokens", "required; 0 only computes the prompt's KV"),
    acts("system", "a text, or text blocks; the conversation's first message"),
    acts("stream", "true answers with server-sent events"),
    acts("stop_sequences", "up to 16, each of up to 512 characters"),
    acts("temperature", "0 to 1, default 1; 0 is greedy"),
    acts("top_p", "above 0, to 1"),
    acts("top_k", "0 is off"),
    acts("tools", "name, description, input_schema; other types than custom are refused"),
    acts("tool_choice", "auto, any, tool or none; disable_parallel_tool_use"),
    acts("output_config", "format: an answer that obeys a json_schema"),
    acts("cache_control", "a breakpoint at the end of the conversation; blocks have it too"),
    acts("cache_salt", "requests share cached prefixes only with the same salt"),
    acts("session_id", "as the header X-Session-ID: whose history this request goes on with"),
    acts("priority", "-10 to 10, of its cached blocks; default 0"),
    acts("retention", "seconds that its cached blocks count as used later; at least the ttl"),
    acts("prompt_cache_key", "requests of one key go to one worker while loads are equal"),
    acts("explain_cache", "true tells in the answer why no more of the prompt was cached"),
    acts("diagnostics", "previous_message_id: the answer says why that prompt was not reused"),
    acts("seed", "64-bit; the same seed draws the same numbers whatever the batch"),
    acts("ignore_eos", "true goes on past the end-of-sequence token"),
    harmless("metadata", "user_id is a label of the caller's"),
    harmless("service_tier", "there is one tier"),
    refused("thinking", {"type": "disabled"}),
    refused("container"),
    refused("context_management"),
    refused("mcp_servers", []),
    refused("inference_geo"),
    refused("speed", "standard"),
    refused("output_format", note="see output_config"),
)

_ONLY_ANSWERED = frozenset(
    {
        *("max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k"),
        *("cache_salt", "session_id", "priority", "retention", "prompt_cache_key"),
        *("seed", "ignore_eos", "metadata", "service_tier", "explain_cache", "diagnostics"),
    }
)

# Of /v1/messages/count_tokens: what a prompt's tokens depend on.
COUNTED_FIELDS = FieldTable(row for row in MESSAGE_FIELDS if row.name not in _ONLY_ANSWERED)
