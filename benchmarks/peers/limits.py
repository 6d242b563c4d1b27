"""The least time that the machine's memory and arithmetic leave for what a workload asks.

Owns the demo model's sizes and the bounds: a decode step reads every weight and all KV of its
sequence once; a prefill does two operations per weight and token, and attention over what came
before (reading the weights once is the other bound, and the larger of both counts). The bound of
prefill takes float32 arithmetic for every weight format, so a server that multiplies integers may
come below it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.machine import Machine
from benchmarks.peers.settings import F32_KV_BYTES_PER_TOKEN

Samples = Mapping[str, Sequence[float]]

# Bytes a weight, in the layers and in the projection to the vocabulary. The demo's Q4_1 file has
# 32 weights in 20 bytes, and the projection as Q8_0; int8 leaves its scales out of account.
WEIGHT_BYTES = {"f32": (4.0, 4.0), "int8": (1.0, 1.0), "q4_1": (20 / 32, 34 / 32)}
KV_BYTES = {"f32": F32_KV_BYTES_PER_TOKEN, "int8": F32_KV_BYTES_PER_TOKEN, "q4_1": 23_040}
NUM_USERS = 8  # of the workload shared_8
# Tokens of a prompt that a server which stored all it could must still compute.
NEW_TOKENS = {
    "shared_1": 30,
    "shared_8": 30,
    "sessions": 110,
    "sessions_beyond": 110,
    "long_4k": 30,
    "long_8k": 30,
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    inner: int = 1_536
    vocabulary: int = 49_152

    @property
    def layer_weights(self) -> int:
        """Of all layers: every token is multiplied with each of them."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        """Of the projection to the vocabulary, needed for the last token alone."""
        return self.hidden * self.vocabulary


DEMO = ModelSize()


def decode_step_s(machine: Machine, kind: str, kv_tokens: float) -> float:
    """All weights and the KV of ``kv_tokens`` tokens, read once."""
    in_layers, in_head = WEIGHT_BYTES[kind]
    weights = DEMO.layer_weights * in_layers + DEMO.head_weights * in_head
    return (weights + kv_tokens * KV_BYTES[kind]) / (machine.read_gb_per_s * 1e9)


def prefill_s(machine: Machine, kind: str, new_tokens: float, stored_tokens: float) -> float:
    """From a request to its first token, with ``stored_tokens`` of the prompt's KV at hand."""
    pairs = new_tokens * (stored_tokens + new_tokens / 2)
    attention = 4 * DEMO.layers * DEMO.heads * DEMO.head_dim * pairs
    linear = 2 * (DEMO.layer_weights * new_tokens + DEMO.head_weights)
    compute = (attention + linear) / (machine.gemm_gflops * 1e9)
    return max(compute, decode_step_s(machine, kind, stored_tokens))


def limits(workload: str, samples: Samples, kind: str, machine: Machine) -> dict[str, float]:
    """By metric of the workload: the best value that the machine allows, in the metric's unit.

    Metrics that depend on more than the machine (how requests overlap) have none.
    """
    new = NEW_TOKENS.get(workload)
    if new is None or not samples.get("prompt_tokens"):
        return {}
    prompt = statistics.median(samples["prompt_tokens"])
    warm = prefill_s(machine, kind, new, prompt - new)
    if workload.startswith("sessions"):
        return {"return_ttft_s": warm}
    if workload == "shared_8":
        # What they share is read once for all of them at best.
        kv_tokens = prompt - new + NUM_USERS * new
        return {"tokens_per_s": NUM_USERS / decode_step_s(machine, kind, kv_tokens)}
    return {
        "cold_ttft_s": prefill_s(machine, kind, prompt, 0),
        "warm_ttft_s": warm,
        "decode_tokens_per_s": 1 / decode_step_s(machine, kind, prompt),
    }
