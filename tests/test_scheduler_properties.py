"""Random lives of requests over small pools, with and without tiers below them.

Every request ends exactly once, with the right tokens and the right account of what it found, and
no block is lost; transfers end at any moment, in any order, and may fail half-way. Some lives have
drafts: right, wrong, and right up to somewhere. In some the next step is launched before the result
of the one before is known, over a device that computes as late as it may.
"""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_worker.engine import EngineError
from model_worker.protocol import ErrorCode, FinishReason, PrefixAction, TenantPolicy
from model_worker.request import Request
from tests.draft_kit import ScriptedSpeculator, spoiled
from tests.scheduler_kit import LINK, VOCAB, World, answer_of, prompt

DRAFTS = ((0, 0), (0, 0), (6, 6), (6, 0), (9, 5))  # how many, and how many at most are right
TENANTS = ("a", "a", "b", "c")
LOWER = ((0, 0), (0, 0), (40, 0), (6, 0), (0, 30), (4, 12), (10, 60), (1, 2))


def guess(request: Request, count: int, most_right: int) -> list[int]:
    history = request.token_ids.tolist()
    num_right = sum(history) % (most_right + 1)
    return spoiled(answer_of(history, count), num_right, VOCAB)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        max_batched=st.integers(6, 40),
        is_caching=st.sampled_from((True, True, True, False)),
        lower=st.sampled_from(LOWER),
        write_blocks=st.sampled_from((1, 3, 64)),
        prefill_token_s=st.sampled_from((None, 0.01)),
        drafts=st.sampled_from(DRAFTS),
        runs_ahead=st.booleans(),
        has_tenants=st.sampled_from((True, True, False)),
    )
    def build(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_batched: int,
        is_caching: bool,
        lower: tuple[int, int],
        write_blocks: int,
        prefill_token_s: float | None,
        drafts: tuple[int, int],
        runs_ahead: bool,
        has_tenants: bool,
    ) -> None:
        self.runs_ahead = runs_ahead
        self.has_tenants = has_tenants
        self.speculator = ScriptedSpeculator(lambda request: guess(request, *drafts))
        self.world = World(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_batched=max_batched,
            is_caching=is_caching,
            num_host=lower[0],
            num_disk=lower[1],
            write_blocks=write_blocks,
            prefill_token_s=prefill_token_s,
            speculator=self.speculator if drafts[0] else None,
            runs_ahead=runs_ahead,
        )
        self.wanted: dict[str, list[int]] = {}
        self.stopped: dict[str, bool] = {}
        self.ended_early: set[str] = set()
        self.refused: set[str] = set()

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(1, 20),
        own=st.lists(st.integers(1, 3), max_size=6),
        max_tokens=st.integers(0, 12),
        salt=st.sampled_from(["", "", "s"]),
        stop=st.sampled_from((None, None, None, 0, 1, 5)),
        needs_tokens=st.sampled_from((False, False, False, True)),
        tenant=st.sampled_from(TENANTS),
    )
    def arrive(
        self,
        base: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        salt: str,
        stop: int | None,
        needs_tokens: bool,
        tenant: str,
    ) -> None:
        """``stop``: where a stop token is, if the answer is as long."""
        name = f"r{len(self.wanted)}"
        ids = [*prompt(20, base)[:shared], *own]
        wanted = answer_of(ids, max_tokens)
        ends = wanted[stop : stop + 1] if stop is not None else []
        self.wanted[name] = wanted[: wanted.index(ends[0]) + 1] if ends else wanted
        self.stopped[name] = bool(ends)
        params: dict[str, object] = (
            {"frequency_penalty": 1.0} if needs_tokens else {}
        )  # which this model ignores
        tenant = tenant if self.has_tenants else ""
        params["stop_token_ids"] = tuple(ends)
        self.world.add(name, ids, max_tokens, salt=salt, tenant=tenant, **params)
        self.world.collect()
        if name in self.world.outputs:
            self.refused.add(name)

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

    @rule(is_late=st.booleans())
    def fail_a_step(self, is_late: bool) -> None:
        """``is_late``: its launch does not fail, but its result does."""
        device = self.world.device
        self.world.runner.fails_next = not self.runs_ahead
        device.fails_result, device.fails_launch = is_late, not is_late
        # The fifth in a row ends a worker; here its requests go on.
        with contextlib.suppress(EngineError):
            self.world.step()
        self.world.runner.fails_next = device.fails_result = device.fails_launch = False

    @rule(weight=st.sampled_from((0.2, 1.0, 5.0)), cap=st.sampled_from((None, 0, 2, 9)))
    def set_policies(self, weight: float, cap: int | None) -> None:
        policy = TenantPolicy(tenant="a", weight=weight, max_device_bytes=cap)
        self.world.engine.set_tenant_policies([policy])

    @rule()
    def reset(self) -> None:
        self.world.engine.reset_cache()

    # ------------------------------------------------------------ lower tiers

    @precondition(lambda self: self.world.copier.orders)
    @rule(
        index=st.integers(0, 9),
        num_done=st.sampled_from((None, None, None, 0, 1, 3)),
        seconds=st.sampled_from((0.001, 0.001, 9.0)),
    )
    def transfer(self, index: int, num_done: int | None, seconds: float) -> None:
        self.world.copier.finish(index, num_done, seconds)

    @rule(seconds=st.sampled_from((20.0, 3000.0)))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(
        action=st.sampled_from(list(PrefixAction)),
        base=st.integers(0, 2),
        shared=st.integers(1, 20),
        keep=st.integers(0, 8),
    )
    def act_on_prefix(self, action: PrefixAction, base: int, shared: int, keep: int) -> None:
        self.world.act(action, prompt(20, base)[:shared], keep)

    # ------------------------------------------------------------ always

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        self.world.settle()
        self.world.engine.check_integrity()
        stats = self.world.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_locked_blocks) == (0, 0, 0)
        assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
        for name in self.wanted:
            self.check_answer(name)
            self.check_account(name)
        self.check_drafts()

    def check_answer(self, name: str) -> None:
        ending, tokens, wanted = self.world.ending(name), self.world.tokens(name), self.wanted[name]
        if ending.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert tokens == wanted
            is_stop = ending.finish_reason is FinishReason.STOP
            assert is_stop == self.stopped[name]
            return
        assert tokens == wanted[: len(tokens)]
        if ending.error is None:
            assert name in self.ended_early
        elif name not in self.refused:
            # Who was let in is not told later that it does not fit.
            assert ending.error.code is ErrorCode.INTERNAL

    def check_account(self, name: str) -> None:
        """What a request found is told once, and is what it really did not compute."""
        told = [
            (output.num_cached_tokens, output.num_host_tokens, output.num_disk_tokens)
            for output in self.world.outputs[name]
            if output.num_cached_tokens is not None
        ]
        assert told in ([], [self.world.runner.found.get(name)])
        for output in self.world.outputs[name][1:]:
            assert (output.num_host_tokens, output.num_disk_tokens) == (0, 0)

    def check_drafts(self) -> None:
        stats, speculator = self.world.scheduler.counters, self.speculator
        assert (stats.draft_tokens, stats.accepted_tokens) == (
            speculator.num_drafts,
            speculator.num_accepted,
        )
        batches = self.world.runner.batches
        # What a failed step would have verified was never counted, as its tokens were not; nor what
        # belonged to a request that was aborted under a step.
        num_drafts = sum(batch.num_draft_tokens for batch in batches)
        assert stats.draft_tokens == num_drafts or (
            self.runs_ahead and stats.draft_tokens < num_drafts
        )


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
