"""What a row of the table of settings says.

Owns how a setting is named on the command line and in the environment. Knows no setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ENV_PREFIX", "Section", "Setting"]

ENV_PREFIX = "HEADSTART_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. ``parse`` raises ValueError; ``default`` None means "decided later"."""

    name: str  # snake_case; the flag and the variable follow from it
    parse: Callable[[str], Any]
    default: Any
    help: str
    commands: tuple[str, ...]
    metavar: str
    default_text: str | None = None  # what to show where the default is decided later
    is_list: bool = False  # repeatable, and comma separated
    is_flag: bool = False
    is_env_only: bool = False  # secrets: a command line can be read by other users
    flag_name: str | None = None

    @property
    def flag(self) -> str:
        return "--" + (self.flag_name or self.name.replace("_", "-"))

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default_label(self) -> str:
        if self.default_text is not None:
            return self.default_text
        if self.is_flag:
            return "off"
        return "none" if self.default is None or self.default == () else str(self.default)


@dataclass(frozen=True, slots=True)
class Section:
    """Settings that belong together, for the help and the documentation."""

    title: str
    settings: tuple[Setting, ...]
