"""The tools of a chat request, and which of them its answer may or must call.

Owns the forms of ``tools`` and ``tool_choice``, as OpenAI has them, and their limits. Knows nothing
of how a model is told of tools or how it calls them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from service.errors import InvalidRequest
from service.schemas.parsing import convert

__all__ = ["Calling", "FunctionDefinition", "Tool", "calling_of", "check_tools", "excess"]

MAX_TOOLS = 128
MAX_DEPTH = 64  # of a schema's objects and lists
MAX_VALUES = 50_000  # in a schema, and in those of all tools
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``parameters`` is a JSON schema of an object; ``strict`` holds calls to it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: FunctionDefinition


@dataclass(frozen=True, slots=True)
class Calling:
    """What calls an answer may or must hold: of functions of these ``names``, at most one unless
    it ``is_parallel``, and at least one where it ``is_forced``. Without names it holds none."""

    names: tuple[str, ...] = ()
    is_forced: bool = False
    is_parallel: bool = True


class _FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: _FunctionName


class _AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    allowed_tools: _AllowedTools


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest naming what is wrong by its path."""
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    if excess([tool.function.parameters for tool in tools], 4 * MAX_DEPTH) is not None:
        raise _wrong("tools", f"hold more than {MAX_VALUES:,} values, or are nested too deeply")
    known: set[str] = set()
    for index, tool in enumerate(tools):
        at, function = f"tools[{index}]", tool.function
        if tool.type != "function":
            raise _wrong(f"{at}.type", "must be 'function'")
        if not _NAME.fullmatch(function.name):
            raise _wrong(f"{at}.function.name", "must be 1 to 64 of the characters A-Z a-z 0-9 _ -")
        if function.name in known:
            raise _wrong(f"{at}.function.name", f"'{function.name}' is there twice")
        known.add(function.name)
        _check_parameters(function.parameters, f"{at}.function.parameters")


def _check_parameters(schema: dict[str, Any] | None, at: str) -> None:
    if not schema:
        return
    if schema.get("type") != "object":
        raise _wrong(f"{at}.type", "must be 'object': arguments have names")
    if not isinstance(schema.get("properties", {}), dict):
        raise _wrong(f"{at}.properties", "must be an object")
    too_much = excess(schema)
    if too_much is not None:
        raise _wrong(at, too_much)


def calling_of(
    tools: Sequence[Tool], choice: str | dict[str, Any] | None, *, is_parallel: bool
) -> Calling:
    """What ``tool_choice`` says. Raises InvalidRequest."""
    names = tuple(tool.function.name for tool in tools)
    if choice == "none":
        return Calling()
    if choice is None or choice == "auto":
        return Calling(names, is_parallel=is_parallel)
    if not tools:
        raise _wrong("tool_choice", "there are no tools to choose from")
    if choice == "required":
        return Calling(names, is_forced=True, is_parallel=is_parallel)
    if isinstance(choice, str):
        raise _wrong("tool_choice", "must be 'none', 'auto', 'required' or an object")
    if choice.get("type") == "allowed_tools":
        allowed = convert(choice, _Allowed, "tool_choice").allowed_tools
        at = "tool_choice.allowed_tools.tools"
        chosen = tuple(
            dict.fromkeys(
                _known(named, names, f"{at}[{index}]") for index, named in enumerate(allowed.tools)
            )
        )
        if not chosen:
            raise _wrong(at, "must not be empty")
        return Calling(chosen, is_forced=allowed.mode == "required", is_parallel=is_parallel)
    named = convert(choice, _Named, "tool_choice")
    return Calling((_known(named, names, "tool_choice"),), is_forced=True, is_parallel=False)


def _known(named: _Named, names: Sequence[str], at: str) -> str:
    if named.type != "function":
        raise _wrong(f"{at}.type", "must be 'function'")
    name = named.function.name
    if name not in names:
        raise _wrong(f"{at}.function.name", f"'{name[:64]}' is none of the tools")
    return name


def excess(schema: Any, depth: int = MAX_DEPTH) -> str | None:
    """What is too much about a schema, None for one that may be looked at further: whoever else is
    being answered waits meanwhile."""
    level: list[Any] = [schema]
    num_values = 0
    for _ in range(depth + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        num_values += len(level)
        if num_values > MAX_VALUES:
            return f"holds more than {MAX_VALUES:,} values"
    return f"is nested more than {depth} deep" if level else None


def _wrong(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {reason}.", param=param)
