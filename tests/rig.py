"""An engine on a real model, built in the test's own process, and the reference it is held to.

Owns the token-equality gate: reference logits from transformers' own generate, a sampler that
feeds the reference's token and records how far the engine's logits were off at each position.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from cache_store.block import KVCacheSpec
from cache_store.block_hash import Namespace
from cache_store.cache import Cache
from cache_store.divided_cache import DividedCache
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache
from cache_store.shared_prefixes import SharedPrefixes
from cache_store.tiers.codec import make_codec
from cache_store.tiers.device import DeviceTier
from cache_store.transfer_desk import LowerTiers
from model_worker.admission import EngineLimits
from model_worker.attention.backend import ATTENTION_NAME, AttentionBackend, register_attention
from model_worker.attention.choice import build_attention
from model_worker.batch import ScheduledRequest
from model_worker.coalescer import Coalescer
from model_worker.compiled.decoder import CompiledDecoder
from model_worker.compiled.weights import DecoderWeights, fits
from model_worker.engine import Engine
from model_worker.forward import EagerForward, Forward
from model_worker.grammar import no_grammars
from model_worker.grammar_desk import Compile, GrammarDesk
from model_worker.lower_tiers import WorkerTiers, build_lower_tiers
from model_worker.model_runner import ModelRunner, Runner
from model_worker.pacer import PrefillPacer
from model_worker.protocol import AddRequest, RequestOutput, SamplingParams, WorkerConfig
from model_worker.request import Request
from model_worker.sampler import Sampler, accepted_runs
from model_worker.scheduler import Scheduler
from model_worker.score_room import MAX_SCORED_LOGITS, ScoreRoom
from model_worker.speculation import Speculator
from model_worker.step_costs import StepCosts
from tests.deferred import DeferredRunner

MAX_LOGIT_DIFFERENCE = 2e-4
TIE_GAP = 4e-4
LINK = "link"
FINGERPRINT = "rig"
_PACKED: WeakKeyDictionary[PreTrainedModel, DecoderWeights] = WeakKeyDictionary()


@dataclass(frozen=True)
class Reference:
    """Greedy answer of transformers' generate in float32; ``logits`` (tokens, vocab)."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logits: torch.Tensor


