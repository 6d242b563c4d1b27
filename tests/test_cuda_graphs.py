"""Graphs: which sizes, which one for a step, what is padded, and the same tokens as without."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import (
    ATTENTION_NAME,
    CapturableBackend,
    register_attention,
)
from model_worker.attention.cpu import CpuBackend
from model_worker.attention.metadata import SequenceSpan
from model_worker.attention.sdpa import SdpaBackend
from model_worker.cuda_graphs import GraphForward, GraphShape, graph_shapes
from model_worker.forward import EagerForward
from model_worker.loader.rope import pin_rope
from model_worker.step_inputs import StepInputs
from tests.device_kit import make_spec
from tests.graph_kit import CapturableSdpa, ReplayingCapture, captured
from tests.models import FAMILIES, VOCAB_SIZE, build_model
from tests.rig import EngineRig, Reference, RigOptions, kv_spec, reference_answer

SHAPES = graph_shapes(4, 100)
BLOCK = 8


@cache
def model_of(family: str, attention: str = "sdpa") -> PreTrainedModel:
    model = build_model(family, attn_implementation=attention)
    pin_rope(model, FAMILIES[family].max_model_len)
    return model


def test_sizes_double_up_to_the_most_requests_and_end_at_the_step_budget() -> None:
    assert graph_shapes(6, 100) == (
        GraphShape(1, 1, 1),
        GraphShape(2, 2, 2),
        GraphShape(4, 4, 4),
        GraphShape(6, 6, 6),
        GraphShape(16, 16, 1),
        GraphShape(64, 16, 1),
    )
    rows = [shape.num_rows for shape in graph_shapes(64, 8192)]
    assert rows == [1, 2, 4, 8, 16, 16, 32, 64, 64, 128, 256]
    assert graph_shapes(1, 8) == (GraphShape(1, 1, 1),)


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "num_spans", "wanted"),
    [
        (1, 1, 1, GraphShape(1, 1, 1)),
        (2, 2, 2, GraphShape(2, 2, 2)),
        (3, 3, 3, GraphShape(4, 4, 4)),
        (3, 3, 1, GraphShape(4, 4, 4)),  # one request and two drafts
        (5, 1, 1, GraphShape(16, 16, 1)),
        (17, 17, 1, None),
        (17, 1, 1, GraphShape(64, 16, 1)),
        (64, 1, 1, GraphShape(64, 16, 1)),
        (65, 1, 1, None),
        (5, 5, 5, None),
        (10, 1, 2, None),
        (3, 0, 1, None),  # a chunk inside a prompt: its logits are not even computed
    ],
)
@torch.inference_mode()
def test_the_smallest_that_holds_a_step_is_replayed(
    num_tokens: int, num_logits: int, num_spans: int, wanted: GraphShape | None
) -> None:
    world = World()
    forward, capture = world.graphs()
    logits = forward.run(world.inputs(num_tokens, num_logits, num_spans))
    assert len(logits) == num_logits
    # They are captured from the largest to the smallest.
    names = list(reversed(SHAPES))
    assert [names[number] for number in capture.replayed] == ([] if wanted is None else [wanted])


class World:
    """A tiny model over a pool full of NaN, so that a row that is read unwritten shows."""

    def __init__(self) -> None:
        register_attention()
        self.model = model_of("llama", ATTENTION_NAME)
        self.tier = DeviceTier(kv_spec(self.model, BLOCK, "float32"), 64, torch.device("cpu"))
        for tensor in self.tier.tensors:
            tensor.fill_(torch.nan)

    def graphs(self, refused: int = 10**9) -> tuple[GraphForward, ReplayingCapture]:
        capture = ReplayingCapture()
        forward = captured(capture, SHAPES, 128, refused)(self.model, self.tier)
        assert capture.num_captured == len(SHAPES)
        return forward, capture

    def inputs(
        self, num_tokens: int, num_logits: int, num_spans: int, *, context: int = 0, seed: int = 0
    ) -> StepInputs:
        """Sequences of two rows at least but for the last, which has the rest; they have blocks of
        their own, and ``context`` tokens before these."""
        rng = np.random.default_rng(seed)
        counts = [num_tokens // num_spans] * (num_spans - 1)
        counts.append(num_tokens - sum(counts))
        spans, columns, start = [], [], 0
        for number, count in enumerate(counts):
            blocks = [number * 12 + i for i in range(12)]
            spans.append(SequenceSpan(start, count, context, blocks))
            positions = np.arange(context, context + count)
            slots = np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
            columns.append(np.stack([rng.integers(0, VOCAB_SIZE, count), positions, slots]))
            start += count
        rows = np.arange(num_tokens - num_logits, num_tokens)
        return StepInputs(np.concatenate(columns, axis=1), rows, tuple(spans))


@torch.inference_mode()
def test_padded_and_replayed_is_what_eager_gives_and_no_other_row_is_written() -> None:
    """A prompt, then single tokens, at each size: each way on a pool of its own."""
    replayed, eager = World(), World()
    graphs, capture = replayed.graphs()
    plain = EagerForward(eager.model, SdpaBackend(eager.tier), torch.device("cpu"))
    steps = [(30, 1, 1, 0), (1, 1, 1, 30), (5, 2, 1, 31), (3, 3, 3, 0), (3, 3, 3, 1), (2, 2, 2, 2)]
    for seed, (num_tokens, num_logits, num_spans, context) in enumerate(steps):
        inputs = replayed.inputs(num_tokens, num_logits, num_spans, context=context, seed=seed)
        wanted = plain.run(inputs)
        torch.testing.assert_close(graphs.run(inputs), wanted, rtol=0, atol=2e-5)
        for ours, theirs in zip(replayed.tier.tensors, eager.tier.tensors, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5, equal_nan=True)
    assert len(capture.replayed) == len(steps)


@torch.inference_mode()
def test_a_plan_that_cannot_hold_the_step_leaves_it_to_the_eager_pass() -> None:
    world = World()
    forward, capture = world.graphs(refused=20)
    short = world.inputs(19, 1, 1)
    forward.run(short)
    assert len(capture.replayed) == 1
    logits = forward.run(world.inputs(1, 1, 1, context=19))
    assert len(capture.replayed) == 1
    assert torch.isfinite(logits).all()


@torch.inference_mode()
def test_a_replay_owes_nothing_to_the_step_before() -> None:
    """A small step after a large one in the same graph: its padding is padding again."""
    world = World()
    forward, capture = world.graphs()
    forward.run(world.inputs(60, 1, 1))
    before = [tensor.clone() for tensor in world.tier.tensors]
    forward.run(world.inputs(20, 1, 1, seed=1))
    assert capture.replayed == [0, 0]
    for tensor, old in zip(world.tier.tensors, before, strict=True):
        assert torch.equal(tensor[:, 3:], old[:, 3:]) or tensor[:, 8:].isnan().all()
        rows = tensor[:, :8].flatten(1, 2)
        old_rows = old[:, :8].flatten(1, 2)
        assert torch.equal(rows[:, 20:60], old_rows[:, 20:60])
        assert not torch.equal(rows[:, :20], old_rows[:, :20])


def test_what_can_be_captured_says_so() -> None:
    tier = DeviceTier(make_spec(), 2, torch.device("cpu"))
    assert isinstance(CapturableSdpa(tier), CapturableBackend)
    assert not isinstance(SdpaBackend(tier), CapturableBackend)
    assert not isinstance(CpuBackend(tier), CapturableBackend)


@cache
def reference_of(family: str, prompt: tuple[int, ...]) -> Reference:
    return reference_answer(model_of(family), prompt, 6)


@pytest.mark.parametrize(
    ("family", "runs_ahead"),
    [("llama", False), ("gpt-neox", False), ("phi3-longrope", False), ("llama", True)],
)
def test_the_gate_holds_with_graphs(family: str, runs_ahead: bool) -> None:
    """Cold, warm, in batches and preempted; most steps are replayed."""
    capture = ReplayingCapture()
    options = RigOptions(
        block_size=BLOCK,
        num_blocks=40,
        chunk=70,
        max_model_len=140,
        max_num_seqs=6,
        runs_ahead=runs_ahead,
    )
    shapes = graph_shapes(6, 70)
    rig = EngineRig(model_of(family), options, make_forward=captured(capture, shapes, 140))
    rng = np.random.default_rng(3)
    shared = rng.integers(10, VOCAB_SIZE, 40).tolist()
    prompts = [[*shared, *rng.integers(10, VOCAB_SIZE, 3 + 9 * i).tolist()] for i in range(6)]
    references = {f"p{i}": reference_of(family, tuple(ids)) for i, ids in enumerate(prompts)}
    rig.check(references)
    for name, reference in references.items():
        rig.check({f"{name} again": reference})
    rig.sampler.report.assert_passes()
    assert {reversed_shape(shapes, n) for n in capture.replayed} >= {
        GraphShape(1, 1, 1), GraphShape(6, 6, 6), GraphShape(64, 16, 1)
    }  # fmt: skip


def reversed_shape(shapes: tuple[GraphShape, ...], number: int) -> GraphShape:
    return tuple(reversed(shapes))[number]


def test_negative_control_a_wrong_padding_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that stores into a slot instead of nowhere."""
    monkeypatch.setattr("model_worker.cuda_graphs.NO_SLOT", 3)
    world = World()
    with pytest.raises(AssertionError):
        world.graphs()
