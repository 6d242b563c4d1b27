"""What the comparison must show, and whether it does.

Owns the goals and their arithmetic. A goal compares two servers that took turns in one piece of
the run; figures of different pieces are not set against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Medians = Mapping[str, Mapping[str, Mapping[str, float]]]  # workload, peer, metric
Pieces = Mapping[str, Mapping[str, int]]  # workload, peer: the piece that measured it


@dataclass(frozen=True, slots=True)
class Goal:
    """``metric`` of ours over that of ``peer``; at most ``bound``, or with ``at_least`` no less."""

    text: str
    workload: str
    metric: str
    ours: str
    peer: str
    bound: float
    at_least: bool = False
    when: str = ""

    def is_reached(self, ratio: float) -> bool:
        return ratio >= self.bound if self.at_least else ratio <= self.bound


_F32, _INT8 = "headstart-f32", "headstart-int8"
_VLLM, _LLAMA = "vllm-f32", "llama-q4_1"
# A short prompt of generated words makes a small model repeat itself, which drafts live on.
_NO_DRAFTS = "-nodrafts"
GOALS = (
    Goal("TTFT, prompt stored", "shared_1", "warm_ttft_s", _F32, _VLLM, 0.6),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _F32, _VLLM, 1.25, True),
    Goal("Eight users, tokens a second", "shared_8", "tokens_per_s", _F32, _VLLM, 1.5, True),
    Goal("Chats beyond memory, requests a second", "sessions_beyond", "requests_per_s",
         _F32, _VLLM, 3.0, True),
    Goal("TTFT, prompt stored", "shared_1", "warm_ttft_s", _INT8, _LLAMA, 0.6),
    Goal("TTFT, prompt new", "shared_1", "cold_ttft_s", _INT8, _LLAMA, 0.4),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _INT8, _VLLM, 2.0, True),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _INT8, _LLAMA, 1.0, True),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _F32 + _NO_DRAFTS, _VLLM, 1.25, True,
         "no drafts"),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _INT8 + _NO_DRAFTS, _VLLM, 2.0, True,
         "no drafts"),
    Goal("Decode alone", "shared_1", "decode_tokens_per_s", _INT8 + _NO_DRAFTS, _LLAMA, 1.0, True,
         "no drafts"),
    Goal("Eight users, prompt new, tokens a second", "shared_8", "cold_tokens_per_s",
         _INT8, _LLAMA, 6.0, True),
    Goal("Eight users, tokens a second", "shared_8", "tokens_per_s", _INT8, _LLAMA, 6.0, True),
    Goal("Prompts that share nothing", "zero_reuse", "all_tokens_per_s",
         _F32, "headstart-f32-nocache", 0.99, True),
    Goal("Prompts that share nothing", "zero_reuse", "all_tokens_per_s",
         _INT8, "headstart-int8-nocache", 0.99, True),
)  # fmt: skip


def evaluate(medians: Medians, pieces: Pieces) -> list[dict[str, Any]]:
    """A row for each goal; ``ratio`` and ``reached`` are None where it was not measured so."""
    rows = []
    for goal in GOALS:
        measured = medians.get(goal.workload, {})
        ours = measured.get(goal.ours, {}).get(goal.metric)
        theirs = measured.get(goal.peer, {}).get(goal.metric)
        numbers = pieces.get(goal.workload, {})
        together = numbers.get(goal.ours) == numbers.get(goal.peer)
        ratio = ours / theirs if ours is not None and theirs and together else None
        rows.append(
            {
                "goal": goal.text + (f" ({goal.when})" if goal.when else ""),
                "workload": goal.workload,
                "metric": goal.metric,
                "ours": goal.ours,
                "peer": goal.peer,
                "bound": f"{'>=' if goal.at_least else '<='} {goal.bound:g} x",
                "ours_value": ours,
                "peer_value": theirs,
                "ratio": None if ratio is None else round(ratio, 3),
                "reached": None if ratio is None else goal.is_reached(ratio),
            }
        )
    return rows
