"""A request's grammar in the words of the library that matches it, llguidance.

Owns the options that both ends of a link must agree upon: what whitespace a JSON answer may have,
and how much a grammar may cost. Needs no torch, no tokenizer and no model, so a gateway checks
grammars by it; a worker compiles them.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from model_worker.sampling_params import Grammar

# Between the parts of a JSON answer: nothing, a space, or a line break and its indentation. Without
# a bound a model may fall into writing whitespace for ever.
JSON_WHITESPACE = r"( |\n[ \t]{0,40})?"


def grammar_limits() -> LLParserLimits:
    """What one grammar may cost at most, and no text of it in errors, which are logged."""
    return LLParserLimits(verbose_errors=False)


def grammar_source(grammar: Grammar) -> str:
    """llguidance's own form. Raises ValueError where a schema is no JSON object; whatever else is
    wrong shows when the result is validated or compiled."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, overrides={"whitespace_pattern": JSON_WHITESPACE, "lenient": False}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


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
