"""An engine over the real cache and a scripted runner, for tests of the scheduler.

The runner stands where the model is: it answers with tokens made of each request's own history, as
it stands in the rows of the request's blocks, so a request that lost or mixed up its history
answers differently. Tiers below the device are arrays of such rows; their copies are made when a
test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cache_store.cache import Cache
from cache_store.divided_cache import DividedCache
from cache_store.events import Tier
from cache_store.eviction import make_eviction_policy
from cache_store.load_planner import LoadPlanner
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache
from cache_store.shared_prefixes import SharedPrefixes
from cache_store.transfer import TransferOrder, TransferResult
from cache_store.transfer_desk import LowerTiers
from model_worker.admission import EngineLimits
from model_worker.batch import ScheduledBatch, ScheduledRequest, StepResult
from model_worker.coalescer import Coalescer
from model_worker.engine import Engine
from model_worker.grammar import no_grammars
from model_worker.grammar_desk import GrammarDesk
from model_worker.model_runner import CompletedStep
from model_worker.pacer import PrefillPacer
from model_worker.protocol import (
    AddRequest,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    RequestOutput,
    SamplingParams,
)
from model_worker.request import Request
from model_worker.scheduler import Scheduler
from model_worker.score_room import ScoreRoom
from model_worker.speculation import Speculator
from model_worker.step_costs import StepCosts
from tests.deferred import DeferredRunner

BLOCK = 4
VOCAB = 50
LINK = "link"
MAX_MODEL_LEN = 64


def next_token(history: Sequence[int]) -> int:
    """The scripted model: a function of the whole history, never the end-of-sequence token 0."""
    return 1 + (sum((i + 1) * int(token) for i, token in enumerate(history)) * 31) % (VOCAB - 1)


def answer_of(prompt: Sequence[int], num_tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class RowCopier:
    """The transfers of a world: ``orders`` are under way until :meth:`finish` copies their rows."""

    def __init__(self, rows: dict[Tier, np.ndarray]) -> None:
        self.rows = rows
        self.orders: list[TransferOrder] = []
        self.results: list[TransferResult] = []

    def submit(self, order: TransferOrder) -> None:
        self.orders.append(order)

    def delete(self, tier: Tier, block_ids: Sequence[int]) -> None:
        assert not self.in_use(tier) & set(block_ids), "a block is deleted while it is copied"
        self.rows[tier][list(block_ids)] = -1

    def in_use(self, tier: Tier) -> set[int]:
        """Blocks that are read or written by what is under way."""
        ends = [(order.source, order.source_ids) for order in self.orders]
        ends += [(order.target, order.target_ids) for order in self.orders]
        return {block_id for place, ids in ends if place is tier for block_id in ids}

    def take_results(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def close(self) -> None:
        pass

    def finish(self, index: int = 0, num_done: int | None = None, seconds: float = 0.001) -> None:
        """``num_done`` blocks arrive, all of them if None."""
        order = self.orders.pop(index % len(self.orders))
        total = len(order.source_ids)
        count = total if num_done is None else min(num_done, total)
        moved = self.rows[order.source][order.source_ids[:count]]
        self.rows[order.target][order.target_ids[:count]] = moved
        error = "" if count == total else "scripted"
        self.results.append(TransferResult(order.number, count, seconds, error))


class ScriptedRunner:
    """Answers from the KV that the scheduler says is there: rows hold the tokens written to them,
    and an answer is computed from the rows of the block table, not from the request."""

    def __init__(self, num_blocks: int) -> None:
        self.rows = np.full((num_blocks, BLOCK), -1, dtype=np.int64)
        self.batches: list[ScheduledBatch] = []
        self.copier: RowCopier | None = None
        self.fails_next = False
        # (cached, host, disk) tokens that each request had when it was first computed
        self.found: dict[str, tuple[int, int, int]] = {}
        self._drawn: dict[Request, int] = {}  # by the step before
        self.broken: list[AssertionError] = []

    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("scripted failure")
        try:
            return self._compute(batch)
        except AssertionError as error:
            self.broken.append(error)  # an engine takes it for a step that failed
            raise

    def _compute(self, batch: ScheduledBatch) -> CompletedStep:
        self.batches.append(batch)
        for item in batch.scheduled:
            self._note(item)
        for copy in batch.copies:
            source = self.rows[copy.source_block_id, : copy.num_rows]
            self.rows[copy.target_block_id, : copy.num_rows] = source
        written: set[int] = set()
        for item in batch.scheduled:
            written |= self._write(item, written)
        runs = tuple(self._answer(item) for item in batch.scheduled)
        drawn = zip(batch.scheduled, runs, strict=True)
        self._drawn = {item.request: run[0] for item, run in drawn if run}
        return CompletedStep(StepResult(runs))

    def _answer(self, item: ScheduledRequest) -> tuple[int, ...]:
        run: list[int] = []
        for draft in (*item.draft_token_ids, None) if item.reaches_end else ():
            run.append(next_token(self._read(item, len(run))))
            if run[-1] != draft:
                break
        return tuple(run)

    def _note(self, item: ScheduledRequest) -> None:
        request = item.request
        lease = request.lease
        assert lease is not None
        assert not lease.is_loading, "computed before its blocks were there"
        assert not lease.has_failed, "computed without its blocks"
        found = item.start, lease.num_host_tokens, lease.num_disk_tokens
        self.found.setdefault(request.key.request_id, found)

    def _write(self, item: ScheduledRequest, written: set[int]) -> set[int]:
        request = item.request
        assert request.lease is not None
        start = item.start
        own = request.token_ids[start : item.own_stop].tolist()
        if item.takes_drawn:
            drawn = [self._drawn[request]]
            assert own in ([], drawn), "not what the host was told"
            own = drawn
        tokens = [*own, *item.draft_token_ids]
        assert len(tokens) == item.num_scheduled_tokens
        copied = set() if self.copier is None else self.copier.in_use(Tier.DEVICE)
        slots = set()
        for position, token in enumerate(tokens, start):
            block_id = request.lease.block_ids[position // BLOCK]
            slot = block_id * BLOCK + position % BLOCK
            assert block_id not in copied, "a block is written while it is copied"
            assert slot not in written, "two requests write the same row in one step"
            slots.add(slot)
            self.rows[block_id, position % BLOCK] = token
        return slots

    def _read(self, item: ScheduledRequest, num_drafts: int) -> list[int]:
        assert item.request.lease is not None
        ids = item.request.lease.block_ids
        return [
            int(self.rows[ids[position // BLOCK], position % BLOCK])
            for position in range(item.own_stop + num_drafts)
        ]


class World:
    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_seqs: int = 4,
        max_batched: int = 16,
        is_caching: bool = True,
        max_num_waiting: int = 100,
        eos_token_ids: tuple[int, ...] = (),
        num_host: int = 0,
        num_disk: int = 0,
        write_blocks: int = 64,
        prefill_token_s: float | None = None,
        speculator: Speculator | Callable[[Cache, StepCosts], Speculator] | None = None,
        runs_ahead: bool = False,
        block_bytes: int = 1,
        shared: Sequence[Sequence[int]] = (),
    ) -> None:
        """``runs_ahead``: with a device that computes as late as it may. ``shared``: prefixes that
        all namespaces have in common."""
        self.now_s = 0.0
        self.runner = ScriptedRunner(num_blocks)
        sizes = {Tier.HOST: num_host, Tier.DISK: num_disk}
        rows = {tier: np.full((size, BLOCK), -1, dtype=np.int64) for tier, size in sizes.items()}
        self.copier = RowCopier({Tier.DEVICE: self.runner.rows, **rows})
        self.runner.copier = self.copier
        self.planner = LoadPlanner(BLOCK, lambda: prefill_token_s, lambda: self.now_s)
        lower = LowerTiers(
            {tier: size for tier, size in sizes.items() if size},
            self.copier,
            self.planner,
            lambda: self.now_s,
            write_blocks,
        )
        policy = make_eviction_policy("lru")
        self.cache: Cache = (
            PrefixCache(num_blocks, BLOCK, policy, lower if lower.num_blocks else None)
            if is_caching
            else NullCache(num_blocks, BLOCK)
        )
        prefixes = SharedPrefixes(BLOCK)
        if isinstance(self.cache, PrefixCache):
            self.cache = DividedCache(self.cache, prefixes)
        self.pacer = pacer = PrefillPacer(1e9, max_batched)
        self.scheduler = Scheduler(
            self.cache,
            pacer,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
            coalescer=Coalescer(BLOCK) if is_caching else None,
            score_room=ScoreRoom(VOCAB),
            speculator=speculator(self.cache, pacer.costs) if callable(speculator) else speculator,
        )
        limits = EngineLimits(
            "model", BLOCK, MAX_MODEL_LEN, VOCAB, max_num_waiting, dict.fromkeys(Tier, block_bytes)
        )
        self.device = DeferredRunner(self.runner)
        self.engine = Engine(
            self.scheduler,
            self.device if runs_ahead else self.runner,
            self.cache,
            pacer,
            limits,
            self._tick,
            GrammarDesk(no_grammars),
            runs_ahead=runs_ahead,
            prefixes=prefixes,
        )
        self.share(*shared)
        self.outputs: dict[str, list[RequestOutput]] = {}

    def _tick(self) -> float:
        self.now_s += 0.25
        return self.now_s

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str = "",
        link: str = LINK,
        tenant: str = "",
        **params: object,
    ) -> None:
        fields = {"max_tokens": max_tokens, "temperature": 0.0, **params}
        self.engine.add_request(
            link,
            AddRequest(
                request_id=name,
                prompt_token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
                sampling_params=SamplingParams(**fields),  # type: ignore[arg-type]
                cache_salt=salt,
                tenant=tenant,
            ),
        )

    def share(self, *prefixes: Sequence[int]) -> None:
        self.engine.share_prefixes([np.asarray(ids, dtype="<i4").tobytes() for ids in prefixes])

    def act(
        self, action: PrefixAction, prompt: Sequence[int], keep: int = 0, salt: str = ""
    ) -> PrefixReply:
        encoded = np.asarray(prompt, dtype="<i4").tobytes()
        return self.engine.act_on_prefix(
            PrefixCommand(
                call_id="call",
                action=action,
                prompt_token_ids=encoded,
                cache_salt=salt,
                keep_num_tokens=keep,
            )
        )

    def step(self) -> None:
        self.engine.step()
        self.collect()
        self.engine.check_integrity()
        assert not self.runner.broken, self.runner.broken

    def settle(self) -> None:
        """All that is under way arrives, and what follows from it."""
        for _ in range(200):
            self.engine.advance_transfers()
            if not self.copier.orders:
                return
            self.copier.finish()
        raise AssertionError("transfers do not end")

    def collect(self) -> None:
        for outputs in self.engine.take_outputs().values():
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, max_steps: int = 2000) -> None:
        """To the end of all requests; a transfer ends only where nothing else can go on."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.collect()
                return
            self.step()
            if self.engine.is_stalled and self.engine.has_work and self.cache.has_transfers:
                self.copier.finish()
        raise AssertionError("requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def ending(self, name: str) -> RequestOutput:
        endings = [o for o in self.outputs[name] if o.finish_reason is not None]
        assert len(endings) == 1
        assert endings[0] is self.outputs[name][-1]
        return endings[0]


def prompt(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, count)]
