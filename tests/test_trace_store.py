"""The traces of the latest requests: their bounds, and what a trace tells."""

from __future__ import annotations

import numpy as np
import pytest

from model_worker.protocol import RequestOutput
from service.conversation import Conversation
from service.diagnostics.trace import PromptSource, RequestTrace, TracedPrompt
from service.diagnostics.trace_store import TraceStore
from service.schemas.chat import UserMessage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def trace_of(
    clock: Clock, request_id: str = "r", num_tokens: int = 10, session: str = ""
) -> RequestTrace:
    prompt = TracedPrompt(
        request_id=request_id,
        tenant="acme",
        session=session,
        model="tiny",
        num_tokens=num_tokens,
        token_ids=np.arange(num_tokens, dtype=np.int32),
    )
    return RequestTrace(prompt, clock.now, clock, 1.7e9)


def ids_in(store: TraceStore) -> list[str]:
    return [trace.prompt.request_id for trace in store.latest_first()]


def test_the_oldest_goes_when_there_are_too_many() -> None:
    clock = Clock()
    store = TraceStore(clock, max_traces=2)
    for name in "abc":
        store.add(trace_of(clock, name))
    assert ids_in(store) == ["c", "b"]
    assert store.get("a") is None
    assert store.get("b") is not None


def test_what_is_too_old_goes() -> None:
    clock = Clock()
    store = TraceStore(clock, max_age_s=60.0)
    store.add(trace_of(clock, "a"))
    clock.now += 30.0
    store.add(trace_of(clock, "b"))
    clock.now += 31.0
    assert ids_in(store) == ["b"]
    clock.now += 30.0
    assert store.get("b") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_bytes_are_bounded_and_grow_with_the_answer() -> None:
    clock = Clock()
    store = TraceStore(clock, max_bytes=6000)
    first, second = trace_of(clock, "a"), trace_of(clock, "b")
    store.add(first)
    store.add(second)
    assert store.num_bytes == 2 * (1024 + 40)
    second.ended("stop", output_token_ids=range(1000))
    store.grown(second)
    assert ids_in(store) == ["b"]
    assert store.num_bytes == 1024 + 40 + 4000
    third = trace_of(clock, "c", num_tokens=100_000)
    store.add(third)
    assert ids_in(store) == []  # it alone is more than all may take
    store.grown(first)  # gone meanwhile
    assert store.num_bytes == 0


def test_a_conversation_counts_by_its_tokens_messages_and_tools() -> None:
    conversation = Conversation([UserMessage("hello")] * 3, tools=({"type": "function"},))
    trace = RequestTrace(
        TracedPrompt(
            token_ids=np.zeros(100, dtype=np.int32), source=PromptSource(conversation=conversation)
        )
    )
    assert trace.num_bytes == 1024 + 400 + 1000 + 3 * 512 + 2048


def test_the_same_id_again_takes_the_place_of_the_first() -> None:
    clock = Clock()
    store = TraceStore(clock, max_traces=2)
    first, second = trace_of(clock, "a"), trace_of(clock, "a")
    store.add(first)
    store.add(second)
    assert store.get("a") is second
    store.add(trace_of(clock, "b"))  # pushes the first one out
    assert store.get("a") is second


def test_forgetting() -> None:
    clock = Clock()
    store = TraceStore(clock)
    store.add(trace_of(clock, "a", session="s"))
    store.add(trace_of(clock, "b"))
    store.forget(lambda trace: trace.prompt.session == "s")
    assert ids_in(store) == ["b"]
    assert store.get("a") is None


def test_what_a_trace_tells() -> None:
    clock = Clock()
    trace = trace_of(clock, session="s")
    assert trace.record().outcome == "running"
    assert trace.record().ttft_s is None
    trace.sent("w0", 3)
    output = RequestOutput(
        request_id="r", num_cached_tokens=8, num_host_tokens=3, num_disk_tokens=1, queue_s=0.25
    )
    trace.admitted(output, 0.25)
    trace.admitted(RequestOutput(request_id="r", num_cached_tokens=0), 9.0)  # the first one counts
    clock.now += 1.0
    trace.token(0.5)
    clock.now += 2.0
    trace.token(None)
    trace.ended("stop", 0.75, [1, 2, 3])
    record = trace.record("hit")
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (10, 8)
    assert (record.num_device_tokens, record.num_host_tokens, record.num_disk_tokens) == (4, 3, 1)
    assert (record.queue_s, record.prefill_s, record.decode_s, record.ttft_s) == (
        0.25,
        0.5,
        2,
        0.75,
    )
    assert (record.outcome, record.num_output_tokens, record.reason) == ("stop", 3, "hit")
    assert (record.session, record.tenant, record.model) == ("s", "acme", "tiny")
    assert (record.worker_id, record.started_at) == ("w0", 1.7e9)


@pytest.mark.parametrize(("session", "shown"), [("s-1", "s-1"), ("~resp_00", "")])
def test_the_sessions_of_stored_responses_have_no_name(session: str, shown: str) -> None:
    assert trace_of(Clock(), session=session).record().session == shown
