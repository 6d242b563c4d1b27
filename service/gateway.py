"""The parts of one gateway, put together, and its state of readiness.

Owns the adoption of the model: once a worker is ready, its card's tokenizer is loaded in a thread,
and only then is the gateway ready. Knows nothing of HTTP beyond handing itself to routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request

from cache_store.metadata.base import MetadataStore
from model_worker.protocol import ModelCard
from service import tokenizer
from service.config import GatewayConfig
from service.dashboard.board import Board
from service.dashboard.marks import MarkKind
from service.dashboard.previews import PromptPreviews
from service.dashboard.readings import MetricReader
from service.dashboard.status import Condition, condition_of
from service.diagnostics.diagnostics import Diagnostics
from service.errors import ModelNotFound, Unavailable
from service.fleet import Fleet
from service.generation import Generator
from service.life_counters import WorkerReading
from service.metadata_metrics import MetadataCollector
from service.metrics import GatewayMetrics
from service.miss_ratio_curve import MissRatioCurve
from service.request_gate import RequestGate
from service.request_history import RequestHistory
from service.served_model import ServedModel
from service.sessions.book import SessionLimits
from service.sessions.sessions import Sessions
from service.sessions.stored_responses import StoredResponses
from service.structured.checks import GrammarChecks
from service.tenant_labels import TenantLabels
from service.tenants.directory import TenantDirectory
from service.tenants.worker_policies import WorkerPolicies
from service.tokenizer import ModelTokenizer, TokenizerError
from service.tools.support import ToolSupport
from service.worker_metrics import QueueReading
from service.workers.base import WorkerNotReadyError
from service.workers.registry import WorkerRegistry

__all__ = ["Gateway", "gateway_of"]

_log = logging.getLogger("headstart.gateway")
_TOKENIZER_THREADS = 4
_RETRY_SECONDS = 1.0


class Gateway:
    """``keepalive`` is in seconds. Everything here belongs to one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: WorkerRegistry,
        metadata: MetadataStore,
        *,
        keepalive: float,
    ) -> None:
        self.config = config
        self.registry = registry
        self.metadata = metadata
        self.keepalive = keepalive
        self.tenants = TenantDirectory(config)
        self.tenants.add_listener(self._on_tenants)
        self.gate = RequestGate(config.max_queue)
        self.tenant_labels = TenantLabels(lambda: self.tenants.named)
        self.metrics = GatewayMetrics(
            self._read_workers, self._read_queue, tenant_label=self.tenant_labels.of
        )
        registry.add_state_listener(self.metrics.worker_changed)
        self.metrics.registry.register(MetadataCollector(lambda: metadata.stats))
        self.diagnostics = Diagnostics(
            self.metrics.clock,
            lambda: None if self._served is None else self._served.tokenizer,
            keeps_prompts=not config.no_request_history,
        )
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self.grammar_checks = GrammarChecks(self._threads)
        self._fleet = Fleet(config, registry, metadata, self._threads)
        self._policies = WorkerPolicies(self.tenants, registry, self._fleet, self._threads)
        self.previews = PromptPreviews() if config.show_prompt_text else None
        self.history = self._make_history()
        self.miss_ratio = MissRatioCurve()  # stays empty without a history
        if self.history is not None:
            self.history.add_listener(self.miss_ratio.add)
        self.generator = Generator(
            registry.ready_workers, self.metrics, self._fleet.locate, self.history
        )
        reasons = self.generator.routing.reasons
        self.metrics.registry.register(self._fleet.collector(reasons))
        self.sessions = Sessions(
            metadata,
            SessionLimits(ttl=config.session_ttl, idle_timeout=config.session_idle_timeout),
            self.metrics.sessions,
            lambda: registry.workers,
            self.tenants,
            time.time,
            self._forget,
        )
        self.responses = StoredResponses(self.sessions)
        self.board = Board(registry, self._make_reader(), lambda: self.condition)
        self._served: ServedModel | None = None
        self._failure = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.metadata.start()
        self.sessions.start()
        await self.registry.start()
        self._fleet.start()
        self._tasks = [
            asyncio.create_task(self._adopt_model()),
            asyncio.create_task(self.tenants.watch()),
            asyncio.create_task(self.board.run()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.sessions.close()
        await self._fleet.close()
        await self.registry.close()
        await self.metadata.close()
        self.diagnostics.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse what is new (503) and let the rest end; whether it did within ``timeout``
        seconds (the configured time when left out)."""
        return await self.gate.drain(self.config.drain_timeout if timeout is None else timeout)

    @property
    def served(self) -> ServedModel | None:
        """None until the first worker was ready and its tokenizer is loaded."""
        return self._served

    @property
    def unready_reason(self) -> str:
        """Empty when requests are answered."""
        if self.gate.is_draining:
            return "shutting down"
        if not self.registry.ready_workers():
            reason = self.registry.health().reason
            if self.config.finds_workers and self.metadata.is_degraded:
                reason += "; the metadata store, where workers are found, is out of reach"
            return reason
        if self._served is None:
            return self._failure or "loading the tokenizer"
        return ""

    @property
    def degraded_reason(self) -> str:
        """Empty unless requests are answered with something missing."""
        if self.metadata.is_degraded:
            return "the metadata store is out of reach; requests go on without it"
        if self.tenants.problem:
            return "the tenant file cannot be used; the tenants stay as they were"
        return ""

    @property
    def condition(self) -> Condition:
        """All of this in one line, as operators read it."""
        return condition_of(
            self.unready_reason,
            self.degraded_reason,
            is_draining=self.gate.is_draining,
            workers=self.registry.reports(),
        )

    def model(self, name: str) -> ServedModel:
        """The model served under ``name``. Raises Unavailable or ModelNotFound."""
        self.gate.check_open()
        served = self.served_model()
        if name not in served.names:
            shown = name if len(name) <= 64 else name[:64] + "..."
            raise ModelNotFound(
                f"The model '{shown}' is not served here; served: {', '.join(served.names)}.",
                param="model",
            )
        return served

    def served_model(self) -> ServedModel:
        """The one that there is. Raises Unavailable."""
        if self._served is None:
            raise Unavailable(f"Not ready: {self.unready_reason}.", code="not_ready", retry_after=5)
        return self._served

    def default_model(self) -> str:
        """The name to take where none is asked for. Raises Unavailable."""
        return self.served_model().names[0]

    async def _adopt_model(self) -> None:
        """Load the tokenizer of the first worker that is ready; the registry holds to its card."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, tokenizer.preload)
        card = await self._first_card()
        parser = self.config.tool_call_parser
        try:
            loaded, tools = await loop.run_in_executor(self._threads, _load, card, parser)
        except Exception as error:  # /health has to say it; a task that died says nothing
            is_told = isinstance(error, TokenizerError)
            problem = str(error) if is_told else f"its tokenizer fails ({type(error).__name__})"
            self._failure = problem
            _log.error("model %s cannot be served: %s", card.model, problem)
            return
        served = ServedModel(card, loaded, int(time.time()), self._threads, tools)
        await self._policies.share(served)  # ahead of the first request
        self._served = served
        fingerprint = card.fingerprint[:12]
        self.board.marks.add(
            MarkKind.MODEL, f"serving {served.names[0]}, fingerprint {fingerprint}"
        )
        _log.info("serving %s", ", ".join(self._served.names))

    async def _first_card(self) -> ModelCard:
        while True:
            try:
                return await self.registry.wait_ready()
            except WorkerNotReadyError:  # all have failed; /health says why, one may come back
                await asyncio.sleep(_RETRY_SECONDS)

    def _on_tenants(self) -> None:
        """They have changed."""
        self.gate.rates.forget_all_but({item.tenant_id for item in self.tenants.tenants})
        self._policies.tell()
        if self._served is not None:
            sharing = asyncio.create_task(self._policies.share(self._served))
            self._tasks = [task for task in self._tasks if not task.done()] + [sharing]
        self.sessions.take_up()

    def _forget(self, tenant: str, session_id: str | None) -> None:
        """A session was deleted, or all of a tenant's."""
        self.diagnostics.forget(tenant, session_id)
        if self.previews is not None:
            self.previews.clear()  # whose each block is, they do not know

    def _make_reader(self) -> MetricReader:
        return MetricReader(self.metrics.totals, self._read_workers, self._read_queue)

    def _make_history(self) -> RequestHistory | None:
        """None where none is to be kept."""
        if self.config.no_request_history:
            return None
        return RequestHistory(
            lambda: self.registry.card,
            lambda: self._fleet.shared_prefixes,
            on_tokens=None if self.previews is None else self.previews.note,
        )

    def _read_workers(self) -> list[WorkerReading]:
        ready = {worker.worker_id for worker in self.registry.ready_workers()}
        return [
            WorkerReading(worker.worker_id, worker.epoch, worker.worker_id in ready, worker.stats)
            for worker in self.registry.workers
        ]

    def _read_queue(self) -> QueueReading:
        return QueueReading(self.gate.num_queued, self.gate.num_in_flight, self.config.max_queue)


def _load(card: ModelCard, parser: str) -> tuple[ModelTokenizer, ToolSupport | None]:
    """Raises TokenizerError."""
    loaded = ModelTokenizer.from_card(card)
    texts = map(loaded.splicer.text_of, card.eos_token_ids)
    tools = ToolSupport.of(
        parser,
        loaded.chat_template,
        loaded.special_ids,
        loaded.decode_keeping,
        [text for text in texts if text is not None],
    )
    return loaded, tools


def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
