"""What the dashboard says of the server's state, and what it marks on the charts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from model_worker.protocol import ModelCard, TokenizerFile
from service.dashboard.marks import MarkLog, WorkerMarks
from service.dashboard.status import Condition, Status, StatusLine, condition_of
from service.workers.base import WorkerState
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry, WorkerReport
from tests.scripted_worker import make_card
from tests.worker_rigs import counting_script


@dataclasses.dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def marked(card: ModelCard | None = None) -> tuple[WorkerRegistry, FakeWorker, MarkLog]:
    worker = FakeWorker(card or make_card(), counting_script, worker_id="w")
    registry = WorkerRegistry([worker])
    log = MarkLog(Clock())
    WorkerMarks(registry, log)
    return registry, worker, log


def told(log: MarkLog) -> list[tuple[str, str]]:
    return [(mark.kind.value, mark.text) for mark in log.marks]


# ---------------------------------------------------------------- marks


def test_a_loss_and_what_follows_are_marked_once() -> None:
    _, worker, log = marked()
    worker.set_loading("10 %")
    worker.set_ready()
    worker.set_lost("it fell over")
    worker.set_lost("it lies there")
    worker.set_ready()
    assert told(log) == [
        ("start", "worker w is ready"),
        ("lost", "worker w is lost: it fell over"),
        ("restart", "worker w has started again"),
    ]


def test_a_worker_that_never_was_ready_is_not_missed() -> None:
    _, worker, log = marked()
    worker.set_failed("no such model")
    assert told(log) == []


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda card: msgspec.structs.replace(card, fingerprint="another"),
            "model",
            "worker v came with another model and is refused",
        ),
        (
            lambda card: with_template(card, "{{ other }}"),
            "template",
            "worker v came with another chat template and is refused",
        ),
    ],
)
async def test_another_model_or_template_is_marked(
    change: Callable[[ModelCard], ModelCard], kind: str, text: str
) -> None:
    card = with_template(make_card(), "{{ messages }}")
    registry, worker, log = marked(card)
    worker.set_ready()
    other = FakeWorker(change(card), counting_script, worker_id="v")
    await registry.add(other)
    assert told(log) == [("start", "worker w is ready"), (kind, text)]
    await other.close()


def with_template(card: ModelCard, template: str) -> ModelCard:
    file = TokenizerFile(
        name="chat_template.jinja", content=template.encode(), sha256=f"sha of {template}"
    )
    return msgspec.structs.replace(card, tokenizer_files=(file,))


def test_the_latest_marks_are_kept() -> None:
    clock = Clock()
    log = MarkLog(clock)
    for number in range(250):
        clock.now = float(number)
        log.add("reset", str(number))  # type: ignore[arg-type]
    assert [log.marks[0].text, log.marks[-1].text, len(log.marks)] == ["50", "249", 200]
    assert log.marks[-1].at == 249.0


# ---------------------------------------------------------------- the top line


def condition(unready: str = "", degraded: str = "", **options: object) -> Condition:
    workers = options.pop("workers", [WorkerReport("a", WorkerState.READY, "")])
    return condition_of(unready, degraded, is_draining=bool(options), workers=workers)  # type: ignore[arg-type]


def test_what_matters_most_is_said() -> None:
    loading = [WorkerReport("a", WorkerState.LOADING, "10 %")]
    mixed = [WorkerReport("a", WorkerState.READY, ""), WorkerReport("b", WorkerState.LOST, "gone")]
    assert condition() == Condition("ready", "1 worker takes requests")
    assert condition(workers=[mixed[0]] * 2).cause == "2 workers take requests"
    assert condition("worker a is loading", workers=loading).state == "loading"
    assert condition("no worker is known", workers=[]) == Condition("loading", "no worker is known")
    assert condition("loading the tokenizer").state == "loading"
    assert condition(degraded="no Redis") == Condition("degraded", "no Redis")
    assert condition(workers=mixed) == Condition(
        "degraded", "1 of 2 workers take requests; b is lost: gone"
    )
    assert condition("shutting down", draining=True).state == "draining"


def test_since_when_is_that_of_the_state_and_not_of_its_cause() -> None:
    clock = Clock()
    now = [Condition("loading", "10 %")]
    line = StatusLine(lambda: now[0], clock)
    assert line.look() == Status("loading", "10 %", 1000.0)
    clock.now, now[0] = 1005.0, Condition("loading", "90 %")
    assert line.look() == Status("loading", "90 %", 1000.0)
    clock.now, now[0] = 1009.0, Condition("ready", "all is well")
    assert line.look() == Status("ready", "all is well", 1009.0)
