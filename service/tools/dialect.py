"""How families of models write their tool calls.

Owns one description for each, and which of them a chat template speaks. Knows nothing of reading
text, nor of any request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["DIALECTS", "Dialect", "dialect_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Calls stand behind ``opening`` as JSON objects with a name and arguments, alone or in a list.

    ``closing`` may follow. An answer of a dialect that ``is_bare`` may also begin with such an
    object right away. ``separator`` may stand between two objects. Of one that ``names_first`` the
    name may stand before an object that holds the arguments alone.
    """

    name: str
    opening: str
    argument_names: tuple[str, ...]  # the first is the one to write
    closing: str = ""
    separator: str = ""
    is_bare: bool = False
    names_first: bool = False
    markers: tuple[str, ...] = ()  # tokens that are part of a call, if a tokenizer has them
    id_prefix: str = "call_"
    num_id_chars: int = 24


_HERMES = Dialect(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    argument_names=("arguments", "parameters"),
    markers=("<tool_call>", "</tool_call>"),
)
_LLAMA3_JSON = Dialect(
    name="llama3-json",
    opening="<|python_tag|>",
    separator=";",
    argument_names=("parameters", "arguments"),
    is_bare=True,
    markers=("<|python_tag|>",),
)
_MISTRAL = Dialect(
    name="mistral",
    opening="[TOOL_CALLS]",
    argument_names=("arguments", "parameters"),
    names_first=True,
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_prefix="",  # its templates take ids of nine letters and digits, and no others
    num_id_chars=9,
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {dialect.name: dialect for dialect in (_HERMES, _LLAMA3_JSON, _MISTRAL)}
)

# What only templates of the family write; hermes' own marker frames other languages as well.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3-json"),
    ('{"name": function name, "parameters"', "llama3-json"),
    ("<tool_call>", "hermes"),
)
_FOREIGN = ("<function=", "<arg_key>")  # calls that are not JSON, within the same markers


def dialect_in(template: str) -> Dialect | None:
    """The one that the text of a chat template shows; None where it shows none that is known."""
    if any(sign in template for sign in _FOREIGN):
        return None
    return next((DIALECTS[name] for sign, name in _SIGNS if sign in template), None)
