"""The compiled decoder against transformers' own modules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.attention.metadata import SequenceSpan
from model_worker.compiled.decoder import CompiledDecoder
from model_worker.compiled.weights import DecoderWeights, fits
from model_worker.int8_linear import quantize_linears
from model_worker.step_inputs import StepInputs
from tests.models import FAMILIES, build_model
from tests.rig import kv_spec

BLOCK = 8
FITTING = {
    "llama", "llama-mha", "llama-mqa", "llama-tied", "llama-linear", "llama-llama3", "llama-yarn",
    "qwen2", "qwen2-tied-yarn", "qwen3", "qwen3-tied", "mistral", "mistral-no-window",
}  # fmt: skip


def make_decoder(model: PreTrainedModel, num_blocks: int = 40) -> CompiledDecoder:
    tier = DeviceTier(kv_spec(model, BLOCK), num_blocks, torch.device("cpu"))
    return CompiledDecoder(DecoderWeights.take(copy.deepcopy(model)), tier)


def step(ids: list[int], start: int, blocks: list[int]) -> StepInputs:
    positions = np.arange(start, start + len(ids))
    slots = np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    span = SequenceSpan(0, len(ids), start, blocks)
    per_token = np.stack([np.array(ids), positions, slots])
    return StepInputs(per_token, np.arange(len(ids)), (span,))


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_which_models_fit() -> None:
    found = {name for name in FAMILIES if fits(build_model(name))}
    assert found == FITTING


def test_other_activations_and_biases_do_not_fit() -> None:
    def model(**overrides: object) -> PreTrainedModel:
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **overrides))

    assert fits(model())
    assert not fits(model(hidden_act="gelu"))
    assert not fits(model(mlp_bias=True))
    assert not fits(model().to(torch.bfloat16))


@pytest.mark.parametrize("name", sorted(FITTING))
def test_chunks_give_the_logits_of_the_whole(name: str) -> None:
    model = build_model(name)
    ids = np.random.default_rng(1).integers(4, model.config.vocab_size, 45).tolist()
    wanted = logits_of(model, ids)
    decoder = make_decoder(model)
    blocks = [7, 8, 9, 2, 30, 31]
    for start, stop in [(0, 20), (20, 21), (21, 26), (26, 45)]:
        logits = decoder.run(step(ids[start:stop], start, blocks))
        assert float((logits - wanted[start:stop]).abs().max()) < 2e-4


def test_attention_biases_count() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    ids = list(range(3, 23))
    wanted = logits_of(model, ids)
    logits = make_decoder(model).run(step(ids, 0, [1, 2, 3]))
    assert float((logits - wanted).abs().max()) < 2e-4


@pytest.mark.parametrize("name", ["llama", "qwen2-tied-yarn"])
def test_int8_weights_are_those_of_the_quantized_modules(name: str) -> None:
    """But for activations whose last bit moves them to the next of 32,767 steps."""
    model = copy.deepcopy(build_model(name))
    ids = list(range(4, 64))
    exact = logits_of(model, ids)
    quantize_linears(model)
    wanted = logits_of(model, ids)
    assert float((wanted - exact).abs().max()) > 0.05
    decoder = make_decoder(model)
    for start, stop in ((0, 50), (50, 60)):
        logits = decoder.run(step(ids[start:stop], start, list(range(8))))
        assert float((logits - wanted[start:stop]).abs().max()) < 0.005
        assert float((logits - wanted[start:stop]).abs().mean()) < 0.0005


def test_a_wrong_row_in_the_pool_changes_the_logits() -> None:
    model = build_model("llama")
    tier = DeviceTier(kv_spec(model, BLOCK), 8, torch.device("cpu"))
    decoder = CompiledDecoder(DecoderWeights.take(copy.deepcopy(model)), tier)
    ids = list(range(4, 20))
    decoder.run(step(ids[:15], 0, [1, 2]))
    right = decoder.run(step(ids[15:], 15, [1, 2])).clone()
    tier.keys[0, 1, 3] += 1.0
    assert float((decoder.run(step(ids[15:], 15, [1, 2])) - right).abs().max()) > 1e-3
