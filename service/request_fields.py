"""The table of request fields: which act, which are harmless, and which are refused by name.

Owns what happens to every top-level field of a request body, known or not: a field that would
change the answer and is not implemented is refused, because silence would be a lie. Types and
ranges of the fields that act belong to service.schemas; the rows of other APIs than chat and
completions to service.dialects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.errors import InvalidRequest

__all__ = [
    "REQUEST_FIELDS",
    "Endpoint",
    "FieldKind",
    "FieldTable",
    "RequestField",
    "acting_fields",
    "acts",
    "harmless",
    "keep_acting",
    "refused",
]


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


class FieldKind(StrEnum):
    ACTS = "acts"
    HARMLESS = "harmless"  # accepted, and rightly without effect on the answer
    REFUSED = "refused"  # unless it holds one of the row's inert values


@dataclass(frozen=True, slots=True)
class RequestField:
    """One row. ``null`` is always the same as leaving the field out. A table of one endpoint's
    own names none."""

    name: str
    kind: FieldKind
    endpoints: frozenset[Endpoint] = frozenset()
    note: str = ""
    inert: tuple[Any, ...] = ()  # values of a refused field that ask for nothing

    def is_inert(self, value: Any) -> bool:
        return any(type(value) is type(other) and value == other for other in self.inert)


def acts(name: str, note: str) -> RequestField:
    """A row of a table that is one endpoint's own."""
    return RequestField(name, FieldKind.ACTS, note=note)


def harmless(name: str, note: str) -> RequestField:
    return RequestField(name, FieldKind.HARMLESS, note=note)


def refused(name: str, *inert: object, note: str = "") -> RequestField:
    return RequestField(name, FieldKind.REFUSED, note=note, inert=inert)


_CHAT = frozenset({Endpoint.CHAT})
_COMPLETIONS = frozenset({Endpoint.COMPLETIONS})
_BOTH = _CHAT | _COMPLETIONS


def _rows(
    kind: FieldKind, endpoints: frozenset[Endpoint], names: Mapping[str, str]
) -> tuple[RequestField, ...]:
    return tuple(RequestField(name, kind, endpoints, note) for name, note in names.items())


def _refused(
    name: str, endpoints: frozenset[Endpoint], *inert: Any, note: str = ""
) -> RequestField:
    return RequestField(name, FieldKind.REFUSED, endpoints, note, inert)


