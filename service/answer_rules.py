"""What an answer must match, and what reads it: the grammar, and the reader of tool calls.

Owns what a request's format and its tools together come to. Knows nothing of prompts, of workers or
of how grammars are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_worker.protocol import Grammar
from service.deltas import MakeReader, PlainReader
from service.errors import InvalidRequest
from service.schemas.chat import ChatRequest
from service.schemas.sampling import CommonFields
from service.schemas.structured import ANY_OBJECT, MAX_GRAMMAR_CHARS, AnswerFormat
from service.schemas.tools import Calling
from service.structured.checks import GrammarChecks
from service.tools.definitions import parameters_of
from service.tools.grammar import BoundFunction, arguments_schema, json_grammar
from service.tools.support import ToolSupport, required

__all__ = ["AnswerRules", "chat_rules", "plain_rules"]


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """``decode`` None is the tokenizer's own."""

    grammar: Grammar | None = None
    reader: MakeReader = PlainReader
    decode: Callable[[Sequence[int]], str] | None = None


async def plain_rules(body: CommonFields, checks: GrammarChecks, tenant: str) -> AnswerRules:
    """Of an answer that calls nothing. Raises InvalidRequest."""
    asked = body.answer_format
    if asked is None:
        return AnswerRules()
    await checks.require((tenant, body.cache_salt or ""), asked.grammar, asked.param)
    return AnswerRules(asked.grammar)


async def chat_rules(
    body: ChatRequest,
    support: ToolSupport | None,
    checks: GrammarChecks,
    tenant: str,
    *,
    is_canonical: bool,
) -> AnswerRules:
    """Raises InvalidRequest. ``is_canonical``: as service.tools.definitions has it."""
    plain = await plain_rules(body, checks, tenant)
    calling = body.calling
    if not calling.names:
        return plain
    reads = required(support)
    functions = _bound_functions(body, calling, is_canonical=is_canonical)
    text = _grammar_text(body, calling, reads, functions)
    grammar = None if text is None else _bounded(text)
    if grammar is not None:
        await _require(grammar, functions, checks, (tenant, body.cache_salt or ""))
    return AnswerRules(grammar, reads.reader(calling.names), reads.decode)


def _bound_functions(
    body: ChatRequest, calling: Calling, *, is_canonical: bool
) -> dict[str, BoundFunction]:
    """By the path of their parameters. A strict one is called as its schema says or not at all.
    What must be called keeps to all of its schema that can be held to; what only may be called,
    to being an object."""
    bound = {}
    for index, tool in enumerate(body.tools):
        function = tool.function
        if function.name not in calling.names:
            continue
        schema: dict[str, Any] = ANY_OBJECT
        if function.strict or calling.is_forced:
            schema = parameters_of(function, is_canonical=is_canonical)
        spaced = arguments_schema(schema, is_lenient=not function.strict)
        bound[f"tools[{index}].function.parameters"] = BoundFunction(function.name, spaced)
    return bound


def _grammar_text(
    body: ChatRequest,
    calling: Calling,
    support: ToolSupport,
    functions: Mapping[str, BoundFunction],
) -> str | None:
    """None where any text will do, calls or not."""
    bound, is_parallel, asked = [*functions.values()], calling.is_parallel, body.answer_format
    if calling.is_forced:
        return support.grammar.forced(bound, is_parallel=is_parallel)
    if asked is not None:
        answer = _json_schema(asked)
        return support.grammar.beside_answer(bound, answer, is_parallel=is_parallel)
    is_any = is_parallel and len(calling.names) == len(body.tools)
    if is_any and not any(tool.function.strict for tool in body.tools):
        return None
    return support.grammar.beside_text(bound, is_parallel=is_parallel)


async def _require(
    grammar: Grammar,
    functions: Mapping[str, BoundFunction],
    checks: GrammarChecks,
    owner: tuple[str, str],
) -> None:
    """Raises InvalidRequest naming the function whose schema cannot be held to."""
    try:
        await checks.require(owner, grammar, "tools")
    except InvalidRequest:
        for param, function in functions.items():
            await checks.require(owner, json_grammar(function.schema), param)
        raise


def _json_schema(asked: AnswerFormat) -> dict[str, Any]:
    if asked.schema is None:
        raise InvalidRequest(
            f"{asked.param}: beside tools an answer can be held to JSON alone.", param=asked.param
        )
    return asked.schema


def _bounded(text: str) -> Grammar:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"tools: as a grammar they may have at most {MAX_GRAMMAR_CHARS} characters.",
            param="tools",
        )
    return Grammar("lark", text)
