"""A request's grammar in the words of the library that matches it, llguidance.

Owns the options that both ends of a link must agree upon: what whitespace a JSON answer may have,
and how much a grammar may cost. Needs no torch, no tokenizer and no model, so a gateway checks
grammars by it; a worker compiles them.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from model_worker.sampling_params import Grammar

# Between the parts of a JSON answer: nothing, a space, or a line break and its indentation. Without
# a bound a model may fall into writing whitespace for ever.
JSON_WHITESPACE = r"( |\n[ \t]{0,40})?"

# Formats of time, held to what every validator takes: the library's own allow a 60th second at any
# time, and a 29th of February in any year.
_DAY = (
    r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}
_VALUES = frozenset({"const", "enum", "default", "examples"})  # of these nothing is a schema


def grammar_limits() -> LLParserLimits:
    """What one grammar may cost at most, and no text of it in errors, which are logged."""
    return LLParserLimits(verbose_errors=False)


def grammar_source(grammar: Grammar) -> str:
    """llguidance's own form. Raises ValueError where a schema is no JSON object; whatever else is
    wrong shows when the result is validated or compiled."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            _strict_in_time(grammar.text),
            overrides={"whitespace_pattern": JSON_WHITESPACE, "lenient": False},
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _strict_in_time(text: str) -> str:
    """The schema with patterns for its formats of time; what is no JSON, or nested beyond reading,
    is left for the library to refuse in its own words."""
    try:
        return json.dumps(_with_patterns(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _with_patterns(schema: Any) -> Any:
    """A copy in which formats of time are patterns; one that has a pattern beside it is left."""
    if isinstance(schema, list):
        return [_with_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {
        name: value if name in _VALUES else _with_patterns(value) for name, value in schema.items()
    }
    pattern = _PATTERNS.get(copy["format"]) if isinstance(copy.get("format"), str) else None
    if pattern is not None and "pattern" not in copy:
        del copy["format"]
        copy["pattern"] = pattern
    return copy


def grammar_problem(grammar: Grammar) -> str | None:
    """What is wrong with it, as one line for its author; None where it can be served. Takes
    milliseconds, with the GIL released."""
    try:
        source = grammar_source(grammar)
    except ValueError as error:
        return one_line(str(error))
    return one_line(LLMatcher.validate_grammar(source, limits=grammar_limits())) or None


def one_line(text: str) -> str:
    return " ".join(text.split())
