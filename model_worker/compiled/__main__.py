"""Compile kernels ahead: `python -m model_worker.compiled`, for the default formats; with `--all`
for int8 weights and int8 KV too.

Some 25 seconds for each pair of formats, once for each machine and version; a worker that finds
nothing compiled does it while it warms up.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import SequenceSpan
from model_worker.compiled.decoder import CompiledDecoder
from model_worker.compiled.elementwise import FEW_ROWS
from model_worker.compiled.weights import DecoderWeights
from model_worker.int8_linear import quantize_linears
from model_worker.step_inputs import StepInputs

BLOCK_SIZE = 8
NUM_BLOCKS = 16


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    _run_once("float32", is_quantized=False)
    if "--all" in arguments:
        _run_once("float32", is_quantized=True)
        _run_once("int8", is_quantized=False)
        _run_once("int8", is_quantized=True)
    print(f"kernels compiled for this CPU in {time.monotonic() - started:.0f} s")
    return 0


def _run_once(kv_dtype: str, is_quantized: bool) -> None:
    """A step of few tokens and one of many, by a model of no use."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    if is_quantized:
        quantize_linears(model)
    spec = KVCacheSpec(BLOCK_SIZE, 1, 1, 8, kv_dtype, 1 if kv_dtype == "int8" else 4)
    tier = DeviceTier(spec, NUM_BLOCKS, torch.device("cpu"))
    decoder = CompiledDecoder(DecoderWeights.take(model), tier)
    for num_tokens in (1, FEW_ROWS):
        ids = np.zeros(num_tokens, np.int64)
        rows = np.arange(num_tokens)
        span = SequenceSpan(0, num_tokens, 0, list(range(NUM_BLOCKS)))
        decoder.run(StepInputs(np.stack([ids, rows, rows]), rows[-1:], (span,)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
