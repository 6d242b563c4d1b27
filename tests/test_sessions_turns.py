"""Turns of one session beside each other, and sessions that are deleted, over or left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from cache_store.metadata.base import MetadataError, SessionRecord
from cache_store.metadata.memory import MemoryMetadataStore
from model_worker.protocol import PrefixAction, PrefixReply
from service.config import GatewayConfig
from service.generation import Outcome
from service.sessions.blocks import DROP_LIMIT_S
from service.sessions.book import SessionLimits
from service.sessions.identity import SessionKey
from service.sessions.metrics import SessionMetrics
from service.sessions.reaper import SessionReaper
from service.sessions.sessions import Sessions, SessionSettings
from service.sessions.turn import ModelView, Turn
from service.tenants.directory import TenantDirectory
from service.workers.fake import FakeWorker
from tests.gateway_kit import BLOCK_SIZE, byte_ids_of, make_card, make_tokenizer
from tests.session_kit import TURN_END, ids_in

KEY = SessionKey("t", "s")


class FailingStore(MemoryMetadataStore):
    """Out of reach while ``is_away``."""

    is_away = False

    async def get_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        if self.is_away:
            raise MetadataError("away")
        return await super().get_session(tenant, session_id)

    async def put_session(self, record: SessionRecord, expected_version: int) -> bool:
        if self.is_away:
            raise MetadataError("away")
        return await super().put_session(record, expected_version)


class Bench:
    """Sessions over one fake worker, with a clock of our own."""

    def __init__(self, **limits: Any) -> None:
        self.now = 1_000_000.0
        self.store = FailingStore(clock=lambda: self.now, max_sessions=250_000)
        self.registry = CollectorRegistry()
        self.worker = FakeWorker(make_card(), lambda request: ())
        self.sessions = Sessions(
            self.store,
            SessionLimits(**limits),
            SessionMetrics(self.registry),
            lambda: [self.worker],
            TenantDirectory(GatewayConfig()),
            lambda: self.now,
        )
        self.sessions._reaper.take_up("t")
        self.model = ModelView("m", BLOCK_SIZE, make_tokenizer())

    @property
    def reaper(self) -> SessionReaper:
        return self.sessions._reaper

    async def begin(self, text: str, key: SessionKey = KEY, salt: str | None = None) -> Turn:
        turn = await self.sessions.begin_turn(key, self.model, salt)
        turn.ids_of_text(text)
        return turn

    async def say(self, text: str, answer: str, key: SessionKey = KEY) -> Turn:
        """A whole turn."""
        turn = await self.begin(text, key)
        await turn.keep(outcome(answer))
        turn.end()
        return turn

    async def stored(self, key: SessionKey = KEY) -> SessionRecord | None:
        return await self.sessions.records.get(key)

    def commands(self, action: PrefixAction) -> list[list[int]]:
        return [
            ids_in(command.prompt_token_ids)
            for command in self.worker.prefix_commands
            if command.action is action
        ]

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"headstart_session_{name}") or 0.0


def outcome(said: str, stop_token_id: int | None = TURN_END, *, text: str | None = None) -> Outcome:
    return Outcome(
        worker_id="fake",
        output_token_ids=byte_ids_of(said),
        text=said if text is None else text,
        stop_token_id=stop_token_id,
        num_cached_tokens=2,
    )


def chat(*turns: str) -> str:
    roles = ("user", "assistant")
    told = (
        f"<|im_start|>{roles[index % 2]}\n{turn}<|im_end|>\n" for index, turn in enumerate(turns)
    )
    return "".join(told) + "<|im_start|>assistant\n"


def served(turn: Turn, answer: str, stop: Sequence[int] = (TURN_END,)) -> list[int]:
    assert turn._prompt is not None
    return [*turn._prompt.token_ids.tolist(), *byte_ids_of(answer), *stop]


def run(test: Callable[[Bench], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        bench = Bench(**limits)
        await bench.worker.start()
        try:
            await asyncio.wait_for(test(bench), 30.0)
        finally:
            await bench.sessions.close()
            await bench.worker.close()

    asyncio.run(main())


# ---------------------------------------------------------------- two at once


def test_of_two_turns_at_once_the_first_to_end_stays_and_the_other_is_remembered() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        one = await bench.begin(chat("Hi", "hello", "one"))
        two = await bench.begin(chat("Hi", "hello", "two"))
        await one.keep(outcome("first"))
        await two.keep(outcome("second"))
        assert bench.count("conflicts_total") == 1
        after = await bench.begin(chat("Hi", "hello", "one", "first", "x"))
        assert after.history == "exact"
        assert after.stored_ids.tolist() == served(one, "first")
        other = await bench.begin(chat("Hi", "hello", "two", "second", "x"))
        assert other.history == "retokenized"
        await bench.sessions.delete(KEY)
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DROP) == [served(one, "first"), served(two, "second")]

    run(test)


def test_a_turn_that_goes_on_from_what_another_stored_meanwhile_is_added() -> None:
    async def test(bench: Bench) -> None:
        late = await bench.begin(chat("Hi", "hello", "more"))  # ahead of the turn it goes on from
        await bench.say(chat("Hi"), "hello")
        await late.keep(outcome("yes"))
        assert bench.count("conflicts_total") == 1
        after = await bench.begin(chat("Hi", "hello", "more", "yes", "x"))
        assert after.history == "exact"
        assert after.stored_ids.tolist() == served(late, "yes")

    run(test)


def test_turns_at_once_in_two_namespaces_are_not_mixed() -> None:
    async def test(bench: Bench) -> None:
        one = await bench.begin(chat("Hi"), salt="a")
        two = await bench.begin(chat("Hi"), salt="b")
        await one.keep(outcome("first"))
        await two.keep(outcome("second"))
        record = await bench.stored()
        assert record is not None
        assert record.cache_salt == "a"
        await bench.reaper.tick()
        (drop,) = bench.worker.prefix_commands
        assert (drop.action, drop.cache_salt) == (PrefixAction.DROP, "b")
        assert ids_in(drop.prompt_token_ids) == served(two, "second")

    run(test)


def test_two_first_turns_at_once_make_one_session() -> None:
    async def test(bench: Bench) -> None:
        one, two = await bench.begin(chat("one")), await bench.begin(chat("two"))
        await asyncio.gather(one.keep(outcome("a")), two.keep(outcome("b")))
        record = await bench.stored()
        assert record is not None
        assert record.version == 2
        assert record.num_cached_tokens_total == 4

    run(test)


def test_what_a_stopped_worker_computed_beyond_the_answer_is_added_later() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.begin(chat("Hi"))
        await turn.keep(outcome("hello STOP", None, text="hello "))

        async def at_last() -> Outcome:
            return outcome("hello STOP and", None, text="hello ")

        turn.keep_later(at_last())
        turn.end()
        assert KEY in bench.sessions._turns  # it is not over yet
        await asyncio.gather(*bench.sessions.blocks._tasks)
        assert KEY not in bench.sessions._turns
        record = await bench.stored()
        assert record is not None
        assert record.num_cached_tokens_total == 2  # counted once
        after = await bench.begin(chat("Hi", "hello ", "x"))
        assert after.history == "retokenized"
        assert after.stored_ids.tolist() == served(turn, "hello STOP and", ())

    run(test)


# ---------------------------------------------------------------- deleted, lost, out of reach


def test_a_turn_under_way_does_not_bring_a_deleted_session_back() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        turn = await bench.begin(chat("Hi", "hello", "more"))
        assert await bench.sessions.delete(KEY)
        await turn.keep(outcome("yes"))
        assert await bench.stored() is None
        await bench.reaper.tick()
        assert served(turn, "yes") in bench.commands(PrefixAction.DROP)

    run(test)


def test_a_first_turn_under_way_can_be_deleted() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.begin(chat("Hi"))
        assert await bench.sessions.delete(KEY)
        await turn.keep(outcome("yes"))
        turn.end()
        assert await bench.stored() is None
        assert not await bench.sessions.delete(KEY)

    run(test)


def test_a_session_deleted_by_another_gateway_is_not_brought_back() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        turn = await bench.begin(chat("Hi", "hello", "more"))
        await bench.store.delete_session("t", "s")
        await turn.keep(outcome("yes"))
        assert await bench.stored() is None

    run(test)


def test_a_store_out_of_reach_costs_the_history_and_nothing_else() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        bench.store.is_away = True
        turn = await bench.begin(chat("Hi", "hello", "more"))
        assert turn.history == "retokenized"
        await turn.keep(outcome("yes"))
        assert bench.count("store_errors_total") == 2
        bench.store.is_away = False
        assert (await bench.begin(chat("Hi", "hello", "x"))).history == "exact"

    run(test)


def test_a_history_of_another_model_is_lost_and_the_session_goes_on() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        bench.model = ModelView("other", BLOCK_SIZE, make_tokenizer())
        turn = await bench.say(chat("Hi", "hello", "more"), "yes")
        assert turn.history == "retokenized"
        assert (await bench.begin(chat("Hi", "hello", "more", "yes", "x"))).history == "exact"

    run(test)


# ---------------------------------------------------------------- left alone


def test_an_idle_session_leaves_the_device_once() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.say(chat("Hi"), "hello")
        for seconds, count in ((59.0, 0), (2.0, 1), (100.0, 1)):
            bench.now += seconds
            await bench.reaper.tick()
            assert bench.commands(PrefixAction.DEMOTE) == [served(turn, "hello")] * count
        await bench.say(chat("Hi", "hello", "x"), "yes")
        bench.now += 61
        await bench.reaper.tick()
        assert len(bench.commands(PrefixAction.DEMOTE)) == 2

    run(test)


def test_a_session_with_a_long_answer_is_not_idle() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        turn = await bench.begin(chat("Hi", "hello", "x"))
        bench.now += 100
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DEMOTE) == []
        await turn.keep(outcome("yes"))
        turn.end()
        bench.now += 61
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DEMOTE) == [served(turn, "yes")]

    run(test)


def test_what_a_fork_in_use_shares_stays_on_the_device() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.say(chat("Hi"), "hello")
        record = await bench.stored()
        assert record is not None
        forked = await bench.sessions.fork(record, "f", bench.model)
        assert forked is not None
        await bench.say(chat("Hi", "hello", "s"), "yes")
        bench.now += 50
        await bench.say(chat("Hi", "hello", "f"), "no", SessionKey("t", "f"))
        bench.now += 20
        await bench.reaper.tick()
        (command,) = [c for c in bench.worker.prefix_commands if c.action is PrefixAction.DEMOTE]
        shared = make_tokenizer().encode("\n<|im_start|>user\n", add_special_tokens=False)
        assert command.keep_num_tokens == len(served(turn, "hello")) + len(shared)

    run(test)


def test_a_session_is_over_after_its_time_and_its_blocks_go() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.say(chat("Hi"), "hello")
        record = await bench.stored()
        assert record is not None
        bench.now += 86_399
        assert await bench.stored() is not None
        bench.now += 2
        assert await bench.stored() is None
        assert (await bench.begin(chat("Hi", "hello", "x"))).history == "exact"  # a new one
        bench.sessions._turns.clear()
        await bench.reaper.tick()
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DROP) == [served(turn, "hello")]
        assert await bench.store.num_sessions() == 0

    run(test)


def test_an_end_that_the_store_did_not_see_comes_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        bench.now += 61
        await bench.reaper.tick()
        bench.now += 86_401
        bench.store.is_away = True
        with pytest.raises(MetadataError):
            await bench.reaper.tick()
        bench.store.is_away = False
        await bench.reaper.tick()
        assert len(bench.sessions._book) == 1
        bench.now += 61
        await bench.reaper.tick()
        assert len(bench.sessions._book) == 0

    run(test)


def test_a_time_of_its_own_is_kept_from_turn_to_turn() -> None:
    async def test(bench: Bench) -> None:
        await bench.sessions.create("t", "s", SessionSettings(ttl=10.0))
        for _ in range(3):
            bench.now += 9
            await bench.say(chat("Hi"), "hello")
        bench.now += 11
        assert await bench.stored() is None

    run(test)


def test_an_expired_name_can_be_taken_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.sessions.create("t", "s", SessionSettings(ttl=10.0))
        assert await bench.sessions.create("t", "s", SessionSettings()) is None
        bench.now += 11
        assert await bench.sessions.create("t", "s", SessionSettings()) is not None

    run(test)


def test_a_turn_of_a_session_whose_time_ran_out_begins_it_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        bench.now += 86_401
        turn = await bench.say(chat("Hi", "hello", "x"), "yes")
        assert turn.history == "exact"
        record = await bench.stored()
        assert record is not None
        assert record.created_at == bench.now
        assert (await bench.begin(chat("Hi", "hello", "x", "yes", "y"))).history == "exact"

    run(test)


def test_sessions_that_were_there_before_the_gateway_end_too() -> None:
    async def test(bench: Bench) -> None:
        before = Bench()
        before.now = bench.now
        turn = await before.say(chat("Hi"), "hello")
        record = await before.store.get_session("t", "s")
        assert record is not None
        await bench.store.put_session(msgspec.structs.replace(record, version=0), 0)
        await bench.reaper.tick()
        bench.now += 86_401
        await bench.reaper.tick()
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DROP) == [served(turn, "hello")]

    run(test)


def test_a_session_that_another_gateway_served_meanwhile_is_left_alone() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("Hi"), "hello")
        record = await bench.stored()
        assert record is not None
        bench.now += 50
        later = msgspec.structs.replace(
            record, last_active_at=bench.now, expires_at=record.expires_at + 50
        )
        assert await bench.store.put_session(later, record.version)
        bench.now += 20
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DEMOTE) == []
        bench.now += 50
        await bench.reaper.tick()
        assert len(bench.commands(PrefixAction.DEMOTE)) == 1

    run(test)


# ---------------------------------------------------------------- bounds


def test_beyond_the_limit_the_least_recently_active_sessions_go() -> None:
    async def test(bench: Bench) -> None:
        for number in range(6):
            await bench.say(chat("Hi"), "hello", SessionKey("t", f"s{number}"))
        await bench.say(chat("Hi"), "hello", SessionKey("t", "s0"))
        await bench.say(chat("Hi"), "hello", SessionKey("u", "s"))
        await bench.reaper.tick()
        kept = [r.session_id for r in (await bench.store.list_sessions("t"))[0]]
        assert kept == ["s0", "s4", "s5"]
        assert (await bench.store.list_sessions("u"))[0] != []

    run(test, max_sessions_per_tenant=3)


def test_in_all_the_tenant_with_the_most_sessions_gives_up_some() -> None:
    async def test(bench: Bench) -> None:
        for tenant, number in (("u", 0), ("t", 0), ("t", 1), ("t", 2)):
            await bench.say(chat("Hi"), "hello", SessionKey(tenant, f"s{number}"))
        await bench.reaper.tick()
        assert [r.session_id for r in (await bench.store.list_sessions("t"))[0]] == ["s1", "s2"]
        assert len((await bench.store.list_sessions("u"))[0]) == 1

    run(test, max_sessions=3)


def test_the_least_recently_active_history_is_given_up_and_its_session_goes_on() -> None:
    async def test(bench: Bench) -> None:
        one = await bench.say(chat("Hi"), "hello", SessionKey("t", "a"))
        await bench.say(chat("Hi"), "hello", SessionKey("t", "b"))
        await bench.reaper.tick()
        await bench.reaper.tick()
        assert bench.count("histories_given_up_total") == 1
        assert bench.commands(PrefixAction.DROP) == [served(one, "hello")]
        for name, history in (("a", "retokenized"), ("b", "exact")):
            turn = await bench.begin(chat("Hi", "hello", "x"), SessionKey("t", name))
            assert turn.history == history
        record = await bench.stored(SessionKey("t", "a"))
        assert record is not None
        assert record.num_prompt_tokens_total > 0

    run(test, max_history_bytes=400)


def test_a_hundred_thousand_sessions_that_nobody_closes() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.say(chat("Hi"), "hello")
        record = await bench.stored()
        assert record is not None
        for number in range(100_000):
            copy = msgspec.structs.replace(record, session_id=f"s{number}", version=0)
            await bench.sessions.records.put(copy, None)
        bench.now += 61
        await bench.reaper.tick()  # a bounded piece of work
        assert len(bench.commands(PrefixAction.DEMOTE)) == 200
        assert len(bench.sessions._book) == 100_001
        bench.now += 86_400
        await bench.reaper.tick()
        assert len(bench.sessions._book) == 100_001 - 200
        assert served(turn, "hello")

    run(test)


def test_a_deletion_that_a_worker_never_carries_out_is_given_up_at_last() -> None:
    async def test(bench: Bench) -> None:
        bench.worker.prefix_reply = PrefixReply(call_id="", num_blocks_left=1)
        await bench.say(chat("Hi"), "hello")
        await bench.sessions.delete(KEY)
        for seconds in (0.0, 0.5, 0.6, DROP_LIMIT_S):
            bench.now += seconds
            await bench.reaper.tick()
        assert len(bench.commands(PrefixAction.DROP)) == 3  # at 0 s, 1.1 s and the end
        assert bench.sessions.blocks.num_waiting_drops == 0
        assert bench.count("drops_given_up_total") == 1

    run(test)


def test_a_lost_worker_is_asked_when_it_is_back() -> None:
    async def test(bench: Bench) -> None:
        turn = await bench.say(chat("Hi"), "hello")
        bench.worker.set_lost()
        await bench.sessions.delete(KEY)
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DROP) == []
        bench.worker.set_ready()
        bench.now += 2
        await bench.reaper.tick()
        assert bench.commands(PrefixAction.DROP) == [served(turn, "hello")]
        assert bench.sessions.blocks.num_waiting_drops == 0

    run(test)


def test_nothing_of_a_text_is_stored_but_ids_and_digests() -> None:
    async def test(bench: Bench) -> None:
        await bench.say(chat("a secret word"), "another secret")
        record = await bench.stored()
        assert record is not None
        assert b"secret" not in msgspec.msgpack.encode(record)
        assert np.frombuffer(record.history, dtype=np.uint8).size < 700

    run(test)
