"""Whether grammars can be served, looked at once for each tenant.

Owns the bounded memory of what was found. Knows nothing of where grammars come from.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor

from model_worker.protocol import Grammar, grammar_problem
from service.errors import InvalidRequest

__all__ = ["GrammarChecks"]

MAX_OWNERS = 256
MAX_GRAMMARS = 64  # of each owner
_MAX_REASON = 300  # characters

Found = OrderedDict[bytes, str | None]


class GrammarChecks:
    """``threads`` run what takes milliseconds. An owner is whoever may learn from the time that it
    takes what was asked before: a tenant and a cache salt."""

    def __init__(
        self, threads: Executor, problem: Callable[[Grammar], str | None] = grammar_problem
    ) -> None:
        self._threads = threads
        self._problem = problem
        self._found: OrderedDict[tuple[str, str], Found] = OrderedDict()

    async def require(self, owner: tuple[str, str], grammar: Grammar, param: str) -> None:
        """Raises InvalidRequest, which names ``param``, for one that no worker would take."""
        problem = await self._known_problem(owner, grammar)
        if problem is not None:
            reason = problem[:_MAX_REASON].rstrip(".")
            raise InvalidRequest(f"{param}: {reason}.", param=param, code="invalid_grammar")

    async def _known_problem(self, owner: tuple[str, str], grammar: Grammar) -> str | None:
        key = hashlib.blake2b(f"{grammar.kind}\0{grammar.text}".encode(), digest_size=16).digest()
        found = self._found.setdefault(owner, OrderedDict())
        self._found.move_to_end(owner)
        if key not in found:
            loop = asyncio.get_running_loop()
            found[key] = await loop.run_in_executor(self._threads, self._problem, grammar)
        found.move_to_end(key)
        if len(found) > MAX_GRAMMARS:
            found.popitem(last=False)
        if len(self._found) > MAX_OWNERS:
            self._found.popitem(last=False)
        return found[key]
