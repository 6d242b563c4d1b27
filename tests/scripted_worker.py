"""A worker process without a model: the real WorkerServer under a scripted engine loop.

Started by :func:`scripted_command` with a WorkerConfig on standard input, like the real one. The
first prompt token of a request is where its answer counts up from (see :func:`next_token`);
``config.model`` chooses how the start goes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cache_store.events import AllBlocksCleared, BlockStored, CacheEvent, Tier
from model_worker.process_start import EXIT_CONFIG, read_config, watch_parent
from model_worker.protocol import (
    Abort,
    AddRequest,
    CacheReset,
    FinishReason,
    LinkTiming,
    ModelCard,
    PrefixCommand,
    PrefixReply,
    RequestOutput,
    ResetCache,
    TenantPolicies,
    TenantUsage,
    TokenizerFile,
    WorkerConfig,
    WorkerStats,
    read_link_secret,
)
from model_worker.server import LinkCommand, LinkLost, LinkOpened, WorkerServer

SLOW_STEP_TOKEN = 901  # a request that begins with it makes each of its steps take SLOW_STEP_S
SLOW_STEP_S = 2.0
EXIT_TOKEN = 902  # the process ends with status 3 at this request's second step
STEP_S = 0.005
TIMING = LinkTiming(heartbeat_s=0.1, silence_s=1.5, answer_s=0.5)  # silence_s < SLOW_STEP_S
DROPPED_BLOCKS = 7
STORED_BEFORE = BlockStored(Tier.HOST, b"before the link.")  # what each new link is told


def scripted_command(*arguments: str) -> list[str]:
    """The command line of this process, from any working directory."""
    root = str(Path(__file__).resolve().parent.parent)
    start = (
        f"import sys; sys.path.insert(0, {root!r}); from tests.scripted_worker import main; main()"
    )
    return [sys.executable, "-c", start, *arguments]


def make_card(model: str = "scripted") -> ModelCard:
    content = b'{"version": "1.0"}'
    tokenizer = TokenizerFile(
        name="tokenizer.json", content=content, sha256=hashlib.sha256(content).hexdigest()
    )
    return ModelCard(
        model=model,
        served_model_names=(model,),
        fingerprint="f" * 32,
        block_size=16,
        hash_version="1",
        max_model_len=4096,
        vocab_size=1000,
        eos_token_ids=(2,),
        tokenizer_files=(tokenizer,),
        kv_bytes_per_token=1024,
        num_blocks=256,
        dtype="float32",
        device="cpu",
    )


def next_token(first: int, position: int) -> int:
    """The token at ``position`` (from 0) of the answer to a prompt that begins with ``first``."""
    return first + position


def scripted_reply(command: PrefixCommand) -> PrefixReply:
    """All that was asked about is on the device, and each token a block."""
    num_tokens = len(command.prompt_token_ids) // 4
    return PrefixReply(
        call_id=command.call_id,
        num_device_tokens=num_tokens,
        num_blocks_changed=num_tokens - command.keep_num_tokens,
    )


@dataclass(slots=True)
class ScriptedRequest:
    link_id: str
    request: AddRequest
    first: int
    num_output_tokens: int = 0

    def step(self) -> RequestOutput:
        token = next_token(self.first, self.num_output_tokens)
        self.num_output_tokens += 1
        is_last = self.num_output_tokens == self.request.sampling_params.max_tokens
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=(token,),
            num_cached_tokens=0 if self.num_output_tokens == 1 else None,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )


@dataclass(slots=True)
class ScriptedEngine:
    server: WorkerServer
    running: dict[tuple[str, str], ScriptedRequest] = field(default_factory=dict)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    events: list[CacheEvent] = field(default_factory=list)
    tenants: tuple[TenantUsage, ...] = ()

    def take(self, item: LinkCommand) -> None:
        match item.command:
            case AddRequest() as request:
                first = int.from_bytes(request.prompt_token_ids[:4], "little")
                added = ScriptedRequest(item.link_id, request, first)
                self.running[item.link_id, request.request_id] = added
            case Abort(request_id=request_id):
                if self.running.pop((item.link_id, request_id), None) is not None:
                    self.emit(
                        item.link_id,
                        RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT),
                    )
            case ResetCache(call_id=call_id):
                dropped = CacheReset(call_id=call_id, num_blocks_dropped=DROPPED_BLOCKS)
                self.server.reply(item.link_id, dropped)
                self.events.append(AllBlocksCleared())
            case PrefixCommand() as command:
                self.server.reply(item.link_id, scripted_reply(command))
            case TenantPolicies(policies=policies):
                # Said back, so that whoever said it can see what came over.
                self.tenants = tuple(
                    TenantUsage(each.tenant, num_device_blocks=each.max_device_bytes or 0)
                    for each in policies
                )
            case LinkOpened():
                self.server.publish_events(item.link_id, (STORED_BEFORE,))
            case LinkLost():
                gone = [key for key in self.running if key[0] == item.link_id]
                for key in gone:
                    del self.running[key]

    def emit(self, link_id: str, output: RequestOutput) -> None:
        self.outputs.setdefault(link_id, []).append(output)

    def step(self) -> None:
        for key, request in tuple(self.running.items()):
            if request.first == SLOW_STEP_TOKEN:
                time.sleep(SLOW_STEP_S)
            if request.first == EXIT_TOKEN and request.num_output_tokens == 1:
                print("scripted worker: told to exit", file=sys.stderr)
                os._exit(3)
            output = request.step()
            self.emit(request.link_id, output)
            if output.finish_reason is not None:
                del self.running[key]
        stats = WorkerStats(num_running=len(self.running), tenants=self.tenants)
        self.server.publish(self.outputs, stats, self.events)
        self.outputs, self.events = {}, []


def start_or_exit(config: WorkerConfig, server: WorkerServer) -> None:
    """The fates that a start can have, by the model's name."""
    match config.model:
        case "unreadable":
            print("loading the model", file=sys.stderr)
            print("model 'unreadable': no such file", file=sys.stderr)
            server.close("cannot load the model")
            sys.exit(EXIT_CONFIG)
        case "crashing":
            print("scripted worker: out of memory", file=sys.stderr)
            os._exit(9)
        case "slow-load":
            server.set_status("loading", "reading weights 40 %")
            time.sleep(0.5)
    print(f"model {config.model} loaded")
    server.set_ready(make_card(config.model))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heartbeat-s", type=float, default=TIMING.heartbeat_s)
    parser.add_argument("--silence-s", type=float, default=TIMING.silence_s)
    parser.add_argument("--ignore-sigterm", action="store_true")
    arguments = parser.parse_args()
    config = read_config()
    secret = None
    if config.link_secret_file is not None:
        secret = read_link_secret(config.link_secret_file)
    timing = LinkTiming(heartbeat_s=arguments.heartbeat_s, silence_s=arguments.silence_s)
    server = WorkerServer(config.endpoint, config.worker_id, time.time_ns(), secret, timing=timing)
    is_stopping = False

    def stop(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = not arguments.ignore_sigterm
        server.wake()

    signal.signal(signal.SIGTERM, stop)
    watch_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    server.start()
    start_or_exit(config, server)
    engine = ScriptedEngine(server)
    while not is_stopping:
        for item in server.poll_commands(STEP_S if engine.running else None):
            engine.take(item)
        engine.step()
    server.close()


if __name__ == "__main__":
    main()
