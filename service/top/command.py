"""`headstart top`: how a server does, in a terminal, redrawn as it changes.

Owns the command's options and the loop of looking and drawing. A server that stops to answer is
said so in the frame, and asked on; one that never answered ends the command.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from service import config
from service import setting_types as kinds
from service.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from service.operator_client import OperatorClient

__all__ = ["top"]

_NUM_REQUESTS = 10


def top(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Server to look at.", show_default=False)
    ] = "http://127.0.0.1:8000",
    interval: Annotated[
        str, typer.Option("--interval", metavar="SECONDS", help="Between two looks.")
    ] = "2",
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end, for scripts.")
    ] = False,
) -> int:
    """Show how a server does: hit rate, times, memory by tier, workers, the latest requests.

    HEADSTART_API_KEY holds its admin key, where it has one.
    """
    from rich.console import Console

    from service.operator_client import ServerError, connected

    try:
        pause_s = kinds.number(0.1, 3600.0)(interval)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from None
    operator = config.operator_config(config.resolve("top", {}), url, "URL")
    try:
        with connected(operator) as client:
            _watch(Console(highlight=False), operator.url, client, None if once else pause_s)
    except ServerError as error:
        typer.echo(f"headstart: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _watch(console: Console, url: str, client: OperatorClient, pause_s: float | None) -> None:
    """Until interrupted; once without a pause. Raises ServerError where the first look fails."""
    from rich.live import Live

    from service.operator_client import ServerError
    from service.top.data import look, rates_between
    from service.top.frame import frame

    seen = look(client, _NUM_REQUESTS)
    if pause_s is None:
        console.print(frame(url, seen, None))
        return
    first = frame(url, seen, None)
    with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(pause_s)
            try:
                newer = look(client, _NUM_REQUESTS)
            except ServerError as error:
                live.update(frame(url, seen, None, str(error)), refresh=True)
                continue
            live.update(frame(url, newer, rates_between(seen, newer)), refresh=True)
            seen = newer
