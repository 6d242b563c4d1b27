"""`headstart plan`: what of a model fits, and how quick it can be at most.

Owns the command's options, how their values are written and what is told of a mistake. What is
heavy is imported when the command runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from service import setting_types as kinds
from service.config import ConfigError

__all__ = ["plan"]

_T = TypeVar("_T")
_TOKENS = re.compile(r"(\d+)([kKmM]?)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(?:FLOPS|FLOP/s|B/s|B)?")
_POWERS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_MAX_TOKENS = 2**31 - 1


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name such as Llama-3.1-70B, a folder, a config.json, a .gguf file, a hub id, "
            "or demo.",
        ),
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="A known device, such as H200 or L4.")
    ] = "",
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="SIZE", help="Its memory, such as 80GB.")
    ] = "",
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", metavar="RATE", help="Its bytes a second, such as 3.3TB.")
    ] = "",
    flops: Annotated[
        str, typer.Option("--flops", metavar="RATE", help="Its operations a second, such as 989T.")
    ] = "",
    gpu_memory_utilization: Annotated[
        str, typer.Option("--gpu-memory-utilization", metavar="SHARE", help="As with serve.")
    ] = "0.9",
    host_memory: Annotated[
        str, typer.Option("--host-memory", metavar="SIZE", help="Of the host tier.")
    ] = "0",
    disk: Annotated[str, typer.Option("--disk", metavar="SIZE", help="Of the disk tier.")] = "0",
    context: Annotated[
        str, typer.Option("--context", metavar="TOKENS", help="Of a conversation; 16k is 16,384.")
    ] = "8k",
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N", help="Conversations that run at once.")
    ] = "64",
    shared_prefix: Annotated[
        str, typer.Option("--shared-prefix", metavar="TOKENS", help="That all of them begin with.")
    ] = "0",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", metavar="TYPE", help="auto or int8; both without it.")
    ] = "",
    block_size: Annotated[
        str, typer.Option("--block-size", metavar="TOKENS", help="Tokens in one KV block.")
    ] = "32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        str, typer.Option("--plot", metavar="FILE", help="Draw a PNG as well (extra: plot).")
    ] = "",
) -> int:
    """Say what of a model fits into given memory, from its configuration alone, and how quick it
    can be at most."""
    from service.planning.sources import model_shape
    from service.plotting import check_plot

    target = Path(plot).expanduser() if plot else None
    if target is not None:
        check_plot(target)
    device = _device(gpu, gpu_memory)
    length = _read(_tokens(1), "--context", context)
    prefix = _read(_tokens(0), "--shared-prefix", shared_prefix)
    if prefix >= length:
        raise ConfigError(f"--shared-prefix: must be less than --context {length}, got {prefix}")
    numbers = _read(kinds.choice("auto", "float32", "bfloat16", "float16"), "--dtype", dtype)
    stored = _read(kinds.choice("auto", "int8"), "--kv-cache-dtype", kv_cache_dtype or "auto")
    given: dict[str, Any] = {
        "gpu_memory": device.memory,
        "gpu_memory_utilization": _read(
            kinds.number(0.0, 1.0, above_minimum=True),
            "--gpu-memory-utilization",
            gpu_memory_utilization,
        ),
        "host_memory": _read(kinds.size_or_zero, "--host-memory", host_memory),
        "disk": _read(kinds.size_or_zero, "--disk", disk),
        "context": length,
        "concurrency": _read(kinds.integer(1, 10**6), "--concurrency", concurrency),
        "shared_prefix": prefix,
        "block_size": _read(
            kinds.integer_choice(8, 16, 32, 64, 128, 256), "--block-size", block_size
        ),
        "kv_cache_dtypes": (stored,) if kv_cache_dtype else ("auto", "int8"),
    }
    speed = _read(_rate, "--bandwidth", bandwidth) if bandwidth else device.bandwidth
    peak = _read(_rate, "--flops", flops) if flops else None
    shape = model_shape(model, length)
    chosen = shape.dtype if numbers == "auto" else numbers
    return _show(
        shape,
        {**given, "dtype": chosen, "bandwidth": speed, "flops": peak or device.flops(chosen)},
        target,
        as_json=as_json,
    )


def _show(shape: Any, given: dict[str, Any], target: Path | None, *, as_json: bool) -> int:
    import msgspec
    from rich.console import Console

    from service.planning.estimate import Wanted, make_plan
    from service.planning.plot import plot_plan
    from service.planning.report import print_plan

    made = make_plan(shape, Wanted(**given))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        print_plan(Console(highlight=False), made)
    if target is not None:
        plot_plan(shape, made, target)
    return 0


def _device(name: str, memory: str) -> Any:
    """The one of that name, with the memory that was said, if any was."""
    from dataclasses import replace

    from service.planning.devices import DEVICES, Device

    known = {item.lower(): device for item, device in DEVICES.items()}
    if name and name.lower() not in known:
        raise ConfigError(f"--gpu: expected one of {', '.join(DEVICES)}, got {name!r}")
    found = known.get(name.lower(), Device(0, None, None, None))
    if memory:
        return replace(found, memory=_read(kinds.size, "--gpu-memory", memory))
    if not name:
        raise ConfigError("give --gpu-memory, or --gpu with a device that is known by name")
    return found


def _read(parse: Callable[[str], _T], flag: str, text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _tokens(minimum: int) -> Callable[[str], int]:
    """A number of tokens; k is 1,024 and M is 1,048,576, as models' lengths are counted."""

    def parse(value: str) -> int:
        match = _TOKENS.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"expected a number of tokens such as 16384 or 16k, got {value!r}")
        count = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
        if not minimum <= count <= _MAX_TOKENS:
            raise ValueError(f"must be from {minimum} to {_MAX_TOKENS}, got {count}")
        return count

    return parse


def _rate(value: str) -> float:
    match = _RATE.fullmatch(value.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"expected a rate such as 3.3TB or 989T, got {value!r}")
    return float(match[1]) * _POWERS[match[2]]
