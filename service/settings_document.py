"""The table of settings as Markdown, for the README; knows nothing of how values are read."""

from __future__ import annotations

from service.settings import SECTIONS, Setting

__all__ = ["markdown"]


def markdown() -> str:
    """One table per section, without a trailing newline."""
    return "\n\n".join(
        "\n".join(
            (
                f"**{section.title}**",
                "",
                "| Option | Variable | Default | Commands | What it does |",
                "| --- | --- | --- | --- | --- |",
                *(_row(setting) for setting in section.settings),
            )
        )
        for section in SECTIONS
    )


def _row(setting: Setting) -> str:
    option = "" if setting.is_env_only else f"`{setting.flag}`"
    notes = " Repeatable, or separated by commas." if setting.is_list else ""
    cells = (
        option,
        f"`{setting.env}`",
        setting.default_label,
        ", ".join(setting.commands),
        setting.help + notes,
    )
    return f"| {' | '.join(cells)} |"
