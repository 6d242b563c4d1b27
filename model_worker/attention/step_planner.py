"""From a step's spans to its items of work, step after step.

Owns what is kept between steps to make the next plan cheap: converted block tables, and the shared
prefixes as long as the same sequences run. Knows nothing of devices.
"""

from __future__ import annotations

from model_worker.attention.block_tables import BlockTables
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.shared_prefix import SharedPrefixPlan, plan_shared_prefixes
from model_worker.attention.work_plan import TileShape, WorkPlan, plan_work

MIN_SHARED_TOKENS = 512
"""Reading fewer tokens once more costs less than merging one more partial result."""


class StepPlanner:
    """``min_shared_tokens`` None reads every sequence's prefix apart."""

    def __init__(
        self, shape: TileShape, block_size: int, min_shared_tokens: int | None = MIN_SHARED_TOKENS
    ) -> None:
        self._shape = shape
        self._block_size = block_size
        self._min_shared_tokens = min_shared_tokens
        # More rows than that fill a tile, which reads the prefix once by itself.
        self._max_query_len = max(1, shape.large_rows // 2)
        self._tables = BlockTables(block_size)
        self._last_key: tuple[tuple[int, bool], ...] = ()
        self._last = SharedPrefixPlan((), ())

    def plan(self, spans: tuple[SequenceSpan, ...], *, is_sharing: bool = True) -> WorkPlan:
        tables = self._tables.flatten(spans)
        if is_sharing and self._min_shared_tokens is not None and len(spans) > 1:
            shared = self._shared(spans, self._min_shared_tokens, tables.are_known)
        else:
            shared = SharedPrefixPlan((), (0,) * len(spans))
        return plan_work(spans, shared, tables, self._shape, self._block_size)

    def _shared(
        self, spans: tuple[SequenceSpan, ...], min_tokens: int, are_known: bool
    ) -> SharedPrefixPlan:
        """The last plan, where it still holds: tables that only grew share what they shared."""
        key = tuple((id(span.block_ids), span.query_len <= self._max_query_len) for span in spans)
        if not (are_known and key == self._last_key and self._holds(spans)):
            self._last_key = key
            self._last = plan_shared_prefixes(
                spans, self._block_size, min_tokens, self._max_query_len
            )
        return self._last

    def _holds(self, spans: tuple[SequenceSpan, ...]) -> bool:
        return all(
            start * self._block_size <= span.context_len
            for span, start in zip(spans, self._last.own_starts, strict=True)
        )
