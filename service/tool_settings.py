"""The settings of tools, as rows of the table in service.settings."""

from __future__ import annotations

from service import setting_types as kinds
from service.setting import Setting
from service.tools.dialect import DIALECTS

__all__ = ["TOOL_SETTINGS"]

_GATEWAY = ("serve", "gateway")

TOOL_SETTINGS = (
    Setting(
        "tool_call_parser",
        kinds.choice("auto", *DIALECTS, "none"),
        "auto",
        "How the model writes its tool calls: as its chat template shows, or as models of one "
        "family do; none reads no calls.",
        _GATEWAY,
        "KIND",
    ),
    Setting(
        "canonical_tools",
        kinds.boolean,
        False,
        "Sort the names within tools' schemas, so that the same tools in another order of names "
        "are the same prefix.",
        _GATEWAY,
        "",
        is_flag=True,
    ),
)
