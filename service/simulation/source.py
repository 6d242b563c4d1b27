"""Where the requests to simulate come from: a server's history, or a trace file.

Owns the reading of both, and what a server says of its sizes beside its history. Knows nothing of
what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cache_store.simulation.replay import Capacity
from cache_store.simulation.trace import Trace, TraceError, parse_trace, read_trace
from service.config import ConfigError
from service.operator_client import OperatorClient, ServerError
from service.schemas.history import BLOCK_BYTES_HEADER, BLOCKS_HEADER

__all__ = ["Recorded", "from_file", "from_server"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """``present`` are the tiers of the server, ``block_bytes`` the bytes of a block; None where
    nobody says."""

    name: str
    trace: Trace
    present: Capacity | None = None
    block_bytes: int | None = None


def from_file(path: Path, block_tokens: int | None) -> Recorded:
    """Raises ConfigError."""
    try:
        return Recorded(path.name, read_trace(path, block_tokens))
    except OSError as error:
        raise ConfigError(f"TRACE: cannot read {path}: {error.strerror or error}") from None
    except TraceError as error:
        hint = "; give --block-size" if "has to be given" in str(error) else ""
        raise ConfigError(f"TRACE: {path}: {error}{hint}") from None


def from_server(url: str, client: OperatorClient) -> Recorded:
    """Raises ServerError."""
    response = client.get("/v1/cache/history")
    if not response.text.strip():
        raise ServerError(f"{url} has served no request yet, so there is nothing to simulate")
    try:
        trace = parse_trace(response.text.splitlines())
    except TraceError as error:
        raise ServerError(f"{url} gave no history: {error}") from None
    sizes = _sizes(response.headers.get(BLOCKS_HEADER, ""))
    block_bytes = int(response.headers.get(BLOCK_BYTES_HEADER, "0"))
    return Recorded(url, trace, sizes, block_bytes or None)


def _sizes(said: str) -> Capacity | None:
    """Of ``device=1024, host=0, disk=0``."""
    pairs = (part.strip().partition("=") for part in said.split(","))
    sizes = {name: int(count) for name, _, count in pairs if count.isdecimal()}
    if not sizes.get("device"):
        return None
    return Capacity(sizes["device"], sizes.get("host", 0), sizes.get("disk", 0))
