"""Streams of outputs and the board of a worker's state."""

from __future__ import annotations

import asyncio

import pytest

from model_worker.protocol import ErrorCode, FinishReason, RequestError, RequestOutput
from service.workers.base import (
    MAX_PENDING_OUTPUTS,
    RequestStream,
    StateChange,
    StreamTable,
    WorkerNotReadyError,
    WorkerState,
    WorkerStatusBoard,
    merge_outputs,
)

DONE = RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH)


def tokens(*token_ids: int) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=token_ids)


async def test_a_stream_hands_over_each_output_until_the_last() -> None:
    stream = RequestStream("r")
    for output in (tokens(1), tokens(2), DONE, tokens(3)):
        stream.put(output)
    assert stream.is_finished
    assert [output async for output in stream] == [tokens(1), tokens(2), DONE]
    assert [output async for output in stream] == []


async def test_a_waiting_consumer_is_woken() -> None:
    stream = RequestStream("r")
    consumer = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(tokens(1))
    stream.put(tokens(2))
    assert await asyncio.wait_for(consumer, 1) == tokens(1)
    assert await anext(stream) == tokens(2)


async def test_a_cancelled_consumer_loses_nothing() -> None:
    stream = RequestStream("r")
    consumer = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    consumer.cancel()
    await asyncio.wait([consumer])
    stream.put(tokens(1))
    assert await asyncio.wait_for(anext(stream), 1) == tokens(1)


async def test_what_is_not_fetched_is_merged() -> None:
    stream = RequestStream("r")
    count = 10 * MAX_PENDING_OUTPUTS
    for token in range(count):
        stream.put(tokens(token))
    stream.put(DONE)
    outputs = [output async for output in stream]
    assert len(outputs) <= MAX_PENDING_OUTPUTS
    assert [t for output in outputs for t in output.token_ids] == list(range(count))
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]


def test_merging_keeps_every_field() -> None:
    error = RequestError(code=ErrorCode.INTERNAL, message="m")
    merged = merge_outputs(
        [
            RequestOutput(
                request_id="r",
                num_cached_tokens=9,
                queue_s=0.5,
                num_host_tokens=4,
                num_disk_tokens=3,
            ),
            RequestOutput(request_id="r", token_ids=(1, 2), prefill_s=0.25),
            RequestOutput(
                request_id="r",
                token_ids=(3,),
                finish_reason=FinishReason.STOP,
                stop_token_id=3,
                error=error,
            ),
        ]
    )
    assert merged == RequestOutput(
        request_id="r",
        token_ids=(1, 2, 3),
        num_cached_tokens=9,
        queue_s=0.5,
        num_host_tokens=4,
        num_disk_tokens=3,
        prefill_s=0.25,
        finish_reason=FinishReason.STOP,
        stop_token_id=3,
        error=error,
    )


def test_a_table_forgets_what_has_ended() -> None:
    table = StreamTable()
    stream = table.open("r")
    with pytest.raises(ValueError, match="'r' is in use"):
        table.open("r")
    table.deliver(DONE)
    table.deliver(tokens(1))
    assert stream.is_finished
    assert len(table) == 0
    assert table.open("r") is not stream


async def test_a_table_fails_all_its_streams_once() -> None:
    table = StreamTable()
    streams = [table.open("a"), table.open("b")]
    table.fail_all(ErrorCode.WORKER_LOST, "gone")
    table.fail_all(ErrorCode.SHUTTING_DOWN, "closing")
    for stream in streams:
        outputs = [output async for output in stream]
        assert [o.error for o in outputs] == [
            RequestError(code=ErrorCode.WORKER_LOST, message="gone")
        ]


async def test_a_board_tells_changes_only() -> None:
    changes: list[StateChange] = []
    board = WorkerStatusBoard("w", "starting")
    board.add_listener(changes.append)
    board.set(WorkerState.CONNECTING, "starting")
    board.set(WorkerState.LOADING, "10 %")
    board.set(WorkerState.LOADING, "10 %")
    board.set(WorkerState.READY)
    assert changes == [
        StateChange("w", WorkerState.LOADING, "10 %"),
        StateChange("w", WorkerState.READY, ""),
    ]


async def test_a_failing_listener_is_logged_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes: list[StateChange] = []
    board = WorkerStatusBoard("w", "starting")

    def fail(change: StateChange) -> None:
        raise RuntimeError("listener")

    board.add_listener(fail)
    board.add_listener(changes.append)
    board.set(WorkerState.READY)
    assert len(changes) == 1
    assert "a listener to the state of worker w failed" in caplog.text


async def test_all_who_wait_are_told() -> None:
    board = WorkerStatusBoard("w", "starting")
    waiters = [asyncio.create_task(board.wait_ready(5)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    board.set(WorkerState.LOADING)
    await asyncio.sleep(0)
    board.set(WorkerState.READY)
    await asyncio.wait_for(asyncio.gather(*waiters[1:]), 1)


async def test_a_failure_ends_the_waiting() -> None:
    board = WorkerStatusBoard("w", "starting")
    waiter = asyncio.create_task(board.wait_ready(None))
    await asyncio.sleep(0)
    board.set(WorkerState.FAILED, "no such file")
    with pytest.raises(WorkerNotReadyError, match="worker w: failed: no such file"):
        await asyncio.wait_for(waiter, 1)
