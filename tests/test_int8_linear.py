"""Int8 weights: their coding, their layers, and how close they keep the demo model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from model_worker.compiled.modules import StreamedLinear, stream_linears
from model_worker.int8_linear import Int8Linear, quantize_linears, round_rows
from tests.demo import load_demo, policy_text
from tests.models import build_model


def make_linear(outputs: int = 12, inputs: int = 10, *, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def test_weights_are_coded_by_output() -> None:
    linear = make_linear(2, 3, bias=False)
    linear.weight.copy_(torch.tensor([[1.27, -0.635, 0.004], [0.0, 0.0, 0.0]]))
    coded = Int8Linear(linear)
    assert coded.weight.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert coded.scale.tolist() == pytest.approx([0.01, 0.0])
    x = torch.tensor([[1.0, 1.0, 1.0]])
    torch.testing.assert_close(coded(x), torch.tensor([[0.63, 0.0]]))


def test_activations_are_rounded_row_by_row() -> None:
    x = torch.tensor([[3.2767, 0.00004, -1.0], [0.0, 0.0, 0.0]])
    wanted = torch.tensor([[3.2767, 0.0, -1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(round_rows(x), wanted, rtol=1e-6, atol=1e-7)


def test_more_outputs_than_are_decoded_at_once() -> None:
    linear = make_linear(9000, 4)
    coded, x = Int8Linear(linear), torch.randn(3, 4)
    wanted = F.linear(round_rows(x), coded.weight * coded.scale[:, None], linear.bias)
    torch.testing.assert_close(coded(x), wanted)


@pytest.mark.parametrize("rows", [1, 5, 48, 130])
@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_streamed_layers_compute_the_same(rows: int, is_coded: bool, bias: bool) -> None:
    linear = make_linear(bias=bias)
    layer: torch.nn.Linear | Int8Linear = Int8Linear(linear) if is_coded else linear
    x = torch.randn(1, rows, 10)
    wanted, weight = layer(x), layer.weight.clone()
    streamed = StreamedLinear(layer)
    torch.testing.assert_close(streamed(x), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(streamed.weight, weight)
    assert layer.weight.numel() == 0  # nothing is held twice


def test_a_model_that_has_no_compiled_decoder_gets_streamed_layers() -> None:
    model = copy.deepcopy(build_model("gemma"))
    ids = torch.tensor([list(range(4, 40))])
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        assert stream_linears(model) == 2 * 7 + 1
        assert float((model(ids, use_cache=False).logits - wanted).abs().max()) < 2e-4


def test_the_demo_model_stays_close() -> None:
    """Greedy agreement of at least .95 and a perplexity of at most 1.02 times float32's."""
    demo = load_demo()
    ids = torch.tensor([demo.text_ids(policy_text())[:400]])
    with torch.inference_mode():
        exact = demo.loaded.model(ids, use_cache=False).logits[0]
        coded_model = copy.deepcopy(demo.loaded.model)
        assert quantize_linears(coded_model) == 30 * 7 + 1
        coded = coded_model(ids, use_cache=False).logits[0]
    agreement = float((exact.argmax(-1) == coded.argmax(-1)).float().mean())
    loss = [float(F.cross_entropy(logits[:-1], ids[0, 1:])) for logits in (exact, coded)]
    assert agreement >= 0.95
    assert loss[1] - loss[0] <= 0.0198  # ln(1.02)
    assert float((exact - coded).abs().max()) > 0.05


def test_half_precision_does_not_overflow() -> None:
    linear = make_linear(4, 64, bias=False)
    x = torch.ones(1, 64)
    x[0, 5] = 900.0
    wanted = linear(x)
    coded = Int8Linear(linear)(x.half())
    assert bool(coded.isfinite().all())
    torch.testing.assert_close(coded.float(), wanted, rtol=0.02, atol=1.0)
