"""What one served model can do with tools.

Owns the choice of its dialect and all that follows from it. Knows nothing of requests beyond what
calls they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from service.chat_template import ChatTemplate
from service.deltas import MakeReader
from service.errors import InvalidRequest
from service.tools.dialect import DIALECTS, Dialect, dialect_in
from service.tools.frame import frame_of
from service.tools.grammar import CallGrammar
from service.tools.reader import CallReader

__all__ = ["ToolSupport", "required"]


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """``decode`` is the tokenizer's, with the special tokens that are part of a call."""

    dialect: Dialect
    grammar: CallGrammar
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(
        cls,
        parser: str,
        template: ChatTemplate,
        special_ids: Mapping[str, int],
        decode_with: Callable[[Collection[int]], Callable[[Sequence[int]], str]],
        ends: Sequence[str],
    ) -> ToolSupport | None:
        """None where no calls are read. ``parser`` is the setting's value; ``decode_with`` makes a
        decoder that keeps these special tokens; ``ends`` are the texts that may end a turn."""
        source = template.source or ""
        dialect = dialect_in(source) if parser == "auto" else DIALECTS.get(parser)
        if dialect is None:
            return None
        markers = {text: special_ids[text] for text in dialect.markers if text in special_ids}
        frame = frame_of(dialect, source, template.apply, ends)
        grammar = CallGrammar(dialect, frame, markers)
        return cls(dialect, grammar, decode_with(markers.values()))

    def reader(self, names: Collection[str]) -> MakeReader:
        return lambda: CallReader(self.dialect, names)


def required(support: ToolSupport | None) -> ToolSupport:
    """Raises InvalidRequest where there is none."""
    if support is None:
        raise InvalidRequest(
            "tools: how this model writes its calls is not known here, so none could be read; "
            "--tool-call-parser says it. tool_choice 'none' needs no calls.",
            param="tools",
            code="unsupported_parameter",
        )
    return support
