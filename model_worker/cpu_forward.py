"""The forward pass of a float32 model on the CPU: which parts of it are compiled.

Imported only where a model runs on a CPU, since a worker with a GPU does without the compiler.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.compiled.decoder import CompiledDecoder
from model_worker.compiled.modules import stream_linears
from model_worker.compiled.weights import DecoderWeights, fits
from model_worker.forward import EagerForward, Forward


def cpu_forward(model: PreTrainedModel, tier: DeviceTier, backend: AttentionBackend) -> Forward:
    """The whole decoder where the model is of the Llama kind, else its linear layers alone."""
    if fits(model):
        return CompiledDecoder(DecoderWeights.take(model), tier)
    stream_linears(model)
    return EagerForward(model, backend, torch.device("cpu"))
