"""`headstart simulate`: what another size, tier or policy would have found of recorded requests.

Owns the command's options and the order of its steps. It replays through the real cache
(cache_store.simulation), which is why this package alone may import it; what is heavy is imported
when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from service import config
from service import setting_types as kinds
from service.config import ConfigError

if TYPE_CHECKING:
    from service.simulation.scenarios import Asked
    from service.simulation.source import Recorded

__all__ = ["simulate"]

_T = TypeVar("_T")


def simulate(
    trace: Annotated[
        str, typer.Argument(metavar="[TRACE]", help="A trace file, .jsonl or .jsonl.gz.")
    ] = "",
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Server whose history is taken instead.")
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="SIZES",
            help="Sizes of the device's part, separated by commas: blocks, or bytes as in 40GB.",
        ),
    ] = "",
    host: Annotated[
        str, typer.Option("--host", metavar="SIZES", help="Sizes of the host tier, likewise; 0.")
    ] = "",
    disk: Annotated[
        str, typer.Option("--disk", metavar="SIZES", help="Sizes of the disk tier, likewise; 0.")
    ] = "",
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAMES", help="lru, adaptive, lfu, fifo.")
    ] = "",
    block_size: Annotated[
        str,
        typer.Option("--block-size", metavar="TOKENS", help="Of a trace that does not say it."),
    ] = "",
    bytes_per_token: Annotated[
        str,
        typer.Option("--bytes-per-token", metavar="BYTES", help="Of KV; a server says it itself."),
    ] = "",
    prefill_speed: Annotated[
        str,
        typer.Option(
            "--prefill-speed", metavar="N", help="Tokens a second, to show seconds saved."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        str, typer.Option("--plot", metavar="FILE", help="Draw a PNG as well (extra: plot).")
    ] = "",
) -> int:
    """Say what a cache of other sizes, tiers or policies would have found of recorded requests.

    Takes a trace file, or with --url the history of a running server; HEADSTART_API_KEY holds its
    admin key, where it has one.
    """
    from service.operator_client import ServerError
    from service.plotting import check_plot
    from service.simulation.scenarios import Asked

    if bool(trace) == bool(url):
        raise ConfigError("give a TRACE file or --url, one of the two")
    tokens = _number(kinds.integer(1), "--block-size", block_size)
    per_token = _number(kinds.integer(1), "--bytes-per-token", bytes_per_token)
    speed = _number(kinds.number(0.0, above_minimum=True), "--prefill-speed", prefill_speed)
    target = Path(plot).expanduser() if plot else None
    if target is not None:
        check_plot(target)
    try:
        recorded = _recorded(trace, url, tokens)
    except ServerError as error:
        typer.echo(f"headstart: {error}", err=True)
        return 1
    block_bytes = per_token * recorded.trace.block_tokens if per_token else recorded.block_bytes
    asked = Asked(device=device, host=host, disk=disk, policy=policy, block_bytes=block_bytes)
    return _run(recorded, asked, speed, target, as_json=as_json)


def _recorded(trace: str, url: str, block_tokens: int | None) -> Recorded:
    """Raises ConfigError or ServerError."""
    from service.operator_client import connected
    from service.simulation.source import from_file, from_server

    if trace:
        return from_file(Path(trace).expanduser(), block_tokens)
    operator = config.operator_config(config.resolve("simulate", {}), url)
    with connected(operator) as client:
        return from_server(operator.url, client)


def _run(
    recorded: Recorded, asked: Asked, speed: float | None, target: Path | None, *, as_json: bool
) -> int:
    import msgspec
    from rich.console import Console

    from cache_store.simulation.sweep import ideal, run_all
    from service.simulation.plot import plot_report
    from service.simulation.report import make_report, print_report
    from service.simulation.scenarios import scenarios_of

    scenarios = scenarios_of(asked, recorded)
    outcomes = []
    with Console(stderr=True).status("replaying") as status:
        best = ideal(recorded.trace)
        for outcome in run_all(recorded.trace, scenarios):
            outcomes.append(outcome)
            status.update(f"replaying: {len(outcomes)} of {len(scenarios)}")
    report = make_report(
        recorded, outcomes, best, block_bytes=asked.block_bytes, tokens_per_s=speed
    )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_report(Console(highlight=False), report)
    if target is not None:
        plot_report(report, target)
    return 0


def _number(parse: Callable[[str], _T], flag: str, text: str) -> _T | None:
    """None where nothing was given. Raises ConfigError."""
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
