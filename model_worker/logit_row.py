"""Whose logits a row is. Owns what was said so far, drafts included; knows nothing of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model_worker.request import Request, TokenIds


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Whose logits a row is: those of the token after the request's first ``num_tokens`` and
    ``ahead``, tokens that are taken to follow these.

    The last of the first ``num_tokens`` need not be known yet, unless the request asks for what
    depends on it.
    """

    request: Request
    num_tokens: int
    ahead: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Of the token to be drawn, among the request's output tokens."""
        return self.num_tokens - self.request.num_prompt_tokens + len(self.ahead)

    @property
    def token_ids(self) -> TokenIds:
        assert self.num_tokens <= self.request.num_tokens
        return _followed(self.request.token_ids[: self.num_tokens], self.ahead)

    @property
    def output_token_ids(self) -> TokenIds:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def is_bounded(self) -> bool:
        """Whether some tokens may not be drawn here: by a grammar, or for being an end too soon."""
        request = self.request
        return request.matcher is not None or request.sampling_params.min_tokens > 0


def _followed(token_ids: TokenIds, ahead: tuple[int, ...]) -> TokenIds:
    return np.concatenate((token_ids, ahead), dtype=np.int32) if ahead else token_ids
