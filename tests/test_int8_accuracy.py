"""How close int8 KV is to exact, on the demo model and real text: below the device, and on it.

A policy as system prompt and public questions are answered greedily, exactly; then once more, the
exact answer's tokens fed at each position, so that positions are compared under one history: after
a restart with the whole prompt out of int8 blocks, and from the start with all KV in int8. What
int8 on the device does to the perplexity of text is measured on the model run whole, to which the
engine is held elsewhere. The figures of docs/sizing.md are those of the whole policy and of longer
texts; here they are shorter, and the bounds the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from model_worker.batch import ScheduledRequest
from model_worker.sampler import Sampler
from tests.demo import load_demo, mt_bench, policy_text
from tests.rig import EngineRig, RigOptions, greedy
from tests.test_int8_equality import WHOLE, attend_rounded

NEW_TOKENS = 20
WINDOW_TOKENS = 512
SYSTEM_CHARACTERS = 2400  # some 550 tokens


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


class RecordingSampler(Sampler):
    """Keeps the logits at each position: {request: [(vocab,), ...]}."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, list[torch.Tensor]] = {}

    def sample(self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]) -> torch.Tensor:
        for row, item in zip(logits, ending, strict=True):
            self.logits.setdefault(item.request.key.request_id, []).append(row.clone())
        return super().sample(logits, ending)


@dataclass
class ForcingSampler(Sampler):
    """Answers with the exact tokens, and notes what it would have said and how far off it was."""

    exact: dict[str, list[torch.Tensor]]
    agreed: list[bool] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # of the exact best, where they differ
    largest: list[float] = field(default_factory=list)  # logit difference at a position
    mean: list[float] = field(default_factory=list)

    def sample(self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]) -> torch.Tensor:
        tokens = []
        for row, item in zip(logits, ending, strict=True):
            wanted = self.exact[item.request.key.request_id][item.request.num_output_tokens]
            difference = (row - wanted).abs()
            tokens.append(int(wanted.argmax()))
            said = int(row.argmax())
            self.agreed.append(said == tokens[-1])
            if said != tokens[-1]:
                self.margins.append(float(wanted.max() - wanted[said]))
            self.largest.append(float(difference.max()))
            self.mean.append(float(difference.mean()))
        return torch.tensor(tokens)


def prompts() -> dict[str, list[int]]:
    demo = load_demo()
    questions = [first for first, _ in mt_bench()]
    policy = {"role": "system", "content": policy_text()[:SYSTEM_CHARACTERS]}
    chats = {f"policy {n}": [policy, {"role": "user", "content": questions[n]}] for n in (0, 9)}
    chats |= {f"q{n}": [{"role": "user", "content": questions[n]}] for n in range(4, 80, 8)}
    return {name: demo.chat_ids(messages) for name, messages in chats.items()}


OPTIONS = RigOptions(block_size=32, num_blocks=160, max_model_len=4096, chunk=200)


def answer(options: RigOptions, sampler: Sampler) -> EngineRig:
    rig = EngineRig(load_demo().loaded.model, options, sampler)
    for name, prompt in prompts().items():
        rig.submit(name, prompt, greedy(NEW_TOKENS))
    rig.run()
    rig.settle()
    rig.close()
    return rig


@dataclass(frozen=True)
class Exact:
    logits: dict[str, list[torch.Tensor]]
    options: RigOptions  # with which a restart finds the prompts in int8


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Exact:
    folder = tmp_path_factory.mktemp("disk")
    options = replace(OPTIONS, disk_folder=folder, num_disk=160, host_dtype="int8")
    sampler = RecordingSampler()
    answer(options, sampler)
    return Exact(sampler.logits, options)


def test_below_the_device(exact: Exact) -> None:
    coded = ForcingSampler(exact.logits)
    rig = answer(exact.options, coded)
    for name, prompt in prompts().items():
        assert rig.num_cached(name) == len(prompt) - 1
    assert_close(coded)


def test_on_the_device(exact: Exact) -> None:
    coded = ForcingSampler(exact.logits)
    answer(replace(OPTIONS, kv_dtype="int8"), coded)
    assert_close(coded, largest=2.0, mean=0.15)


def assert_close(coded: ForcingSampler, largest: float = 1.0, mean: float = 0.1) -> None:
    num_positions = len(coded.agreed)
    assert num_positions == 12 * NEW_TOKENS
    assert sum(coded.agreed) / num_positions >= 0.97
    assert all(margin < 2 * max(coded.largest) for margin in coded.margins)
    assert max(coded.largest) < largest
    # Not exact, or it was not int8 that came back.
    assert 0.01 < sum(coded.mean) / num_positions < mean


@torch.inference_mode()
def test_perplexity_on_the_device() -> None:
    AttentionInterface.register(WHOLE, attend_rounded)
    demo = load_demo()
    model = demo.loaded.model
    questions = "\n\n".join(f"{first}\n{second}" for first, second in mt_bench())
    losses: dict[str, list[float]] = {"sdpa": [], WHOLE: []}
    for text in (policy_text(), questions):
        ids = torch.tensor([demo.text_ids(text)[:WINDOW_TOKENS]])
        assert ids.shape[1] == WINDOW_TOKENS
        for name, values in losses.items():
            with attention(model, name):
                logits = model(ids, use_cache=False).logits[0]
            values.append(float(F.cross_entropy(logits[:-1], ids[0, 1:])))
    exact_loss, coded_loss = (sum(values) / len(values) for values in losses.values())
    assert 5 < math.exp(exact_loss) < 50
    assert coded_loss != exact_loss
    assert math.exp(coded_loss - exact_loss) < 1.01


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
