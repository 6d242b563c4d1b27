"""The tokens that a step drew, where it drew them: for the next step, before the host has them.

Owns the way from a request's draw in one step to its row in the next. Knows nothing of how tokens
are drawn, or of what is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.batch import ScheduledBatch, ScheduledRequest
from model_worker.forward import HandedTokens
from model_worker.host_copy import to_device
from model_worker.request import Request


class DrawnTokens:
    """``token_ids`` int64 (rows,): those of each item, one after the other."""

    def __init__(self, ending: Sequence[ScheduledRequest], token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids
        self._ending = ending

    def handed_to(
        self, batch: ScheduledBatch, drawn_rows: NDArray[np.int64]
    ) -> HandedTokens | None:
        """What ``batch``, the next step, takes of it into its rows ``drawn_rows``; None where it
        takes nothing. Waits for nothing."""
        if not len(drawn_rows):
            return None
        first_rows = self._first_rows()
        sources = [first_rows[item.request] for item in batch.scheduled if item.takes_drawn]
        moves = to_device(np.stack([drawn_rows, np.array(sources)]), self.token_ids.device)
        return HandedTokens(moves[0], self.token_ids[moves[1]])

    def _first_rows(self) -> dict[Request, int]:
        """Who is followed without being known had no drafts: its first row is its only one."""
        starts = accumulate((item.num_logit_rows for item in self._ending), initial=0)
        return dict(zip((item.request for item in self._ending), starts, strict=False))
