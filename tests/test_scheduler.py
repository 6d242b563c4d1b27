"""The scheduler over the real cache and a scripted runner: order, progress, preemption, limits.

The runner stands where the model is: it answers with tokens made of each request's own history,
so a request that lost or mixed up its history answers differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_store.cache import Cache
from cache_store.eviction import make_eviction_policy
from cache_store.null_cache import NullCache
from cache_store.prefix_cache import PrefixCache
from model_worker.batch import ScheduledBatch, StepResult
from model_worker.coalescer import Coalescer
from model_worker.engine import MAX_FAILED_STEPS, Engine, EngineError, EngineLimits
from model_worker.pacer import PrefillPacer
from model_worker.protocol import AddRequest, ErrorCode, FinishReason, RequestOutput, SamplingParams
from model_worker.request import Request
from model_worker.scheduler import Scheduler

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


class ScriptedRunner:
    """Answers from the KV that the scheduler says is there: rows hold the tokens written to them,
    and an answer is computed from the rows of the block table, not from the request."""

    def __init__(self, num_blocks: int) -> None:
        self.rows = np.full((num_blocks, BLOCK), -1, dtype=np.int64)
        self.batches: list[ScheduledBatch] = []
        self.fails_next = False

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("scripted failure")
        self.batches.append(batch)
        for copy in batch.copies:
            source = self.rows[copy.source_block_id, : copy.num_rows]
            self.rows[copy.target_block_id, : copy.num_rows] = source
        written: set[int] = set()
        for item in batch.scheduled:
            written |= self._write(item.request, item.num_scheduled_tokens, written)
        return StepResult(
            tuple(
                next_token(self._read(item.request)) if item.reaches_end else None
                for item in batch.scheduled
            )
        )

    def _write(self, request: Request, count: int, written: set[int]) -> set[int]:
        assert request.lease is not None
        start = request.num_computed_tokens
        slots = set()
        for position in range(start, start + count):
            block_id = request.lease.block_ids[position // BLOCK]
            slot = block_id * BLOCK + position % BLOCK
            assert slot not in written, "two requests write the same row in one step"
            slots.add(slot)
            self.rows[block_id, position % BLOCK] = request.token_ids[position]
        return slots

    def _read(self, request: Request) -> list[int]:
        assert request.lease is not None
        ids = request.lease.block_ids
        return [
            int(self.rows[ids[position // BLOCK], position % BLOCK])
            for position in range(request.num_tokens)
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
    ) -> None:
        self.runner = ScriptedRunner(num_blocks)
        self.cache: Cache = (
            PrefixCache(num_blocks, BLOCK, make_eviction_policy("lru"))
            if is_caching
            else NullCache(num_blocks, BLOCK)
        )
        pacer = PrefillPacer(1e9, max_batched)
        self.scheduler = Scheduler(
            self.cache,
            pacer,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            eos_token_ids=eos_token_ids,
            coalescer=Coalescer(BLOCK) if is_caching else None,
        )
        limits = EngineLimits("model", BLOCK, MAX_MODEL_LEN, VOCAB, max_num_waiting)
        self.now_s = 0.0
        self.engine = Engine(self.scheduler, self.runner, self.cache, pacer, limits, self._tick)
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
            ),
        )

    def step(self) -> None:
        self.engine.step()
        self.collect()
        self.engine.check_integrity()

    def collect(self) -> None:
        for outputs in self.engine.take_outputs().values():
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.collect()
                return
            self.step()
        raise AssertionError("requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def ending(self, name: str) -> RequestOutput:
        endings = [o for o in self.outputs[name] if o.finish_reason is not None]
        assert len(endings) == 1
        assert endings[0] is self.outputs[name][-1]
        return endings[0]


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


def test_the_history_that_answers_is_the_one_in_the_blocks() -> None:
    world = World()
    world.add("a", prompt(11), 5)
    world.run()
    assert world.tokens("a") == answer_of(prompt(11), 5)
    assert world.ending("a").finish_reason is FinishReason.LENGTH
    first = world.outputs["a"][0]
    assert first.num_cached_tokens == 0
    assert first.queue_s is not None
    assert first.prefill_s is not None


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    world = World(max_batched=8)
    world.add("a", prompt(20), 2)
    world.run()
    assert [batch.num_tokens for batch in world.runner.batches] == [8, 8, 4, 1]
    assert [batch.num_prefill_tokens for batch in world.runner.batches] == [8, 8, 4, 0]
    # One message at admission, then one per token; chunks in between say nothing.
    assert [len(output.token_ids) for output in world.outputs["a"]] == [0, 1, 1]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    world = World(max_batched=8)
    world.add("short", prompt(4, 1), 10)
    world.step()
    world.add("long", prompt(30, 2), 2)
    for _ in range(4):
        world.step()
        last = world.runner.batches[-1]
        assert (last.num_decode_tokens, last.num_prefill_tokens) in {(1, 7), (1, 2)}
    assert len(world.tokens("short")) == 5


def test_admission_is_in_order_of_arrival_and_bounded() -> None:
    world = World(max_num_seqs=2)
    for number in range(5):
        world.add(f"r{number}", prompt(6, number), 3)
    order = []
    while world.engine.has_work:
        world.step()
        assert world.engine.stats().num_running <= 2
        order += [n for n, o in world.outputs.items() if n not in order and o]
    assert order == ["r0", "r1", "r2", "r3", "r4"]


def test_eight_on_one_cold_prefix_compute_it_once() -> None:
    world = World(num_blocks=200, max_num_seqs=8, max_batched=16)
    shared = prompt(40)
    for number in range(8):
        world.add(f"r{number}", [*shared, 1 + number, 2, 3], 3)
    world.run()
    for number in range(8):
        assert world.tokens(f"r{number}") == answer_of([*shared, 1 + number, 2, 3], 3)
    stats = world.engine.stats()
    assert stats.coalesced_requests_total == 7
    assert stats.prompt_tokens_computed_total == 43 + 7 * 3
    cached = [world.outputs[f"r{number}"][0].num_cached_tokens for number in range(8)]
    assert cached == [0] + [40] * 7


@pytest.mark.parametrize("is_cold", [True, False])
def test_equal_prompts_that_end_with_a_block_start_together(is_cold: bool) -> None:
    world = World(num_blocks=200, max_num_seqs=9, max_batched=64)
    shared = prompt(10 * BLOCK)
    world.add("first", shared, 20)
    if not is_cold:
        world.run()
    for number in range(8):
        world.add(f"r{number}", shared, 20)
    world.step()
    world.step()
    for number in range(8):
        assert world.tokens(f"r{number}")  # not one after the other, each behind the one before
    world.run()
    assert world.tokens("r7") == answer_of(shared, 20)
    assert world.engine.stats().prompt_tokens_computed_total == 10 * BLOCK + 8


def test_followers_go_on_when_their_leader_is_aborted_or_fails() -> None:
    for is_failure in (False, True):
        world = World(max_batched=8)
        shared = prompt(30)
        world.add("leader", [*shared, 1], 3)
        world.add("follower", [*shared, 2], 3)
        world.step()
        assert world.engine.stats().num_running == 1
        if is_failure:
            world.runner.fails_next = True
        else:
            world.engine.abort(LINK, "leader")
        world.run()
        assert world.tokens("follower") == answer_of([*shared, 2], 3)
        reason = FinishReason.ERROR if is_failure else FinishReason.ABORT
        assert world.ending("leader").finish_reason is reason


def test_the_youngest_is_preempted_and_resumes_as_a_hit() -> None:
    world = World(num_blocks=12, max_num_seqs=3, max_batched=64)
    for number in range(3):
        world.add(f"r{number}", prompt(12, number), 20)
    world.run()
    for number in range(3):
        assert world.tokens(f"r{number}") == answer_of(prompt(12, number), 20)
        cached = [o.num_cached_tokens for o in world.outputs[f"r{number}"]]
        # Reported once, at first admission: what a resume finds is no hit of the client's.
        assert [c for c in cached if c is not None] == [0]
    assert world.engine.stats().preemptions_total > 0
    first_done = [n for n in world.outputs if world.ending(n)]
    assert first_done[0] == "r0"


@pytest.mark.parametrize("num_blocks", [8, 12, 16])
def test_duplicates_of_the_trees_blocks_do_not_end_the_last_request(num_blocks: int) -> None:
    # Both compute the same answer, so what the longer one holds of it is twice in the pool.
    world = World(num_blocks, max_num_seqs=2, max_batched=64)
    longest = (num_blocks - 1) * BLOCK
    world.add("short", prompt(5), 8)
    world.add("long", prompt(5), longest - 5)
    world.run()
    assert world.tokens("long") == answer_of(prompt(5), longest - 5)
    assert world.ending("long").finish_reason is FinishReason.LENGTH


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    world = World(num_blocks=10)
    world.add("large", prompt(30), 20)
    world.collect()
    error = world.ending("large").error
    assert error is not None
    assert error.code is ErrorCode.NEVER_FITS
    assert "50 tokens, 14 blocks; the KV pool has 10" in error.message
    assert not world.engine.has_work


@pytest.mark.parametrize(
    ("ids", "params", "code", "param"),
    [
        ([1] * 64, {}, ErrorCode.CONTEXT_LENGTH, None),
        ([], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([VOCAB], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([-1], {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ([1], {"temperature": 3.0}, ErrorCode.INVALID_REQUEST, "temperature"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, ErrorCode.INVALID_REQUEST, "logit_bias"),
    ],
)
def test_bad_requests_end_with_a_typed_error(
    ids: list[int], params: dict[str, object], code: ErrorCode, param: str | None
) -> None:
    world = World()
    world.add("bad", ids, **params)
    world.collect()
    error = world.ending("bad").error
    assert error is not None
    assert (error.code, error.param) == (code, param)


def test_bytes_that_are_no_token_ids_do_not_end_the_engine() -> None:
    world = World()
    params = SamplingParams(max_tokens=1)
    message = AddRequest(request_id="torn", prompt_token_ids=b"12345", sampling_params=params)
    world.engine.add_request(LINK, message)
    world.collect()
    error = world.ending("torn").error
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "prompt")


def test_a_full_queue_refuses_and_the_context_end_stops() -> None:
    world = World(max_num_waiting=2)
    for number in range(3):
        world.add(f"r{number}", prompt(60, number), 100)
    world.run()
    assert world.ending("r2").error is not None
    assert world.ending("r2").error.code is ErrorCode.OVERLOADED  # type: ignore[union-attr]
    assert world.tokens("r0") == answer_of(prompt(60, 0), MAX_MODEL_LEN - 60)
    assert world.ending("r0").finish_reason is FinishReason.LENGTH


def test_stop_tokens_end_and_ignore_eos_does_not() -> None:
    answer = answer_of(prompt(9), 8)
    world = World(eos_token_ids=(answer[3],))
    world.add("eos", prompt(9), 8)
    world.run()
    assert world.tokens("eos") == answer[: answer.index(answer[3]) + 1]
    assert world.ending("eos").stop_token_id == answer[3]
    world.add("ignore", prompt(9), 8, ignore_eos=True)
    world.add("stop", prompt(9), 8, ignore_eos=True, stop_token_ids=(answer[5],))
    world.run()
    assert world.tokens("ignore") == answer
    assert world.ending("ignore").stop_token_id is None
    assert world.tokens("stop") == answer[: answer.index(answer[5]) + 1]


def test_a_device_that_fails_for_good_ends_the_engine() -> None:
    world = World()
    for number in range(MAX_FAILED_STEPS):
        world.add(f"r{number}", prompt(5, number))
        world.runner.fails_next = True
        if number == MAX_FAILED_STEPS - 1:
            with pytest.raises(EngineError, match="5 steps failed in a row"):
                world.engine.step()
            return
        world.step()
        assert world.ending(f"r{number}").error is not None


def test_a_request_that_waits_for_room_is_no_hit_at_every_step() -> None:
    world = World(num_blocks=17, max_batched=64)
    world.add("first", prompt(16), 1)
    world.run()
    world.add("large", prompt(40, 1), 20)
    world.step()
    acquired = []
    acquire = world.cache.acquire
    world.cache.acquire = lambda *args: acquired.append(args) or acquire(*args)  # type: ignore[method-assign, func-returns-value]
    world.add("waits", [*prompt(16), *prompt(40, 2)], 8)
    for _ in range(5):
        world.step()
    assert world.engine.stats().num_waiting == 1
    assert acquired == []
    world.run()
    assert world.tokens("waits") == answer_of([*prompt(16), *prompt(40, 2)], 8)


def test_a_lost_link_takes_its_requests_along() -> None:
    world = World()
    world.add("mine", prompt(9), 8, link="a")
    world.add("other", prompt(9, 1), 8, link="b")
    world.step()
    world.engine.abort_link("a")
    world.run()
    assert world.tokens("other") == answer_of(prompt(9, 1), 8)
    assert all(output.finish_reason is None for output in world.outputs["mine"])
    assert world.engine.stats().num_locked_blocks == 0


def test_a_repeated_request_id_changes_nothing() -> None:
    world = World()
    world.add("a", prompt(9), 4)
    world.add("a", prompt(9, 5), 4)
    world.run()
    assert world.tokens("a") == answer_of(prompt(9), 4)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures, resets and steps over small pools: every request ends
    exactly once, with the right tokens, and no block is lost."""

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        max_batched=st.integers(6, 40),
        is_caching=st.booleans(),
    )
    def build(self, num_blocks: int, max_num_seqs: int, max_batched: int, is_caching: bool) -> None:
        self.world = World(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched=max_batched,
            is_caching=is_caching,
        )
        self.wanted: dict[str, list[int]] = {}
        self.ended_early: set[str] = set()

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(1, 20),
        own=st.lists(st.integers(1, 3), max_size=6),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "s"]),
    )
    def arrive(self, base: int, shared: int, own: list[int], max_tokens: int, salt: str) -> None:
        name = f"r{len(self.wanted)}"
        ids = [*prompt(20, base)[:shared], *own]
        self.wanted[name] = answer_of(ids, max_tokens)
        self.world.add(name, ids, max_tokens, salt=salt)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        name = f"r{number}"
        if name in self.wanted:
            self.ended_early.add(name)
            self.world.engine.abort(LINK, name)

    @rule()
    def fail_a_step(self) -> None:
        self.world.runner.fails_next = True
        # The fifth in a row ends a worker; here its requests go on.
        with contextlib.suppress(EngineError):
            self.world.step()
        self.world.runner.fails_next = False

    @rule()
    def reset(self) -> None:
        self.world.engine.reset_cache()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        stats = self.world.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_locked_blocks) == (0, 0, 0)
        assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
        for name, wanted in self.wanted.items():
            ending = self.world.ending(name)
            tokens = self.world.tokens(name)
            if ending.finish_reason is FinishReason.LENGTH:
                assert tokens == wanted
            else:
                assert ending.error is not None or name in self.ended_early
                # Who has begun is not told later that it does not fit.
                code = None if ending.error is None else ending.error.code
                assert code in (None, ErrorCode.INTERNAL) or not tokens
                assert tokens == wanted[: len(tokens)]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
