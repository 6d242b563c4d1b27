"""What is known of the latest requests, for who may ask: the facade of this package.

Owns the traces, and when they are explained: not before somebody asks, and in a thread. A tenant
sees its own; who sees those of all is the caller's to say. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from service.diagnostics.analyst import Analyst
from service.diagnostics.breakers import PrefixBreaker, find_breakers
from service.diagnostics.explanation import Explanation
from service.diagnostics.prompt_comparison import PromptComparison, compare_prompts
from service.diagnostics.record import RequestRecord
from service.diagnostics.trace import NO_TOKENS, PromptSource, RequestTrace, TracedPrompt
from service.diagnostics.trace_store import TraceStore
from service.tokenizer import ModelTokenizer

__all__ = ["Diagnostics"]


class Diagnostics:
    """``clock`` is what requests' times are measured with, in seconds. ``tokenizer`` gives the
    served model's, None before it is loaded. ``keeps_prompts`` False: nothing of what requests say
    is held, so no divergence is found. Used from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        tokenizer: Callable[[], ModelTokenizer | None] = lambda: None,
        wall: Callable[[], float] = time.time,
        *,
        keeps_prompts: bool = True,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._keeps_prompts = keeps_prompts
        self._store = TraceStore(clock)
        self._listeners: list[Callable[[RequestTrace], None]] = []
        self._analyst = Analyst(tokenizer)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="diagnostics")
        self._is_busy = asyncio.Lock()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ as requests come

    def add_listener(self, listener: Callable[[RequestTrace], None]) -> None:
        """To be called with each trace, listed or not, that has ended."""
        self._listeners.append(listener)

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def begin(
        self, prompt: TracedPrompt, received_at: float, *, is_listed: bool = True
    ) -> RequestTrace:
        """Of a request that is about to be sent to a worker; listed from now on, unless it is
        a further choice of a prompt, which finds what the first one has computed."""
        if not self._keeps_prompts:
            prompt = dataclasses.replace(prompt, token_ids=NO_TOKENS, source=PromptSource())
        started_at = self._wall() - (self._clock() - received_at)
        trace = RequestTrace(prompt, received_at, self._clock, started_at, self._ended)
        if is_listed:
            self._store.add(trace)
        return trace

    def _ended(self, trace: RequestTrace) -> None:
        self._store.grown(trace)
        for listener in self._listeners:
            listener(trace)

    def forget(self, tenant: str, session: str | None = None) -> None:
        """Drop what is held of ``tenant``, or of one session of it."""

        def is_meant(trace: RequestTrace) -> bool:
            prompt = trace.prompt
            return prompt.tenant == tenant and session in (None, prompt.session)

        self._analyst.forget(self._store.forget(is_meant))

    # ------------------------------------------------------------ for those who ask

    async def refresh(self) -> None:
        """Explain what has been admitted since the last time: milliseconds for each request that
        differs from an earlier one, much less for the others."""
        async with self._is_busy:
            traces = list(self._store.latest_first())[::-1]
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, self._analyst.advance, traces)
            live = {trace.number for trace in self._store.latest_first()}
            self._analyst.forget([each for each in traces if each.number not in live])  # meanwhile

    def recent(self, limit: int, tenant: str | None = None) -> list[RequestRecord]:
        """The latest requests, the last one first; of ``tenant`` alone, if given. Their reasons are
        as of the last :meth:`refresh`."""
        found: list[RequestRecord] = []
        for trace in self._of(tenant):
            if len(found) >= limit:
                break
            told = self._analyst.explanations.get(trace.number)
            reason = "" if told is None else (told if tenant else told.for_operator).reason
            found.append(trace.record(reason))
        return found

    def breakers(self, tenant: str | None = None) -> list[PrefixBreaker]:
        """What breaks prefixes, the worst first, as of the last :meth:`refresh`."""
        explained = self._analyst.explanations
        return find_breakers(
            (trace, explained[trace.number])
            for trace in reversed(list(self._of(tenant)))
            if trace.number in explained
        )

    def find(
        self, request_id: str, tenant: str | None = None
    ) -> tuple[RequestTrace, Explanation | None] | None:
        """One request, and why it missed, as of the last :meth:`refresh`; None for one that is
        unknown, or not of ``tenant``."""
        trace = self._store.get(request_id)
        if trace is None or tenant not in (None, trace.prompt.tenant):
            return None
        return trace, self._analyst.explanations.get(trace.number)

    def compare(self, request_id: str, prompt: TracedPrompt) -> PromptComparison:
        """``prompt`` beside that of an earlier request of the same tenant."""
        trace = self._store.get(request_id)
        is_own = trace is not None and trace.prompt.tenant == prompt.tenant
        return compare_prompts(prompt, trace.prompt if trace is not None and is_own else None)

    def latest(
        self, tenant: str | None = None
    ) -> Iterator[tuple[RequestTrace, Explanation | None]]:
        """As :meth:`find`, of each, the last one first."""
        explained = self._analyst.explanations
        return ((trace, explained.get(trace.number)) for trace in self._of(tenant))

    def _of(self, tenant: str | None) -> Iterator[RequestTrace]:
        traces = self._store.latest_first()
        return (trace for trace in traces if tenant in (None, trace.prompt.tenant))