REQUEST_FIELDS: tuple[RequestField, ...] = (
    *_rows(
        FieldKind.ACTS,
        _BOTH,
        {
            "model": "required; one of the served names",
            "stream": "true answers with server-sent events",
            "stream_options": "include_usage, continuous_usage_stats; only with stream",
            "max_tokens": "capped at the rest of the context; 0 only computes the prompt's KV",
            "n": "choices of each prompt, together at most 128; the prompt is computed once",
            "temperature": "0 to 2, default 1; 0 is greedy",
            "top_p": "above 0, to 1",
            "top_k": "0 or -1 is off",
            "min_p": "0 to 1",
            "seed": "64-bit; the same seed draws the same numbers whatever the batch",
            "presence_penalty": "-2 to 2",
            "frequency_penalty": "-2 to 2",
            "repetition_penalty": "above 0, to 10; 1 is off",
            "logit_bias": "token id to bias, -100 to 100",
            "stop": "a string or up to 16 of them, each of up to 512 characters",
            "stop_token_ids": "up to 64 ids",
            "ignore_eos": "true goes on past the end-of-sequence token",
            "min_tokens": "no end-of-sequence or stop token before so many",
            "prompt_logprobs": "0 to 20 likeliest tokens beside each of the prompt's, which "
            "is then computed whole; not in a stream",
            "cache_salt": "requests share cached prefixes only with the same salt",
            "session_id": "as the header X-Session-ID: whose history this request goes on with",
            "priority": "-10 to 10, of its cached blocks; default 0",
            "retention": "seconds that its cached blocks count as used later; default 0",
            "prompt_cache_key": "requests of one key go to one worker while loads are equal",
            "prompt_cache_options": "ttl (30m, say) is a retention; mode: all of a prompt is "
            "kept in either",
            "prompt_cache_retention": "24h is a retention of a day; in_memory asks for none",
            "explain_cache": "true tells in the answer why no more of the prompt was cached: "
            "[diagnostics.md](diagnostics.md)",
            "response_format": "text, json_object or json_schema, which the answer then keeps to",
            "structured_outputs": "one of json, json_object, regex, choice, grammar (Lark)",
            "guided_json": "as structured_outputs.json",
            "guided_regex": "as structured_outputs.regex",
            "guided_choice": "as structured_outputs.choice",
            "guided_grammar": "as structured_outputs.grammar",
        },
    ),
    *_rows(
        FieldKind.ACTS,
        _CHAT,
        {
            "messages": "required",
            "logprobs": "true gives each token's log-probability",
            "top_logprobs": "0 to 20 likeliest tokens beside each; only with logprobs",
            "max_completion_tokens": "the same as max_tokens",
            "continue_final_message": "true goes on with the last message, an assistant's; so it "
            "is without this field too",
            "add_generation_prompt": "true answers in a new turn whatever the last message is, "
            "false opens none",
            "echo": "true begins the answer with the message that it goes on with",
            "chat_template_kwargs": "further variables of the model's chat template",
            "tools": "functions that the answer may call, up to 128: [tools.md](tools.md)",
            "tool_choice": "none, auto, required, one function, or allowed_tools",
            "parallel_tool_calls": "false allows one call at most",
        },
    ),
    *_rows(
        FieldKind.ACTS,
        _COMPLETIONS,
        {
            "prompt": "required: a string, token ids, or a list of either, up to 128 prompts",
            "echo": "true puts the prompt's text before the answer, with logprobs its scores too",
            "logprobs": "0 to 20 likeliest tokens beside each, which is named in any case",
            "add_special_tokens": "false leaves out what the tokenizer adds, such as a first token",
        },
    ),
    *_rows(
        FieldKind.HARMLESS,
        _BOTH,
        {
            "user": "a label of the caller's",
            "metadata": "a label of the caller's",
            "store": "nothing is stored either way",
            "service_tier": "there is one tier",
            "safety_identifier": "a label of the caller's",
        },
    ),
    *_rows(
        FieldKind.HARMLESS,
        _CHAT,
        {
            "prediction": "a hint about speed, not about the answer",
        },
    ),
    _refused("truncate_prompt_tokens", _BOTH),
    _refused("skip_special_tokens", _BOTH, True),
    _refused("spaces_between_special_tokens", _BOTH, True),
    _refused("include_stop_str_in_output", _BOTH, False),
    _refused("return_token_ids", _BOTH, False),
    _refused("length_penalty", _BOTH, 1, 1.0),
    _refused("use_beam_search", _BOTH, False),
    _refused("best_of", _BOTH, 1),
    _refused("suffix", _COMPLETIONS, ""),
    _refused("functions", _CHAT, [], note="see tools"),
    _refused("function_call", _CHAT, "none", note="see tool_choice"),
    _refused("audio", _CHAT),
    _refused("modalities", _CHAT, ["text"]),
    _refused("reasoning_effort", _CHAT, "none"),
    _refused("verbosity", _CHAT, "medium"),
    _refused("web_search_options", _CHAT),
    _refused("add_special_tokens", _CHAT, False),
    _refused("chat_template", _CHAT, note="templates come from the model alone"),
    _refused("documents", _CHAT, []),
)


class FieldTable:
    """The rows of one endpoint."""

    def __init__(self, rows: Iterable[RequestField]) -> None:
        self._rows = {row.name: row for row in rows}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    @property
    def acting(self) -> frozenset[str]:
        rows = self._rows.values()
        return frozenset(row.name for row in rows if row.kind is FieldKind.ACTS)

    def keep_acting(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of ``body`` that act, without nulls. Raises InvalidRequest naming any
        other."""
        kept: dict[str, Any] = {}
        for name, value in body.items():
            row = self._rows.get(name)
            if row is None:
                raise self._unknown(name)
            if value is None or row.kind is FieldKind.HARMLESS:
                continue
            if row.kind is FieldKind.ACTS:
                kept[name] = value
            elif not row.is_inert(value):
                raise _not_supported(row)
        return kept

    def _unknown(self, name: str) -> InvalidRequest:
        shown = name if len(name) <= 64 else name[:64] + "..."
        nearest = difflib.get_close_matches(name[:64], self.acting, n=1)
        hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
        return InvalidRequest(
            f"Unknown request field '{shown}'.{hint}", param=shown, code="unknown_parameter"
        )


_TABLES: Mapping[Endpoint, FieldTable] = {
    endpoint: FieldTable(row for row in REQUEST_FIELDS if endpoint in row.endpoints)
    for endpoint in Endpoint
}


def acting_fields(endpoint: Endpoint) -> frozenset[str]:
    return _TABLES[endpoint].acting


def keep_acting(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """As :meth:`FieldTable.keep_acting`, of the endpoint's table."""
    return _TABLES[endpoint].keep_acting(body)


def _not_supported(row: RequestField) -> InvalidRequest:
    allowed = " or ".join(str(value) for value in row.inert[:1])
    hint = f"; the only value accepted is {allowed}" if row.inert else "; leave it out"
    note = f" ({row.note})" if row.note else ""
    return InvalidRequest(
        f"'{row.name}' is not supported here{note}{hint}.",
        param=row.name,
        code="unsupported_parameter",
    )
