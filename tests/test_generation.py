"""One path from token ids to text events, with a fake worker and no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from model_worker.protocol import (
    AddRequest,
    ErrorCode,
    SamplingParams,
)
from service.answer_text import TextEvent
from service.errors import GatewayError, Unavailable
from service.generation import GenerationRequest, Generator
from service.metrics import GatewayMetrics
from service.request_gate import RequestGate
from service.worker_metrics import QueueReading
from service.workers.fake import FakeWorker
from tests.gateway_kit import byte_ids_of, make_card, make_tokenizer


class Bench:
    """A generator over one fake worker."""

    def __init__(self, script: Callable[[AddRequest], Iterable[int]]) -> None:
        self.worker = FakeWorker(make_card(), script)
        self.decode: Callable[[Sequence[int]], str] = make_tokenizer().decode
        self.gate = RequestGate(8)
        self.metrics = GatewayMetrics(lambda: [], lambda: QueueReading(0, 0))
        self.generator = Generator(lambda: [self.worker], self.metrics)

    def events(self, prompt: Iterable[int] = (40, 41, 42), **fields: Any) -> Any:
        request = GenerationRequest(
            request_id="r1",
            prompt_token_ids=np.asarray(list(prompt), dtype=np.int32),
            sampling_params=SamplingParams(max_tokens=fields.pop("max_tokens", 100)),
            received_at=self.metrics.clock(),
            **fields,
        )
        return self.generator.events(request, self.decode, self.gate.admit(1)[0])

    async def collect(self, **fields: Any) -> list[TextEvent]:
        return [event async for event in self.events(**fields)]


def run(
    script: Callable[[AddRequest], Iterable[int]], test: Callable[[Bench], Awaitable[None]]
) -> None:
    async def main() -> None:
        bench = Bench(script)
        await bench.worker.start()
        try:
            await asyncio.wait_for(test(bench), 10.0)
        finally:
            await bench.worker.close()
        assert bench.gate.num_in_flight == bench.gate.num_queued == 0

    asyncio.run(main())


def test_exactly_one_last_event() -> None:
    async def test(bench: Bench) -> None:
        events = await bench.collect(max_tokens=5)
        assert "".join(event.text for event in events) == "hello"
        assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
        assert [event.num_output_tokens for event in events] == [0, 1, 2, 3, 4, 5]  # admitted first

    run(lambda request: byte_ids_of("hello world"), test)


def test_the_prompt_crosses_as_little_endian_int32() -> None:
    seen: list[AddRequest] = []

    def script(request: AddRequest) -> Iterable[int]:
        seen.append(request)
        return byte_ids_of("x")

    async def test(bench: Bench) -> None:
        await bench.collect(prompt=(1, 258), cache_salt="s")
        assert seen[0].prompt_token_ids == b"\x01\0\0\0\x02\x01\0\0"
        assert seen[0].cache_salt == "s"

    run(script, test)


def test_a_stop_string_aborts_at_the_worker() -> None:
    async def test(bench: Bench) -> None:
        events = await bench.collect(stop=("lo w",))
        assert "".join(event.text for event in events) == "hel"
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "lo w")
        assert events[-1].num_output_tokens == len("hello w")
        await asyncio.sleep(0)
        assert bench.worker.num_requests == 0

    run(lambda request: byte_ids_of("hello world" * 50), test)


def test_closing_early_aborts_and_gives_the_ticket_back() -> None:
    async def test(bench: Bench) -> None:
        async with contextlib.aclosing(bench.events()) as events:
            await anext(events)
            assert bench.worker.num_requests == 1
        assert bench.worker.num_requests == 0
        assert bench.metrics.total("requests_total", {"outcome": "abort"}) == 1

    run(lambda request: byte_ids_of("hello world" * 50), test)


def test_cancelling_aborts() -> None:
    async def test(bench: Bench) -> None:
        collecting = asyncio.create_task(bench.collect(max_tokens=2000))
        while bench.worker.stats.generated_tokens_total < 3:
            await asyncio.sleep(0)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        assert bench.worker.num_requests == 0

    run(lambda request: byte_ids_of("hello world" * 500), test)


def test_a_failed_request_raises_its_typed_error() -> None:
    async def test(bench: Bench) -> None:
        collecting = asyncio.create_task(bench.collect(max_tokens=2000))
        while bench.worker.num_requests == 0:
            await asyncio.sleep(0)
        bench.worker.fail_request("r1", ErrorCode.INTERNAL, "broken")
        with pytest.raises(GatewayError) as failure:
            await collecting
        assert failure.value.status == 500
        assert bench.metrics.total("requests_total", {"outcome": "error"}) == 1

    run(lambda request: byte_ids_of("hello world" * 500), test)


def test_a_failure_of_our_own_is_an_error_and_no_abort() -> None:
    async def test(bench: Bench) -> None:
        def broken(_: Sequence[int]) -> str:
            raise ZeroDivisionError

        bench.decode = broken
        with pytest.raises(ZeroDivisionError):
            await bench.collect()
        assert bench.metrics.total("requests_total", {"outcome": "error"}) == 1
        assert bench.worker.num_requests == 0

    run(lambda request: byte_ids_of("hello world" * 50), test)


def test_an_abort_nobody_asked_for_is_an_error() -> None:
    async def test(bench: Bench) -> None:
        collecting = asyncio.create_task(bench.collect(max_tokens=2000))
        while bench.worker.num_requests == 0:
            await asyncio.sleep(0)
        bench.worker.abort("r1")
        with pytest.raises(Unavailable):
            await collecting

    run(lambda request: byte_ids_of("hello world" * 500), test)


def test_without_a_worker_it_is_unavailable() -> None:
    async def test(bench: Bench) -> None:
        bench.generator = Generator(lambda: [], bench.metrics)
        with pytest.raises(Unavailable):
            await bench.collect()

    run(lambda request: byte_ids_of("x"), test)
