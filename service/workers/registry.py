"""The workers of one gateway: which of them serve, and if none does, why.

Owns the choice of the model that this gateway serves: the card of the first worker that was ready.
A worker whose card differs is refused by name and takes no request. Knows nothing of routing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model_worker.protocol import ModelCard, TenantPolicy
from service.workers.base import (
    StateChange,
    StateListener,
    Worker,
    WorkerNotReadyError,
    WorkerState,
)
from service.workers.cache_news import CacheListener

_MUST_AGREE = ("fingerprint", "block_size", "hash_version")


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's state as the gateway takes it: one that is refused here has failed."""

    worker_id: str
    state: WorkerState
    detail: str


@dataclass(frozen=True, slots=True)
class RegistryHealth:
    ready: bool
    reason: str  # empty when ready, else one line for a person


class WorkerRegistry:
    """Starts, watches and closes its workers, whose ids must differ (ValueError).

    The card adopted stays for the life of the registry: another model needs another tokenizer, so
    a gateway that is to serve it starts anew.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers: dict[str, Worker] = {}
        self._refused: dict[str, str] = {}
        self._card: ModelCard | None = None
        self._listeners: list[StateListener] = []
        self._event_listeners: list[CacheListener] = []
        self._policies: tuple[TenantPolicy, ...] | None = None
        self._shared_prefixes: tuple[bytes, ...] = ()
        self._changed: asyncio.Future[None] | None = None
        for worker in workers:
            if worker.worker_id in self._workers:
                raise ValueError(f"two workers are named {worker.worker_id!r}")
            self._join(worker)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def card(self) -> ModelCard | None:
        """Of the model that this gateway serves; None until a worker was ready."""
        return self._card

    def ready_workers(self) -> tuple[Worker, ...]:
        """Those that take requests now."""
        return tuple(
            worker
            for worker in self._workers.values()
            if worker.state is WorkerState.READY and worker.worker_id not in self._refused
        )

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def reports(self) -> tuple[WorkerReport, ...]:
        return tuple(self._report(worker) for worker in self._workers.values())

    def health(self) -> RegistryHealth:
        if self.ready_workers():
            return RegistryHealth(ready=True, reason="")
        if not self._workers:
            return RegistryHealth(ready=False, reason="no worker is known")
        lines = (
            f"worker {report.worker_id} is {report.state}"
            + (f": {report.detail}" if report.detail else "")
            for report in self.reports()
        )
        return RegistryHealth(ready=False, reason="; ".join(lines))

    def add_state_listener(self, listener: StateListener) -> None:
        """Call ``listener`` at each change of a worker, refusals included."""
        self._listeners.append(listener)

    def add_event_listener(self, listener: CacheListener) -> None:
        """Call ``listener`` with what the caches of all workers tell, also of those added later."""
        self._event_listeners.append(listener)
        for worker in self._workers.values():
            worker.add_event_listener(listener)

    def set_tenant_policies(
        self, policies: Sequence[TenantPolicy], shared_prefixes: Sequence[bytes] = ()
    ) -> None:
        """These hold and no others, for all workers, also for those added later."""
        self._policies = tuple(policies)
        self._shared_prefixes = tuple(shared_prefixes)
        for worker in self._workers.values():
            worker.set_tenant_policies(self._policies, self._shared_prefixes)

    async def start(self) -> None:
        """Start all workers; does not wait for them."""
        await asyncio.gather(*(worker.start() for worker in self._workers.values()))

    async def add(self, worker: Worker) -> None:
        """Start one more worker; does not wait for it. ValueError if its id is in use."""
        if worker.worker_id in self._workers:
            raise ValueError(f"two workers are named {worker.worker_id!r}")
        self._join(worker)
        for listener in self._event_listeners:
            worker.add_event_listener(listener)
        await worker.start()

    async def remove(self, worker_id: str) -> None:
        """Close a worker, which ends what it still computes for this gateway, and forget it."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            await worker.close()
            self._refused.pop(worker_id, None)

    async def wait_ready(self, timeout_s: float | None = None) -> ModelCard:
        """Wait for the first ready worker. Raises WorkerNotReadyError, at once if all failed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready_workers():
                    if all(report.state is WorkerState.FAILED for report in self.reports()):
                        raise WorkerNotReadyError(self.health().reason)
                    await self._next_change()
        except TimeoutError:
            raise WorkerNotReadyError(self.health().reason) from None
        assert self._card is not None, "a ready worker's card has been adopted"
        return self._card

    async def close(self) -> None:
        """Close all workers, whatever becomes of one of them; raises the first failure."""
        results = await asyncio.gather(
            *(worker.close() for worker in self._workers.values()), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    # ------------------------------------------------------------ changes

    def _join(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        if self._policies is not None:
            worker.set_tenant_policies(self._policies, self._shared_prefixes)
        worker.add_state_listener(lambda change: self._take_change(worker, change))

    def _take_change(self, worker: Worker, change: StateChange) -> None:
        if self._workers.get(worker.worker_id) is not worker:
            return  # it has been removed, and closes
        if change.state is WorkerState.READY and worker.card is not None:
            self._judge(worker.worker_id, worker.card)
        elif change.state is not WorkerState.READY:
            self._refused.pop(change.worker_id, None)  # it may come back with another card
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
        report = self._report(worker)
        for listener in self._listeners:
            listener(StateChange(report.worker_id, report.state, report.detail))

    def _judge(self, worker_id: str, card: ModelCard) -> None:
        if self._card is None:
            self._card = card
        differences = card_differences(self._card, card)
        if differences:
            self._refused[worker_id] = (
                f"refused, it does not serve the model of this gateway: {', '.join(differences)}"
            )

    def _report(self, worker: Worker) -> WorkerReport:
        refusal = self._refused.get(worker.worker_id)
        if refusal is not None:
            return WorkerReport(worker.worker_id, WorkerState.FAILED, refusal)
        return WorkerReport(worker.worker_id, worker.state, worker.detail)

    async def _next_change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)


def card_differences(ours: ModelCard, theirs: ModelCard) -> tuple[str, ...]:
    """What forbids that two workers serve one model; empty if nothing does."""
    differences = [
        f"{name} is {getattr(theirs, name)}, not {getattr(ours, name)}"
        for name in _MUST_AGREE
        if getattr(theirs, name) != getattr(ours, name)
    ]
    our_files = {file.name: file.sha256 for file in ours.tokenizer_files}
    their_files = {file.name: file.sha256 for file in theirs.tokenizer_files}
    differences += [
        f"tokenizer file {name} differs"
        for name in sorted(our_files.keys() | their_files.keys())
        if our_files.get(name) != their_files.get(name)
    ]
    return tuple(differences)
