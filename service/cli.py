"""The command line: what `headstart` can be asked to do.

Owns how arguments become configuration objects and how a failure is told: one line on stderr and a
non-zero exit. Its options come from the table in service.settings; it knows no setting by name
beyond what configuration objects carry. What is heavy to import is imported by the command that
needs it, so that --help and --version answer at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer
import typer.exceptions

from model_worker.protocol import EXIT_CONFIG
from service import __version__, config
from service.config import ConfigError
from service.planning.command import plan
from service.settings import SECTIONS, Setting, settings_of
from service.simulation.command import simulate
from service.tenants.command import tenants_app
from service.top.command import top

__all__ = ["build_app", "main"]

EXIT_USAGE = 2

Values = Mapping[str, Any]


def main() -> NoReturn:
    """The console script. Ends the process with the command's exit code."""
    try:
        sys.exit(build_app()(prog_name="headstart", standalone_mode=False) or 0)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except typer.exceptions.TyperException as error:
        _fail(error.format_message(), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="headstart",
        help="A prefix-caching proxy for LLM serving: prefill only what is new.",
        add_completion=False,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("serve")(_command("serve", _serve))
    app.command("gateway")(_command("gateway", _gateway))
    app.command("worker")(_command("worker", _worker))
    app.command("chat")(_chat)
    app.command("simulate")(simulate)
    app.command("plan")(plan)
    app.command("top")(top)
    app.command("settings")(_settings)
    app.add_typer(tenants_app(), name="tenants")
    return app


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """A prefix-caching proxy for LLM serving: prefill only what is new."""
    if version:
        typer.echo(f"headstart {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def _command(name: str, run: Callable[[Values], int]) -> Callable[..., int]:
    """``run`` behind a signature that typer reads as the options of command ``name``."""

    def command(**arguments: Any) -> int:
        return run(config.resolve(name, arguments))

    parameters = [_parameter(setting) for setting in settings_of(name) if not setting.is_env_only]
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command


def _parameter(setting: Setting) -> inspect.Parameter:
    """Values stay text here: they are parsed where variables are, so both fail alike."""
    panel = next(section.title for section in SECTIONS if setting in section.settings)
    kind: Any = bool | None if setting.is_flag else str | None
    option = typer.Option(
        setting.flag,
        help=f"{setting.help} (default: {setting.default_label})",
        metavar=setting.metavar or None,
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None if setting.is_list else kind, option],
    )


def _serve(values: Values) -> int:
    """Serve a model: a gateway and one worker beside it."""
    gateway = config.gateway_config(values)
    _require_torch()
    worker = config.worker_config(values, endpoint="", worker_id="local")
    from service import run

    return run.serve(gateway, worker)


def _gateway(values: Values) -> int:
    """Run the HTTP side alone, for workers that were started apart."""
    gateway = config.gateway_config(values)
    from service import run

    return run.gateway(gateway)


def _worker(values: Values) -> int:
    """Run a worker alone, for gateways that were started apart."""
    worker = config.worker_config(values)
    _require_torch()
    from service import run

    run.become_worker(worker)


def _chat(
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Server to talk to.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Model to talk to. (default: the first one served)",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Talk to a server in the terminal; shows what the cache saved in each turn.

    HEADSTART_API_KEY holds the key to send, where the server asks for one.
    """
    chosen = config.chat_config(config.resolve("chat", {}), url, model)
    from service import chat

    return chat.run(chosen)


def _settings() -> None:
    """Print every setting as Markdown."""
    from service import settings_document

    typer.echo(settings_document.markdown())


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "a worker needs PyTorch, which is not installed here: pip install 'headstart[worker]'"
        )


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"headstart: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
