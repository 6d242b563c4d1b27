"""Where requests wait for their grammars to be compiled, while the engine goes on.

Owns the thread that compiles, the bounded store of what it has compiled, and who waits for what.
Knows nothing of queues, steps or of what a grammar is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from model_worker.grammar import GrammarError, TokenMatcher
from model_worker.request import Request
from model_worker.sampling_params import Grammar

logger = logging.getLogger(__name__)

MAX_COMPILED = 128

Compile = Callable[[Grammar], TokenMatcher]


@dataclass(frozen=True, slots=True)
class _Key:
    """Nobody learns by the time it takes what another salt has asked for."""

    cache_salt: str
    grammar: Grammar


@dataclass(slots=True)
class _Order:
    outcome: Future[TokenMatcher]
    requests: list[Request] = field(default_factory=list)


class GrammarDesk:
    """Every method is called from the engine's thread. ``wake`` is called, from another one, when
    something has been compiled."""

    def __init__(self, compile: Compile, wake: Callable[[], None] = lambda: None) -> None:
        self._compile = compile
        self._wake = wake
        self._compiled: OrderedDict[_Key, TokenMatcher] = OrderedDict()
        self._orders: dict[_Key, _Order] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headstart-grammar")

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(order.requests) for order in self._orders.values())

    def submit(self, request: Request, grammar: Grammar, cache_salt: str = "") -> bool:
        """Whether ``request`` has its matcher at once; :meth:`take` gives it otherwise."""
        key = _Key(cache_salt, grammar)
        compiled = self._compiled.get(key)
        if compiled is not None:
            self._compiled.move_to_end(key)
            request.matcher = compiled.copy()
            return True
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = _Order(self._thread.submit(self._compile, grammar))
            order.outcome.add_done_callback(lambda _: self._wake())
        order.requests.append(request)
        return False

    def take(self) -> Iterator[tuple[Request, GrammarError | None]]:
        """Those whose grammars are done with, each with its matcher, or with why it has none."""
        for key in [key for key, order in self._orders.items() if order.outcome.done()]:
            order = self._orders.pop(key)
            outcome = self._outcome(key, order.outcome)
            for request in order.requests:
                if isinstance(outcome, GrammarError):
                    yield request, outcome
                else:
                    request.matcher = outcome.copy()
                    yield request, None

    def _outcome(self, key: _Key, future: Future[TokenMatcher]) -> TokenMatcher | GrammarError:
        error = future.exception()
        if isinstance(error, GrammarError):
            return error
        if error is not None:
            # Its text may hold the grammar's, which is the client's own.
            logger.error("a grammar could not be compiled: %s", type(error).__name__)
            return GrammarError("it could not be compiled")
        compiled = self._compiled[key] = future.result()
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        self._thread.shutdown(cancel_futures=True)
