"""What is built for a worker is tried before the worker calls itself ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from model_worker.build import WorkerParts, warm_up
from model_worker.engine import Engine
from model_worker.loader import ModelLoadError
from tests.scheduler_kit import MAX_MODEL_LEN, VOCAB, World


def parts_of(world: World, max_model_len: int = MAX_MODEL_LEN) -> WorkerParts:
    loaded = SimpleNamespace(max_model_len=max_model_len, vocab_size=VOCAB)

    def new_engine(*, is_storing: bool) -> Engine:
        assert not is_storing
        return world.engine

    parts = SimpleNamespace(new_engine=new_engine, loaded=loaded, pacer=world.pacer)
    return cast(WorkerParts, parts)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("max_model_len", [2, 8, 9, MAX_MODEL_LEN])
def test_the_trial_leaves_nothing_behind(max_model_len: int, runs_ahead: bool) -> None:
    world = World(is_caching=False, runs_ahead=runs_ahead)
    warm_up(parts_of(world, max_model_len))
    assert world.runner.batches
    stats = world.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_what_the_first_request_pays_for_set_up_is_forgotten() -> None:
    world = World(is_caching=False)
    clear = world.pacer.costs.clear
    forgotten: list[float | None] = []

    def note() -> None:
        forgotten.append(world.pacer.costs.decode_step_s(1))
        clear()

    world.pacer.costs.record(1, 0, 60.0)  # a step in which kernels were compiled
    world.pacer.costs.clear = note  # type: ignore[method-assign]
    warm_up(parts_of(world))
    assert len(forgotten) == 1
    assert forgotten[0] is not None
    assert forgotten[0] > 1.0
    after = world.pacer.costs.decode_step_s(1)
    assert after is not None
    assert after < 1.0 + 1e-9


def test_a_model_that_fails_is_not_served() -> None:
    world = World(is_caching=False)
    world.runner.fails_next = True
    with pytest.raises(ModelLoadError, match="a trial, failed: the model failed on this step"):
        warm_up(parts_of(world))
