"""Tools as a chat template is given them.

Owns the one form in which a definition stands in a prompt. Knows nothing of requests' fields or of
any template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.schemas.tools import FunctionDefinition, Tool

__all__ = ["parameters_of", "sorted_keys", "template_tools"]


def template_tools(tools: Sequence[Tool], *, is_canonical: bool) -> list[dict[str, Any]]:
    """In their order, with the fields of a function in one order whatever the request's.

    ``is_canonical`` sorts the names within ``parameters`` too, so that a client which writes the
    same schema in another order finds the same prefix; the order of lists says something, and
    stays. ``strict`` is about calls, not about the prompt, and is left out.
    """
    return [
        {"type": "function", "function": _definition(tool.function, is_canonical)} for tool in tools
    ]


def parameters_of(function: FunctionDefinition, *, is_canonical: bool) -> dict[str, Any]:
    """The schema of the arguments: of an empty object where nothing is said."""
    schema = function.parameters or {"type": "object", "properties": {}}
    return sorted_keys(schema) if is_canonical else schema


def sorted_keys(value: Any) -> Any:
    """JSON with the names of each object in order. The value must not be nested very deeply."""
    if isinstance(value, dict):
        return {name: sorted_keys(value[name]) for name in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


def _definition(function: FunctionDefinition, is_canonical: bool) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    parameters = parameters_of(function, is_canonical=is_canonical)
    return {"name": function.name, **described, "parameters": parameters}
