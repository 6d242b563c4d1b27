"""The table of request fields of OpenAI's Responses API.

Owns the rows of /v1/responses. What becomes of a row is service.request_fields' business.
"""

from __future__ import annotations

from service.request_fields import FieldKind, RequestField

__all__ = ["RESPONSE_FIELDS"]


def _acts(name: str, note: str) -> RequestField:
    return RequestField(name, FieldKind.ACTS, note=note)


def _harmless(name: str, note: str) -> RequestField:
    return RequestField(name, FieldKind.HARMLESS, note=note)


def _refused(name: str, *inert: object, note: str = "") -> RequestField:
    return RequestField(name, FieldKind.REFUSED, note=note, inert=inert)


RESPONSE_FIELDS: tuple[RequestField, ...] = (
    _acts("model", "required; one of the served names"),
    _acts("input", "required: a text, or items: messages, function_call, function_call_output"),
    _acts("instructions", "the conversation's first message; not taken over by what follows"),
    _acts("previous_response_id", "a stored response that this one goes on from"),
    _acts("store", "default true; false keeps nothing of this response"),
    _acts("stream", "true answers with server-sent events"),
    _acts(
        "max_output_tokens", "capped at the rest of the context; 0 only computes the prompt's KV"
    ),
    _acts("temperature", "0 to 2, default 1; 0 is greedy"),
    _acts("top_p", "above 0, to 1"),
    _acts("tools", "of type function; tools that the server runs are refused"),
    _acts("tool_choice", "auto, none, required, or a function"),
    _acts("parallel_tool_calls", "false: at most one call"),
    _acts("text", "format: text, json_object or json_schema"),
    _acts("top_logprobs", "0 to 20 of the likeliest tokens, of each token of the text"),
    _acts("include", "message.output_text.logprobs; what else it may name never comes about"),
    _acts("metadata", "up to 16 texts of up to 512 characters; comes back with the response"),
    _acts("cache_salt", "requests share cached prefixes only with the same salt"),
    _acts("priority", "-10 to 10, of its cached blocks; default 0"),
    _acts("retention", "seconds that its cached blocks count as used later; default 0"),
    _acts("prompt_cache_key", "requests of one key go to one worker while loads are equal"),
    _acts("top_k", "0 or -1 is off"),
    _acts("seed", "64-bit; the same seed draws the same numbers whatever the batch"),
    _acts("ignore_eos", "true goes on past the end-of-sequence token"),
    _harmless("user", "a label of the caller's"),
    _harmless("safety_identifier", "a label of the caller's"),
    _harmless("service_tier", "there is one tier"),
    _harmless("prompt_cache_retention", "see retention"),
    _harmless("max_tool_calls", "of tools that the server runs, and it runs none"),
    _refused("truncation", "disabled"),
    _refused("background", False),
    _refused(
        "reasoning",
        *({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
        {"effort": "none"},
    ),
    _refused("stream_options", {"include_obfuscation": False}, {}),
    _refused("conversation", note="see previous_response_id"),
    _refused("prompt"),
    _refused("context_management", []),
    _refused("moderation"),
    _refused("prompt_cache_options"),
    _refused("session_id", note="see previous_response_id"),
)
