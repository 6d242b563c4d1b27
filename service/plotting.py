"""Pictures in files, for the commands that draw.

Owns the import of matplotlib, which comes with the extra ``plot``, and what is said where it is
missing. Knows nothing of what is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from service.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "new_figure", "save_figure"]

_DPI = 110


def check_plot(path: Path) -> None:
    """Before what is to be drawn is worked out. Raises ConfigError where it cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: needs matplotlib, which is not installed here: pip install 'headstart[plot]'"
        )
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot: the file's name must end in .png, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}")


def new_figure(width: float = 7.0, height: float = 4.4) -> Figure:
    """In inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Raises ConfigError."""
    try:
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from None
