"""Explains requests, one after the other, by what was asked before them.

Owns the rules by which one reason is given (service.diagnostics.explanation has their order). It is
given the traces that there are, and may run in a thread beside the event loop; nothing of it is on
a request's way. Knows nothing of HTTP or of who may see what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from service.diagnostics.comparison import Divergence, compare, num_common
from service.diagnostics.differing import DescribedDivergence, describe, field_at
from service.diagnostics.explanation import Departed, Explanation, Reason
from service.diagnostics.prompt_index import GroupKey, HashedPrompt, PromptIndex
from service.diagnostics.trace import RequestTrace
from service.tokenizer import ModelTokenizer

__all__ = ["Analyst"]

_log = logging.getLogger("headstart.diagnostics")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An earlier request, and how this one differs from it."""

    trace: RequestTrace
    divergence: Divergence

    @property
    def num_common(self) -> int:
        return self.divergence.index


class Analyst:
    """``tokenizer`` gives the served model's, None before it is loaded. One thread at a time."""

    def __init__(self, tokenizer: Callable[[], ModelTokenizer | None]) -> None:
        self._tokenizer = tokenizer
        self._index: PromptIndex | None = None
        self._traces: Mapping[int, RequestTrace] = {}
        self._by_id: dict[str, int] = {}
        self._sessions: dict[tuple[str, str], int] = {}
        self._num_indexed: dict[int, int] = {}
        self.explanations: dict[int, Explanation] = {}

    def advance(self, traces: Sequence[RequestTrace]) -> None:
        """Explain those of ``traces`` that have been admitted and are not explained yet.

        ``traces`` are all that there are, the oldest first.
        """
        self._traces = {trace.number: trace for trace in traces}
        for gone in self._num_indexed.keys() - self._traces.keys():
            del self._num_indexed[gone]
            self.explanations.pop(gone, None)
        if traces and self._index is None:
            self._index = PromptIndex(traces[0].prompt.block_size)
        if self._index is not None:
            self._index.keep(frozenset(self._traces))
        for trace in traces:
            if not trace.is_admitted or not len(trace.prompt.token_ids):
                continue
            if trace.number not in self._num_indexed:
                self._explain(trace)
            self._take_up(trace)
        self._forget_names()
        self._traces = {}  # what is deleted from now on is held here no longer

    def forget(self, gone: Sequence[RequestTrace]) -> None:
        """Drop what is told of these, and what others' explanations show of their texts."""
        names = {trace.prompt.request_id for trace in gone}
        for trace in gone:
            self.explanations.pop(trace.number, None)
        for number, told in list(self.explanations.items()) if names else ():
            if told.compared_with in names and told.texts is not None:
                self.explanations[number] = replace(told, texts=None)

    def _explain(self, trace: RequestTrace) -> None:
        try:
            self.explanations[trace.number] = self._reason(trace)
        except Exception as error:  # a diagnosis that fails must not take the others down
            # Its own words may quote a prompt.
            _log.error("a request could not be explained: %s", type(error).__name__)

    def _take_up(self, trace: RequestTrace) -> None:
        """Let later ones find it."""
        prompt, known = trace.prompt, self._num_indexed.get(trace.number)
        num_served = len(prompt.token_ids) + len(trace.output_token_ids)
        if known != num_served:
            assert self._index is not None
            self._index.add(_key(trace), trace.number, trace.served_ids, known or 0)
            self._num_indexed[trace.number] = num_served
        if known is None:
            self._by_id[prompt.request_id] = trace.number
            if prompt.session:
                self._sessions[prompt.tenant, prompt.session] = trace.number

    def _forget_names(self) -> None:
        if len(self._by_id) <= 2 * len(self._traces) + 1000:
            return
        live = self._traces
        self._by_id = {name: n for name, n in self._by_id.items() if n in live}
        self._sessions = {name: n for name, n in self._sessions.items() if n in live}

    # ------------------------------------------------------------ the rules

    def _reason(self, trace: RequestTrace) -> Explanation:
        found = Explanation(
            reason=Reason.HIT,
            num_prompt_tokens=len(trace.prompt.token_ids),
            num_matched_tokens=trace.num_cached_tokens,
        )
        if trace.prompt.is_scored:
            return replace(found, reason=Reason.COMPUTED_WHOLE)
        if trace.num_cached_tokens >= len(trace.prompt.token_ids) - 1:
            return found  # the last token is computed in any case
        assert self._index is not None
        hashed = self._index.hashed(trace.prompt.token_ids)
        previous = self._previous(trace)
        own = list(self._candidates(trace, hashed, previous))
        diverged = self._diverged(trace, found, own, previous)
        if diverged is None and previous is None:
            cold = self._cold(trace, found, own, hashed)
            if cold is not None:
                return cold
        longest = max(own, key=lambda each: each.num_common, default=None)
        return (
            self._elsewhere(trace, found, longest, hashed)
            or self._short(trace, found, longest, diverged)
            or self._gone(trace, found, own)
            or diverged
            or found
        )

    def _cold(
        self,
        trace: RequestTrace,
        found: Explanation,
        own: Sequence[_Candidate],
        hashed: HashedPrompt,
    ) -> Explanation | None:
        """Nothing like it is known in any namespace of the tenant's."""
        assert self._index is not None
        prompt, block_size = trace.prompt, trace.prompt.block_size
        if prompt.had_other_model or trace.evicted is not None:
            return None
        if any(each.num_common >= block_size for each in own):
            return None
        if own and len(prompt.token_ids) <= block_size:
            return None
        keys = [key for key in self._index.keys_of(prompt.tenant) if key != _key(trace)]
        if any(self._index.longest(key, hashed) is not None for key in keys):
            return None
        others = self._index.longest_of_others(prompt.tenant, hashed)
        of_all = None if others is None else Reason.TENANT_DIFFERS
        return replace(found, reason=Reason.COLD, reason_of_all=of_all)

    def _elsewhere(
        self,
        trace: RequestTrace,
        found: Explanation,
        longest: _Candidate | None,
        hashed: HashedPrompt,
    ) -> Explanation | None:
        """Another namespace of the tenant's has more of it, by a block at least."""
        assert self._index is not None
        prompt = trace.prompt
        best, best_key, num_own = None, _key(trace), 0 if longest is None else longest.num_common
        least = max(num_own, trace.num_cached_tokens) + prompt.block_size
        for key in self._index.keys_of(prompt.tenant):
            number = None if key == _key(trace) else self._index.longest(key, hashed)
            other = None if number is None else self._traces.get(number)
            if other is None or other.number >= trace.number:
                continue
            common = num_common(prompt.token_ids[:-1], other.served_ids)
            if common >= least:
                best, best_key, least = other, key, common + 1
        if best is None:
            if not prompt.had_other_model or num_own >= prompt.block_size:
                return None
            return self._missed(trace, replace(found, reason=Reason.MODEL_CHANGED), None, 0)
        is_salt = best_key.fingerprint == prompt.fingerprint
        reason = Reason.SALT_DIFFERS if is_salt else Reason.MODEL_CHANGED
        told = replace(found, reason=reason, compared_with=best.prompt.request_id)
        return self._missed(trace, told, None, least - 1)

    def _short(
        self,
        trace: RequestTrace,
        found: Explanation,
        longest: _Candidate | None,
        diverged: Explanation | None,
    ) -> Explanation | None:
        """Neither the prompt nor what it has in common with earlier ones fills a block."""
        prompt, block_size = trace.prompt, trace.prompt.block_size
        num_own = 0 if longest is None else longest.num_common
        is_short = len(prompt.token_ids) <= block_size
        if not is_short and (num_own >= block_size or diverged is not None):
            return None
        if trace.evicted is not None and not is_short:
            return None
        index = num_own if longest is not None else None
        told = replace(found, reason=Reason.BELOW_ONE_BLOCK, token_index=index)
        if longest is None:
            return told
        told = replace(told, compared_with=longest.trace.prompt.request_id)
        return replace(told, field=self._field_at(trace, num_own))

    def _gone(
        self, trace: RequestTrace, found: Explanation, own: Sequence[_Candidate]
    ) -> Explanation | None:
        """It was stored, by what the worker says or by what was served, and is not there."""
        num_cached, block_size = trace.num_cached_tokens, trace.prompt.block_size
        evicted = trace.evicted
        num_stored = num_cached if evicted is None else num_cached + evicted.num_tokens
        served = [each for each in own if _was_stored_before(each.trace, trace)]
        best = max(served, key=lambda each: each.num_common, default=None)
        num_served = 0 if best is None else min(best.num_common, len(trace.prompt.token_ids) - 1)
        expected = max(num_stored, num_served // block_size * block_size)
        if expected - num_cached < block_size and evicted is None:
            return None
        told = replace(found, compared_with="" if best is None else best.trace.prompt.request_id)
        if evicted is not None:
            at = trace.started_at + (trace.queue_s or 0.0) - evicted.ago_s
            departed = Departed(evicted.cause, evicted.tier, at)
            reason = Reason.EXPIRED if evicted.cause == "dropped" else Reason.EVICTED
            told = replace(told, reason=reason, departed=departed)
        else:
            assert best is not None
            told = _unreported(told, trace, best.trace)
        return self._missed(trace, told, None, max(expected, num_stored))

    def _diverged(
        self,
        trace: RequestTrace,
        found: Explanation,
        own: Sequence[_Candidate],
        previous: RequestTrace | None,
    ) -> Explanation | None:
        """From what was asked before: the same session's last prompt, or one whose text goes on."""
        tokenizer = self._tokenizer()
        told: list[tuple[_Candidate, DescribedDivergence]] = []
        for each in own:
            is_same = each.trace is previous
            if is_same and not _leaves_last_prompt(each):
                continue
            if not is_same and each.divergence.num_equal < trace.prompt.block_size:
                continue
            described = describe(trace, each.trace, each.divergence, tokenizer)
            if is_same or described.is_breaker:
                told.append((each, described))
        if not told:
            return None
        each, described = max(told, key=lambda item: (item[1].num_lost_tokens, item[0].num_common))
        return replace(
            found,
            reason=Reason.DIVERGED,
            kind=described.kind,
            token_index=each.num_common,
            field=described.field,
            num_lost_tokens=described.num_lost_tokens,
            compared_with=each.trace.prompt.request_id,
            texts=described.texts,
        )

    # ------------------------------------------------------------ inside

    def _previous(self, trace: RequestTrace) -> RequestTrace | None:
        """The same session's last request."""
        prompt = trace.prompt
        number = self._by_id.get(prompt.previous_id) if prompt.previous_id else None
        if number is None and prompt.session:
            number = self._sessions.get((prompt.tenant, prompt.session))
        found = None if number is None else self._traces.get(number)
        return None if found is None or _key(found) != _key(trace) else found

    def _candidates(
        self, trace: RequestTrace, hashed: HashedPrompt, previous: RequestTrace | None
    ) -> Iterator[_Candidate]:
        """Earlier requests of the same namespace that may have something in common with it."""
        assert self._index is not None
        key, ids = _key(trace), trace.prompt.token_ids
        numbers = [self._index.longest(key, hashed), *self._index.related(key, hashed)]
        found = [self._traces[n] for n in numbers if n is not None and n < trace.number]
        if previous is not None:
            found.append(previous)
        for other in dict.fromkeys(found):
            yield _Candidate(other, compare(ids, other.served_ids))

    def _missed(
        self, trace: RequestTrace, told: Explanation, field: str | None, num_expected: int
    ) -> Explanation:
        """With the first token that is missing, where it is, and how many follow it."""
        index = trace.num_cached_tokens
        return replace(
            told,
            token_index=index,
            field=self._field_at(trace, index) if field is None else field,
            num_lost_tokens=max(0, num_expected - index),
        )

    def _field_at(self, trace: RequestTrace, index: int) -> str:
        tokenizer = self._tokenizer()
        return "" if tokenizer is None else field_at(trace, index, tokenizer)


def _key(trace: RequestTrace) -> GroupKey:
    prompt = trace.prompt
    return GroupKey(prompt.tenant, prompt.fingerprint, prompt.cache_salt)


def _was_stored_before(other: RequestTrace, trace: RequestTrace) -> bool:
    """Whether the worker had computed its prompt when this one came."""
    return other.first_token_at is not None and other.first_token_at <= trace.received_at


def _leaves_last_prompt(last: _Candidate) -> bool:
    """Whether a block or more of that prompt does not come again."""
    prompt = last.trace.prompt
    return len(prompt.token_ids) - last.num_common >= prompt.block_size


def _unreported(told: Explanation, trace: RequestTrace, other: RequestTrace) -> Explanation:
    """What the worker has not told of: it had forgotten, or never knew."""
    if other.worker_id != trace.worker_id:
        return replace(told, reason=Reason.OTHER_WORKER)
    cause = "restart" if other.worker_epoch != trace.worker_epoch else "unknown"
    return replace(told, reason=Reason.EVICTED, departed=Departed(cause))
