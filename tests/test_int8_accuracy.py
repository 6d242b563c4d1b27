"""How close int8 below the device is to exact, on the demo model and real text.

A policy as system prompt and public questions are answered greedily, exactly; then once more after
a restart, with the whole prompt out of int8 blocks and the exact answer's tokens fed at each
position, so that positions are compared under one history. The figures are in docs/sizing.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from model_worker.batch import ScheduledRequest
from model_worker.sampler import Sampler
from tests.demo import load_demo, mt_bench, policy_text
from tests.rig import EngineRig, RigOptions, greedy

NEW_TOKENS = 20


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


class RecordingSampler(Sampler):
    """Keeps the logits at each position: {request: [(vocab,), ...]}."""

    def __init__(self) -> None:
        self.logits: dict[str, list[torch.Tensor]] = {}

    def sample(
        self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]
    ) -> list[tuple[int, ...]]:
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

    def sample(
        self, logits: torch.Tensor, ending: Sequence[ScheduledRequest]
    ) -> list[tuple[int, ...]]:
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
        return [(token,) for token in tokens]


def prompts() -> dict[str, list[int]]:
    demo = load_demo()
    questions = [first for first, _ in mt_bench()]
    policy = {"role": "system", "content": policy_text()}
    chats = {f"policy {n}": [policy, {"role": "user", "content": questions[n]}] for n in (0, 9)}
    chats |= {f"q{n}": [{"role": "user", "content": questions[n]}] for n in range(4, 80, 8)}
    return {name: demo.chat_ids(messages) for name, messages in chats.items()}


def test_greedy_agreement_and_logit_error(tmp_path: Path) -> None:
    model = load_demo().loaded.model
    options = RigOptions(
        block_size=32, num_blocks=160, max_model_len=4096, chunk=512,
        disk_folder=tmp_path, num_disk=160, host_dtype="int8",
    )  # fmt: skip
    exact = RecordingSampler()
    rig = EngineRig(model, options, exact)
    for name, prompt in prompts().items():
        rig.submit(name, prompt, greedy(NEW_TOKENS))
    rig.run()
    rig.settle()
    rig.close()
    coded = ForcingSampler(exact.logits)
    rig = EngineRig(model, options, coded)
    for name, prompt in prompts().items():
        rig.submit(name, prompt, greedy(NEW_TOKENS))
    rig.run()
    for name, prompt in prompts().items():
        assert rig.num_cached(name) == len(prompt) - 1
    rig.close()

    num_positions = len(coded.agreed)
    assert num_positions == 12 * NEW_TOKENS
    assert sum(coded.agreed) / num_positions >= 0.97
    assert all(margin < 2 * max(coded.largest) for margin in coded.margins)
    assert max(coded.largest) < 1.0
    # Not exact, or it was not int8 that came back.
    assert 0.01 < sum(coded.mean) / num_positions < 0.1
