"""The table of request fields of OpenAI's Responses API.

Owns the rows of /v1/responses. What becomes of a row is service.request_fields' business.
"""

from __future__ import annotations

from service.request_fields import RequestField, acts, harmless, refused

__all__ = ["RESPONSE_FIELDS"]


RESPONSE_FIELDS: tuple[RequestField, ...] = (
    acts("model", "required; one of the served names"),
    acts("input", "required: a text, or items: messages, function_call, function_call_output"),
    acts("instructions", "the conversation's first message; not taken over by what follows"),
    acts("previous_response_id", "a stored response that this one goes on from"),
    acts("store", "default true; false keeps nothing of this response"),
    acts("stream", "true answers with server-sent events"),
    acts("max_output_tokens", "capped at the rest of the context; 0 only computes the prompt's KV"),
    acts("temperature", "0 to 2, default 1; 0 is greedy"),
    acts("top_p", "above 0, to 1"),
    acts("tools", "of type function; tools that the server runs are refused"),
    acts("tool_choice", "auto, none, required, or a function"),
    acts("parallel_tool_calls", "false: at most one call"),
    acts("text", "format: text, json_object or json_schema"),
    acts("top_logprobs", "0 to 20 of the likeliest tokens, of each token of the text"),
    acts("include", "message.output_text.logprobs; what else it may name never comes about"),
    acts("metadata", "up to 16 texts of up to 512 characters; comes back with the response"),
    acts("cache_salt", "requests share cached prefixes only with the same salt"),
    acts("priority", "-10 to 10, of its cached blocks; default 0"),
    acts("retention", "seconds that its cached blocks count as used later; default 0"),
    acts("prompt_cache_key", "requests of one key go to one worker while loads are equal"),
    acts(
        "prompt_cache_options",
        "ttl is a retention; mode: all of a prompt is kept in either; comparison_response_id asks "
        "for prompt_cache_diagnostics",
    ),
    acts("prompt_cache_retention", "24h is a retention of a day; in_memory asks for none"),
    acts("explain_cache", "true tells in the answer why no more of the prompt was cached"),
    acts("top_k", "0 or -1 is off"),
    acts("seed", "64-bit; the same seed draws the same numbers whatever the batch"),
    acts("ignore_eos", "true goes on past the end-of-sequence token"),
    harmless("user", "a label of the caller's"),
    harmless("safety_identifier", "a label of the caller's"),
    harmless("service_tier", "there is one tier"),
    harmless("max_tool_calls", "of tools that the server runs, and it runs none"),
    refused("truncation", "disabled"),
    refused("background", False),
    refused(
        "reasoning",
        *({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
        {"effort": "none"},
    ),
    refused("stream_options", {"include_obfuscation": False}, {}),
    refused("conversation", note="see previous_response_id"),
    refused("prompt"),
    refused("context_management", []),
    refused("moderation"),
    refused("session_id", note="see previous_response_id"),
)