@torch.inference_mode()
def reference_answer(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> Reference:
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = tuple(output.sequences[0, len(prompt) :].tolist())
    return Reference(tuple(prompt), tokens, torch.stack([row[0].cpu() for row in output.logits]))


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do: to a logit, and between the reference's best two so that either is
    right. Rows stored as int8 can differ by a step where a rounding fell the other way."""

    logit: float = MAX_LOGIT_DIFFERENCE
    tie_gap: float = TIE_GAP


@dataclass
class GateReport:
    tolerance: Tolerance = Tolerance()
    num_positions: int = 0
    num_ties: int = 0
    max_difference: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def assert_passes(self) -> None:
        assert self.num_positions > 0
        assert not self.wrong, self.wrong[:5]
        assert self.max_difference <= self.tolerance.logit, self.max_difference


class TeacherSampler(Sampler):
    """Draws what the engine would draw, judges it, then answers with the reference's token.

    So every position is compared under the same history, and a rounding tie at one position does
    not hide the ones after it.
    """

    def __init__(self, tolerance: Tolerance = Tolerance()) -> None:
        super().__init__()
        self.references: dict[str, Reference] = {}
        self.report = GateReport(tolerance)

    def sample(self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]) -> torch.Tensor:
        drawn = super().sample(logits, ending)
        told = drawn.tolist()
        rows = logits.cpu()
        first = 0
        for item, run in zip(ending, accepted_runs(ending, told), strict=True):
            for index in range(first, first + len(run)):
                position = item.own_stop - item.request.num_prompt_tokens + index - first
                told[index] = self._judge(rows[index], item.request, position, run[index - first])
                if told[index] != run[index - first]:
                    break  # it is no draft: what follows had another history, and is not told
            first += item.num_logit_rows
        return torch.tensor(told, device=drawn.device)

    def _judge(self, row: torch.Tensor, request: Request, position: int, token: int) -> int:
        reference = self.references[request.key.request_id]
        expected = reference.token_ids[position]
        wanted = reference.logits[position]
        report = self.report
        report.num_positions += 1
        report.max_difference = max(report.max_difference, float((row - wanted).abs().max()))
        if token != expected:
            best = wanted.topk(2).values
            gap = report.tolerance.tie_gap
            if float(best[0] - best[1]) <= gap and float(best[0] - wanted[token]) <= gap:
                report.num_ties += 1
            else:
                report.wrong.append(
                    f"{request.key.request_id}[{position}]: {token}, not {expected}"
                )
        return expected


@dataclass(frozen=True)
class RigOptions:
    block_size: int = 16
    num_blocks: int = 256
    max_model_len: int = 1024
    max_num_seqs: int = 32
    chunk: int = 4096
    max_itl_factor: float = 1e9  # chunks are as large as ``chunk`` says, whatever the clock says
    is_caching: bool = True
    is_coalescing: bool = True
    backend: str = "cpu"
    device: str = "cpu"
    policy: str = "lru"
    num_host: int = 0  # blocks; 0 for no such tier
    disk_folder: Path | None = None
    num_disk: int = 0
    host_dtype: str = "exact"
    kv_dtype: str = "float32"  # or int8
    is_compiled: bool = True
    runs_ahead: bool = False  # on a CPU over a device that computes as late as it may
    eos_token_ids: tuple[int, ...] = ()
    score_rows: int = 1024  # that a step may score of prompts


class EngineRig:
    """The worker's parts as its composition root joins them, without link and loader."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: RigOptions,
        sampler: Sampler | None = None,
        speculator: Speculator | Callable[[Cache, StepCosts], Speculator] | None = None,
        make_forward: Callable[[PreTrainedModel, DeviceTier], Forward] | None = None,
        compile: Compile = no_grammars,
    ) -> None:
        """``make_forward`` takes the place of the eager pass over ``options.backend``."""
        register_attention()
        self.options = options
        self.spec = kv_spec(model, options.block_size, options.kv_dtype)
        self.tier = DeviceTier(self.spec, options.num_blocks, torch.device(options.device))
        pacer = PrefillPacer(options.max_itl_factor, options.chunk)
        self.arrived = threading.Event()
        self.tiers = build_tiers(options, self.tier, self.arrived.set)
        self.cache = build_cache(options, None if self.tiers is None else self.tiers.lower)
        if self.tiers is not None:
            assert isinstance(self.cache, DividedCache)
            self.num_restored = self.tiers.restore_into(self.cache.inner)
        self.sampler = sampler if sampler is not None else TeacherSampler()
        num_heads = model.config.num_attention_heads
        backend = build_attention(options.backend, self.tier, num_heads, torch.float32)
        self.scheduler = Scheduler(
            self.cache,
            pacer,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            eos_token_ids=options.eos_token_ids,
            coalescer=(
                Coalescer(options.block_size)
                if options.is_caching and options.is_coalescing
                else None
            ),
            score_room=ScoreRoom(MAX_SCORED_LOGITS // options.score_rows),
            speculator=speculator(self.cache, pacer.costs) if callable(speculator) else speculator,
        )
        self._model = model
        self.grammars = GrammarDesk(compile, self.arrived.set)
        limits = EngineLimits(
            fingerprint=FINGERPRINT,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            vocab_size=model.config.vocab_size,
            max_num_waiting=1024,
        )
        if make_forward is None:
            forward = self._forward(model, backend)
        else:
            with self.paged():
                forward = make_forward(model, self.tier)
        runner: Runner = ModelRunner(forward, self.tier, self.sampler)
        if options.runs_ahead and options.device == "cpu":
            runner = DeferredRunner(runner)
        self.runner = runner
        self.engine = Engine(
            self.scheduler,
            runner,
            self.cache,
            pacer,
            limits,
            time.monotonic,
            self.grammars,
            runs_ahead=options.runs_ahead,
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def _forward(self, model: PreTrainedModel, backend: AttentionBackend) -> Forward:
        """The compiled one where the model has it, as a worker does, unless the options say no."""
        if self.options.is_compiled and self.options.backend == "cpu" and fits(model):
            return CompiledDecoder(decoder_weights(model), self.tier)
        return EagerForward(model, backend, self.tier.keys.device)

    def submit(
        self, name: str, prompt: Sequence[int], params: SamplingParams, cache_salt: str = ""
    ) -> None:
        self.engine.add_request(
            LINK,
            AddRequest(
                request_id=name,
                prompt_token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
                sampling_params=params,
                cache_salt=cache_salt,
            ),
        )

    @contextmanager
    def paged(self) -> Iterator[None]:
        """The paged attention in place of the model's own."""
        before = self._model.config._attn_implementation
        self._model.config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            self._model.config._attn_implementation = before

    def step(self) -> None:
        with self.paged():
            self.engine.step()
        for output in self.engine.take_outputs().get(LINK, ()):
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.engine.check_integrity()
                return
            self.step()
            if self.engine.is_stalled:
                assert self.arrived.wait(10), "nothing runs and nothing arrives"
            self.arrived.clear()
        raise AssertionError(f"not done after {max_steps} steps")

    def settle(self, timeout_s: float = 10.0) -> None:
        """Let all that is still to be copied to lower tiers be copied."""
        until = time.monotonic() + timeout_s
        while self.engine.is_saving:
            assert time.monotonic() < until, "transfers do not end"
            self.arrived.wait(0.05)
            self.arrived.clear()
            self.engine.advance_transfers()
        self.engine.check_integrity()

    def close(self) -> None:
        self.grammars.close()
        if self.tiers is not None:
            self.tiers.threads.close()

    def check(self, references: Mapping[str, Reference]) -> GateReport:
        """Serve all references at once, greedily; returns the report so far."""
        assert isinstance(self.sampler, TeacherSampler)
        for name, reference in references.items():
            self.sampler.references[name] = reference
            self.submit(name, reference.prompt, greedy(len(reference.token_ids)))
        self.run()
        for name, reference in references.items():
            assert self.tokens(name) == reference.token_ids
        return self.sampler.report

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for output in self.outputs[name] for token in output.token_ids)

    def block_ids_of(self, prompt: Sequence[int]) -> list[int]:
        """The tree's blocks of a prompt that was served before."""
        ids = np.asarray(prompt, dtype=np.int32)
        lease = self.cache.acquire(self.cache.match(Namespace(FINGERPRINT), ids))
        block_ids = list(lease.block_ids)
        self.cache.release(lease, ids, lease.num_cached_tokens)
        return block_ids

    def num_cached(self, name: str) -> int:
        cached = [
            o.num_cached_tokens for o in self.outputs[name] if o.num_cached_tokens is not None
        ]
        assert len(cached) == 1
        return cached[0]


def decoder_weights(model: PreTrainedModel) -> DecoderWeights:
    """Packed once for all rigs of a model, which stays whole: it is its own reference."""
    packed = _PACKED.get(model)
    if packed is None:
        packed = _PACKED[model] = DecoderWeights.take(copy.deepcopy(model))
    return packed


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def build_cache(options: RigOptions, lower: LowerTiers | None) -> Cache:
    if not options.is_caching:
        return NullCache(options.num_blocks, options.block_size)
    policy = make_eviction_policy(options.policy)
    inner = PrefixCache(
        options.num_blocks, options.block_size, policy, lower, clock_ns=time.time_ns
    )
    return DividedCache(inner, SharedPrefixes(options.block_size))  # as a worker has it


def build_tiers(
    options: RigOptions, device: DeviceTier, wake: Callable[[], None]
) -> WorkerTiers | None:
    """As a worker does; sizes in blocks. Prefill counts as slow, so that every hit is loaded."""
    payload = make_codec(options.host_dtype, device.spec).payload_bytes
    is_disk = options.disk_folder is not None
    config = WorkerConfig(
        endpoint="",
        worker_id="rig",
        host_cache_size=options.num_host * payload,
        host_cache_dtype=options.host_dtype,
        disk_cache_dir=str(options.disk_folder) if is_disk else None,
        disk_cache_size=disk_cache_size(options.num_disk, payload),
    )
    return build_lower_tiers(config, device, FINGERPRINT, lambda: None, wake, lambda line: None)


def disk_cache_size(num_blocks: int, payload_bytes: int) -> int:
    """Bytes that hold so many blocks, and somewhat more."""
    return num_blocks * (payload_bytes + 16384) + 65536


def kv_spec(model: PreTrainedModel, block_size: int, dtype: str = "float32") -> KVCacheSpec:
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVCacheSpec(
        block_size=block_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        dtype=dtype,
        bytes_per_element=1 if dtype == "int8" else 4,
    )
