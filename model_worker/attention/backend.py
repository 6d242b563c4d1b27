"""The attention seam: what a backend must do, and how transformers' models reach it.

Owns the registration under transformers' attention interface. Knows nothing of how a backend
computes, nor of scheduling.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from transformers import AttentionInterface

from model_worker.attention.metadata import AttentionMetadata, SequenceSpan

ATTENTION_NAME = "headstart"

# What a model may pass to its attention function that changes the result and that no backend here
# computes. The loader refuses such models; this is the last line against a silent wrong answer.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over their sequences' paged KV."""

    def prepare(self, spans: tuple[SequenceSpan, ...]) -> object:
        """Called once per step; what it returns reaches ``forward`` as ``metadata.plan``."""
        ...

    def forward(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store the new K and V in the pool, then attend.

        ``query`` (1, heads, tokens, head_dim), ``key`` and ``value`` (1, kv_heads, tokens,
        head_dim), rotated already. Returns (1, tokens, heads, head_dim).
        """
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose ``forward`` can be captured in a CUDA graph and replayed for later steps.

    A graph replays addresses and grid sizes, so all that differs between steps must lie in device
    memory that stays where it is. Use: ``plan = reserve(...)`` once per graph; ``refill(plan,
    spans)``, then capture (or replay) the model's forward with ``metadata.plan = plan`` and a
    ``slot_mapping`` that stays where it is too. Nothing in ``forward`` looks at ``metadata.spans``.

    A step smaller than the graph is padded at its end: the rows that no span covers attend to
    nothing and come out as zeros; their slot is -1, which stores nothing.
    """

    def reserve(self, num_rows: int, max_spans: int, max_kv_len: int) -> object:
        """A plan for steps of at most ``num_rows`` new tokens in at most ``max_spans`` sequences of
        at most ``max_kv_len`` tokens each, new ones included. Holds its device memory while it
        lives. Empty (all rows are padding) until it is refilled."""
        ...

    def refill(self, plan: object, spans: tuple[SequenceSpan, ...]) -> bool:
        """Describe the step to a reserved plan, by copies on the current stream (outside of the
        graph). The host side is free for the next step when it returns. False, with the plan left
        as it was, when the step is larger than the plan: prepare() and run it without the graph."""
        ...


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attention_metadata: AttentionMetadata | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface on top of the step's backend."""
    if attention_metadata is None:
        raise TypeError("a model loaded for paged attention was called without attention_metadata")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise TypeError(f"paged attention does not compute {name!r}, which this model needs")
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attention_metadata.backend.forward(
        layer_idx, query, key, value, scale, attention_metadata
    )
    return output, None


def register_attention() -> None:
    """Make ``attn_implementation="headstart"`` known to transformers; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
