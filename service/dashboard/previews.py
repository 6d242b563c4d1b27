"""The first words of prefixes, for the operator who asked to see them.

Owns the token ids of recent prompts' blocks, by block hash: there is one only with
--show-prompt-text, bounded, in memory, and gone with the process. Whoever may see them is
service.security's knowledge.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from service.request_history import RequestRecord

__all__ = ["PromptPreviews"]

MAX_BLOCKS = 50_000
MAX_CHARS = 160


class PromptPreviews:
    """``decode`` makes text of token ids. Used from the event loop alone."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # the longest unseen first

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, record: RequestRecord, token_ids: NDArray[np.int32]) -> None:
        """``token_ids`` are 1-D, those that the record's hashes are of."""
        size = record.block_size
        for index, block_hash in enumerate(record.prompt_hashes.tolist()):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)
            else:
                self._blocks[block_hash] = token_ids[index * size : (index + 1) * size].tobytes()
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def text(
        self, block_hashes: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> str | None:
        """How these blocks, which follow each other, begin; None where the first one's ids are not
        kept any more."""
        contents = []
        for block_hash in block_hashes:
            content = self._blocks.get(block_hash)
            if content is None:
                break
            contents.append(content)
        if not contents:
            return None
        text = decode(np.frombuffer(b"".join(contents), dtype=np.int32).tolist())
        return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"
