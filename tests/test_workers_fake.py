"""FakeWorker: the script, its endings, and plausible usage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec
import numpy as np

from cache_store.events import AllBlocksCleared, BlockStored, Tier
from model_worker.protocol import (
    AddRequest,
    ErrorCode,
    FinishReason,
    PrefixAction,
    PrefixCommand,
    PrefixReply,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from service.workers.base import WorkerState
from service.workers.cache_news import CacheNews
from service.workers.fake import FakeWorker, Script
from tests.scripted_worker import make_card
from tests.worker_rigs import collect, counting_script, first_token, tokens_of

EOS = 2


def answer(*token_ids: int) -> Script:
    return lambda request: token_ids


@contextlib.asynccontextmanager
async def started(
    script: Script = counting_script, token_interval: float = 0.0, **limits: int
) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(make_card(), script, token_interval, **limits)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


def make_request(
    request_id: str = "r",
    prompt: Iterable[int] = (10, 11, 12),
    *,
    max_tokens: int = 50,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    cache_salt: str = "",
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=np.fromiter(prompt, dtype="<i4").tobytes(),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        cache_salt=cache_salt,
    )


def num_cached(outputs: list[RequestOutput]) -> list[int]:
    return [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]


async def test_the_end_of_the_script_is_a_stop() -> None:
    async with started(answer(5, 6, 7)) as worker:
        outputs = await collect(worker.submit(make_request()))
    assert tokens_of(outputs) == [5, 6, 7]
    assert outputs[-1] == RequestOutput(request_id="r", finish_reason=FinishReason.STOP)


async def test_max_tokens_ends_with_length() -> None:
    async with started(answer(5, 6, 7)) as worker:
        outputs = await collect(worker.submit(make_request(max_tokens=2)))
    assert tokens_of(outputs) == [5, 6]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.LENGTH, None)


async def test_stop_tokens_count_and_are_named() -> None:
    async with started(answer(5, 6, 7, EOS, 9)) as worker:
        stopped = await collect(worker.submit(make_request(stop_token_ids=(6, 8))))
        ended = await collect(worker.submit(make_request()))
        ignored = await collect(worker.submit(make_request(ignore_eos=True)))
    assert tokens_of(stopped) == [5, 6]
    assert (stopped[-1].finish_reason, stopped[-1].stop_token_id) == (FinishReason.STOP, 6)
    assert tokens_of(ended) == [5, 6, 7, EOS]
    assert (ended[-1].finish_reason, ended[-1].stop_token_id) == (FinishReason.STOP, EOS)
    assert tokens_of(ignored) == [5, 6, 7, EOS, 9]


async def test_cached_tokens_are_the_longest_prefix_in_common() -> None:
    async with started(answer(90, 91)) as worker:
        cold = await collect(worker.submit(make_request(prompt=[1, 2, 3, 4])))
        same = await collect(worker.submit(make_request(prompt=[1, 2, 3, 4])))
        branch = await collect(worker.submit(make_request(prompt=[1, 2, 8, 9])))
        turn = await collect(worker.submit(make_request(prompt=[1, 2, 3, 4, 90, 91, 7])))
        salted = await collect(worker.submit(make_request(prompt=[1, 2, 3, 4], cache_salt="s")))
        stats = worker.stats
    # All but the last token of an equal prompt; an answer is remembered with its prompt.
    assert [num_cached(o) for o in (cold, same, branch, turn, salted)] == [[0], [3], [2], [6], [0]]
    assert stats.prompt_tokens_computed_total == 4 + 1 + 2 + 1 + 4
    assert stats.generated_tokens_total == 10


async def test_logprobs_come_with_their_tokens() -> None:
    async with started(answer(4, 5)) as worker:
        plain = await collect(worker.submit(make_request("plain")))
        asked = make_request("asked", num_logprobs=2, num_prompt_logprobs=0)
        told = await collect(worker.submit(asked))
    assert all(output.logprobs == output.prompt_logprobs == () for output in plain)
    assert [output.num_cached_tokens for output in told if output.prompt_logprobs] == [0]
    prompt = [entry for output in told for entry in output.prompt_logprobs]
    assert prompt == [None, *[TokenLogprobs(-0.125, 1, (), ())] * 2]
    drawn = [entry for output in told for entry in output.logprobs]
    assert drawn == [
        TokenLogprobs(-0.125, 1, (token, token + 1), (-0.125, -0.25)) for token in tokens_of(told)
    ]


async def test_reset_and_loss_forget() -> None:
    async with started(answer(90)) as worker:
        await collect(worker.submit(make_request()))
        assert worker.stats.num_evictable_blocks == 2
        assert await worker.reset_cache() == 2
        assert worker.stats.num_evictable_blocks == 0
        assert num_cached(await collect(worker.submit(make_request()))) == [0]
        worker.set_lost()
        worker.set_ready()
        assert num_cached(await collect(worker.submit(make_request()))) == [0]


async def test_times_come_with_their_events() -> None:
    async with started(answer(5, 6), token_interval=0.02) as worker:
        outputs = await collect(worker.submit(make_request()))
    assert outputs[0].queue_s is not None
    assert 0.01 < outputs[0].queue_s < 0.5
    assert [o.prefill_s is not None for o in outputs if o.token_ids] == [True, False]


async def test_tokens_come_at_the_interval() -> None:
    async with started(token_interval=0.01) as worker:
        started_at = time.monotonic()
        outputs = await collect(worker.submit(make_request(max_tokens=30)))
        elapsed = time.monotonic() - started_at
    assert len(tokens_of(outputs)) == 30
    assert 0.28 < elapsed < 1.0


async def test_fifty_streams_cost_little() -> None:
    async with started(token_interval=0.01) as worker:
        streams = [worker.submit(make_request(f"r{n}", max_tokens=50)) for n in range(50)]
        cpu_before = time.process_time()
        outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        cpu_s = time.process_time() - cpu_before
    assert all(len(tokens_of(one)) == 50 for one in outputs)
    assert cpu_s < 0.25  # of at least 0.5 s


async def test_a_script_that_fails_fails_its_request_alone() -> None:
    def failing(request: AddRequest) -> Iterator[int]:
        yield 5
        if request.request_id == "bad":
            raise RuntimeError("out of paper")
        yield 6

    async with started(failing) as worker:
        bad, good = worker.submit(make_request("bad")), worker.submit(make_request("good"))
        failed = await collect(bad)
        assert tokens_of(failed) == [5]
        assert failed[-1].error is not None
        assert failed[-1].error.code is ErrorCode.INTERNAL
        assert tokens_of(await collect(good)) == [5, 6]


async def test_a_request_can_be_failed_from_outside() -> None:
    async with started() as worker:
        stream = worker.submit(make_request(max_tokens=100_000))
        await first_token(stream)
        worker.fail_request("r", ErrorCode.NEVER_FITS, "too large")
        outputs = await collect(stream)
        assert outputs[-1].error is not None
        assert outputs[-1].error.code is ErrorCode.NEVER_FITS
        assert worker.num_requests == worker.stats.num_running == 0


async def test_limits_queue_then_refuse() -> None:
    async with started(max_num_seqs=1, max_num_waiting=1) as worker:
        running = worker.submit(make_request("a", max_tokens=100_000))
        await first_token(running)
        waiting = worker.submit(make_request("b", max_tokens=1))
        refused = await collect(worker.submit(make_request("c")))
        assert refused[-1].error is not None
        assert refused[-1].error.code is ErrorCode.OVERLOADED
        assert (worker.stats.num_running, worker.stats.num_waiting) == (1, 1)
        worker.abort("a")
        assert tokens_of(await collect(waiting)) == [10]


async def test_an_aborted_waiting_request_never_runs() -> None:
    async with started(max_num_seqs=1) as worker:
        await first_token(worker.submit(make_request("a", max_tokens=100_000)))
        waiting = worker.submit(make_request("b"))
        worker.abort("b")
        outputs = await collect(waiting)
        assert [o.finish_reason for o in outputs] == [FinishReason.ABORT]
        assert worker.stats.num_waiting == 0


async def test_prompts_beyond_the_context_are_refused() -> None:
    card = msgspec.structs.replace(make_card(), max_model_len=8)
    worker = FakeWorker(card, counting_script)
    await worker.start()
    try:
        refused = await collect(worker.submit(make_request(prompt=range(8))))
        assert refused[-1].error is not None
        assert refused[-1].error.code is ErrorCode.CONTEXT_LENGTH
        full = await collect(worker.submit(make_request(prompt=range(10, 15))))
        assert tokens_of(full) == [10, 11, 12]
        assert full[-1].finish_reason is FinishReason.LENGTH
    finally:
        await worker.close()


async def test_states_can_be_told() -> None:
    worker = FakeWorker(make_card(), counting_script)
    worker.set_loading("weights 10 %")
    await worker.start()
    try:
        assert (worker.state, worker.detail) == (WorkerState.LOADING, "weights 10 %")
        assert worker.card is None
        worker.set_ready()
        assert await worker.wait_ready(0) == make_card()
        running = worker.submit(make_request(max_tokens=3))
        worker.set_draining()
        refused = await collect(worker.submit(make_request("new")))
        assert refused[-1].error is not None
        assert refused[-1].error.code is ErrorCode.SHUTTING_DOWN
        assert len(tokens_of(await collect(running))) == 3
        worker.set_failed("the GPU has fallen off the bus")
        assert worker.state is WorkerState.FAILED
        assert worker.card is None
    finally:
        await worker.close()


async def test_prefix_commands_are_recorded_and_answered_as_told() -> None:
    async with started() as worker:
        ids = np.array([5, 6, 7], dtype=np.int32)
        assert await worker.act_on_prefix(PrefixAction.INSPECT, ids) == PrefixReply(call_id="")
        worker.prefix_reply = PrefixReply(call_id="", num_host_tokens=2, num_blocks_left=1)
        reply = await worker.act_on_prefix(
            PrefixAction.DEMOTE, ids[::2], cache_salt="tenant", keep_num_tokens=1
        )
        assert reply == worker.prefix_reply
        every = np.array([5, 6, 7], dtype="<i4").tobytes()
        other = np.array([5, 7], dtype="<i4").tobytes()
        assert worker.prefix_commands == (
            PrefixCommand(call_id="", action=PrefixAction.INSPECT, prompt_token_ids=every),
            PrefixCommand(
                call_id="",
                action=PrefixAction.DEMOTE,
                prompt_token_ids=other,
                cache_salt="tenant",
                keep_num_tokens=1,
            ),
        )


async def test_it_tells_what_it_is_told_to_and_each_loss_begins_an_epoch() -> None:
    heard: list[CacheNews] = []
    worker = FakeWorker(make_card(), counting_script)
    worker.add_event_listener(heard.append)
    await worker.start()
    try:
        await collect(worker.submit(make_request(max_tokens=3)))
        assert worker.stats.generated_tokens_total == 3
        stored = BlockStored(Tier.HOST, b"h" * 16)
        worker.tell(stored, stored)
        worker.tell()
        worker.set_draining()
        worker.set_ready()
        worker.set_lost()
        assert worker.epoch == 1
        assert worker.stats.generated_tokens_total == 0
        worker.set_ready()
        cleared = (AllBlocksCleared(),)
        assert heard == [
            CacheNews("fake", 1, cleared),
            CacheNews("fake", 1, (stored, stored)),
            CacheNews("fake", 1, cleared),
            CacheNews("fake", 2, cleared),
        ]
    finally:
        await worker.close()
