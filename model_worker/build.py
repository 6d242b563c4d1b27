"""What a worker is made of, built and joined: from a WorkerConfig to an engine that can serve.

The larger half of the worker's composition root: ``model_worker.__main__`` owns the process, this
owns the parts. Everything is built here, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cache_store.block_hash import HASH_VERSION
from cache_store.cache import Cache
from cache_store.copy_feed import CopyListener
from cache_store.divided_cache import DividedCache
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache
from cache_store.shared_prefixes import SharedPrefixes
from cache_store.tiers.device import DeviceTier
from cache_store.transfer_desk import LowerTiers
from model_worker.admission import EngineLimits
from model_worker.attention.backend import (
    AttentionBackend,
    CapturableBackend,
    register_attention,
)
from model_worker.attention.choice import (
    available_libraries,
    build_attention,
    choose_attention,
    needs_of,
)
from model_worker.coalescer import Coalescer
from model_worker.cores import usable_cores
from model_worker.cuda_graphs import graph_shapes, record_cuda_graphs
from model_worker.engine import Engine
from model_worker.forward import EagerForward, Forward
from model_worker.grammar import GrammarCompiler
from model_worker.grammar_desk import GrammarDesk
from model_worker.loader import (
    LoadedModel,
    ModelLoadError,
    Progress,
    load_model,
    resolve_model,
)
from model_worker.lower_tiers import WorkerTiers, build_lower_tiers
from model_worker.memory import MemoryBill
from model_worker.model_runner import ModelRunner, Runner
from model_worker.pacer import PrefillPacer
from model_worker.pool_budget import plan_pool
from model_worker.protocol import AddRequest, ModelCard, SamplingParams, WorkerConfig
from model_worker.sampler import Sampler
from model_worker.scheduler import Scheduler
from model_worker.score_room import ScoreRoom
from model_worker.speculation import AdaptiveSpeculator

MAX_BATCHED_TOKENS_CPU = 512  # some two seconds a step for a small model: arrivals wait that long
MAX_BATCHED_TOKENS_CUDA = 8192
WAITING_PER_RUNNING = 4  # requests queued for each of --max-num-seqs before more are refused
WARM_UP_PROMPT_TOKENS = 64
WARM_UP_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class WorkerParts:
    """What is built once. Engines are cheap and share it: one warms up, the next one serves."""

    loaded: LoadedModel
    bill: MemoryBill
    cache: Cache
    tier: DeviceTier
    runner: Runner
    pacer: PrefillPacer
    config: WorkerConfig
    grammars: GrammarDesk
    tiers: WorkerTiers | None = None  # those below the device
    runs_ahead: bool = False

    def restore(self) -> int:
        """Take up what an earlier worker left on disk; the number of blocks. After the warm-up."""
        if self.tiers is None or not isinstance(self.cache, DividedCache):
            return 0
        return self.tiers.restore_into(self.cache.inner)

    def close(self) -> None:
        """End the threads that copy between tiers and compile grammars."""
        self.grammars.close()
        if self.tiers is not None:
            self.tiers.threads.close()

    def new_engine(self, *, is_storing: bool = True) -> Engine:
        """Without ``is_storing`` on a cache of its own that keeps nothing, in any tier."""
        block_size = self.config.block_size
        is_sharing = is_storing and self.config.cache == "prefix"
        cache = self.cache if is_storing else NullCache(self.bill.num_blocks, block_size)
        scheduler = Scheduler(
            cache,
            self.pacer,
            block_size=block_size,
            max_num_seqs=self.config.max_num_seqs,
            eos_token_ids=self.loaded.eos_token_ids,
            coalescer=Coalescer(block_size) if is_sharing else None,
            score_room=ScoreRoom(self.loaded.vocab_size),
            speculator=(
                AdaptiveSpeculator(cache, self.pacer.costs)
                if self.config.speculation == "auto"
                else None
            ),
        )
        limits = EngineLimits(
            fingerprint=self.loaded.fingerprint,
            block_size=block_size,
            max_model_len=self.loaded.max_model_len,
            vocab_size=self.loaded.vocab_size,
            max_num_waiting=WAITING_PER_RUNNING * self.config.max_num_seqs,
            block_bytes={
                Tier.DEVICE: self.loaded.kv_spec.bytes_per_block,
                **({} if self.tiers is None else self.tiers.block_bytes),
            },
        )
        return Engine(
            scheduler,
            self.runner,
            cache,
            self.pacer,
            limits,
            time.monotonic,
            self.grammars,
            runs_ahead=self.runs_ahead,
            prefixes=cache.prefixes if isinstance(cache, DividedCache) else None,
        )


def build_worker(
    config: WorkerConfig,
    progress: Progress,
    wake: Callable[[], None] = lambda: None,
    on_copy: CopyListener | None = None,
) -> WorkerParts:
    """Load the model and allocate its pool. ``wake`` is called, from another thread, when a copy
    between tiers has ended; ``on_copy``, from the engine's, with each copy of a block that comes
    or goes. Raises ModelLoadError."""
    device = _choose_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or usable_cores())
    register_attention()
    cache_dir = None if config.model_cache_dir is None else Path(config.model_cache_dir)
    source = resolve_model(config.model, cache_dir, progress)
    loaded = load_model(
        source,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        progress=progress,
    )
    return build_parts(config, loaded, progress, wake, on_copy)


def build_parts(
    config: WorkerConfig,
    loaded: LoadedModel,
    progress: Progress,
    wake: Callable[[], None] = lambda: None,
    on_copy: CopyListener | None = None,
) -> WorkerParts:
    """All parts around a model that is there. Raises ModelLoadError."""
    device = loaded.device
    bill = plan_pool(config, loaded.kv_spec, loaded.max_model_len, device)
    for line in bill.lines(loaded.kv_spec):
        progress(line)
    tier = _allocate(loaded, bill)
    max_batched = config.max_num_batched_tokens or (
        MAX_BATCHED_TOKENS_CPU if device.type == "cpu" else MAX_BATCHED_TOKENS_CUDA
    )
    if max_batched <= config.max_num_seqs:
        max_batched = config.max_num_seqs + 1
        progress(
            f"--max-num-batched-tokens raised to {max_batched}: one for each of --max-num-seqs"
        )
    pacer = PrefillPacer(config.max_itl_factor, max_batched)
    tiers = None
    if config.cache != "none":
        tiers = build_lower_tiers(
            config, tier, loaded.fingerprint, pacer.prefill_token_s, wake, progress
        )
    forward = _make_forward(loaded, tier, config.max_num_seqs, max_batched, progress)
    return WorkerParts(
        loaded=loaded,
        bill=bill,
        cache=_build_cache(
            config, bill.num_blocks, None if tiers is None else tiers.lower, on_copy
        ),
        tier=tier,
        runner=ModelRunner(forward, tier, Sampler(loaded.eos_token_ids)),
        pacer=pacer,
        config=config,
        grammars=GrammarDesk(_grammar_compiler(loaded).compile, wake),
        tiers=tiers,
        # On a CPU a step is complete when its launch returns: there is nothing to run ahead of.
        runs_ahead=device.type == "cuda",
    )


def model_card(config: WorkerConfig, parts: WorkerParts) -> ModelCard:
    loaded = parts.loaded
    return ModelCard(
        model=config.model,
        served_model_names=config.served_model_names or (config.model,),
        fingerprint=loaded.fingerprint,
        block_size=config.block_size,
        hash_version=HASH_VERSION,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer_files=loaded.tokenizer_files,
        kv_bytes_per_token=loaded.kv_spec.bytes_per_token,
        num_blocks=parts.bill.num_blocks,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
    )


def _grammar_compiler(loaded: LoadedModel) -> GrammarCompiler:
    files = {file.name: file.content for file in loaded.tokenizer_files}
    return GrammarCompiler(
        files.get("tokenizer.json", b""), loaded.vocab_size, loaded.eos_token_ids
    )


def _choose_device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("--device cuda: torch sees no CUDA device")
    return torch.device(requested)


def _choose_backend(loaded: LoadedModel, tier: DeviceTier, progress: Progress) -> AttentionBackend:
    num_heads = loaded.layout.num_heads
    needs = needs_of(tier, num_heads, loaded.dtype)
    choice = choose_attention(needs, available_libraries())
    progress(f"Attention: {choice.name} ({choice.reason})")
    return build_attention(choice.name, tier, num_heads, loaded.dtype)


def _make_forward(
    loaded: LoadedModel, tier: DeviceTier, max_num_seqs: int, max_batched: int, progress: Progress
) -> Forward:
    backend = _choose_backend(loaded, tier, progress)
    device = tier.keys.device
    if device.type == "cpu" and loaded.dtype == torch.float32:
        from model_worker.cpu_forward import cpu_forward

        return cpu_forward(loaded.model, tier, backend)
    if device.type == "cuda" and isinstance(backend, CapturableBackend):
        shapes = graph_shapes(max_num_seqs, max_batched)
        try:
            return record_cuda_graphs(
                loaded.model, backend, shapes, loaded.max_model_len, device, progress
            )
        except RuntimeError as error:  # slower without, and not wrong
            progress(f"No CUDA graphs: {str(error).splitlines()[0]}")
    return EagerForward(loaded.model, backend, device)


def _allocate(loaded: LoadedModel, bill: MemoryBill) -> DeviceTier:
    try:
        return DeviceTier(loaded.kv_spec, bill.num_blocks, loaded.device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"the KV pool of {bill.pool_bytes / 2**30:.2f} GiB cannot be allocated on "
            f"{loaded.device}: lower --kv-cache-memory"
        ) from error


def _build_cache(
    config: WorkerConfig, num_blocks: int, lower: LowerTiers | None, on_copy: CopyListener | None
) -> Cache:
    if config.cache == "none":
        return NullCache(num_blocks, config.block_size)
    policy = make_eviction_policy(config.eviction_policy)
    # The wall clock, since what is found on disk was used at some time of an earlier process.
    cache = PrefixCache(
        num_blocks,
        config.block_size,
        policy,
        lower,
        clock_ns=time.time_ns,
        has_events=True,
        on_copy=on_copy,
    )
    return DividedCache(cache, SharedPrefixes(config.block_size))


def warm_up(parts: WorkerParts) -> None:
    """A real request through a real engine: kernels are set up, and the pacer has measured what
    a decode step and a prefill token cost before the first client asks. Nothing of it is stored.

    Raises ModelLoadError if it fails, as every client's request then would."""
    engine = parts.new_engine(is_storing=False)
    length = min(WARM_UP_PROMPT_TOKENS, parts.loaded.max_model_len - WARM_UP_OUTPUT_TOKENS)
    prompt = np.random.default_rng(0).integers(0, parts.loaded.vocab_size, max(length, 1))
    for number in range(2):  # the first one also pays for lazy set-up
        engine.add_request(
            "warm-up",
            AddRequest(
                request_id=str(number),
                prompt_token_ids=prompt.astype("<i4").tobytes(),
                sampling_params=SamplingParams(
                    max_tokens=WARM_UP_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
                ),
            ),
        )
        while engine.has_work:
            engine.step()
        if number == 0:
            parts.pacer.costs.clear()  # kernels may have been compiled meanwhile
    for output in engine.take_outputs()["warm-up"]:
        if output.error is not None:
            raise ModelLoadError(f"the first request, a trial, failed: {output.error.message}")
