"""All metrics that there are, as a gateway with every part exports them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from cache_store.events import Tier
from cache_store.metadata.stats import MetadataStats
from model_worker.protocol import TierReport, WorkerStats
from service.errors import InternalError
from service.life_counters import WorkerReading
from service.metadata_metrics import MetadataCollector
from service.metrics import GatewayMetrics
from service.routing import RoutingCollector
from service.worker_metrics import QueueReading


@dataclass(frozen=True)
class Exported:
    """One family; ``name`` is how queries name it, of a histogram without its suffix."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> set[str]:
        if self.kind != "histogram":
            return {self.name}
        return {self.name + suffix for suffix in ("_bucket", "_sum", "_count")}


def exported_metrics() -> list[Exported]:
    stats = WorkerStats(
        num_blocks=4,
        prefill_token_s=0.1,
        tiers=(TierReport(tier=Tier.HOST, load_block_s=0.1),),
    )
    metrics = GatewayMetrics(
        lambda: [WorkerReading("local", 1, True, stats)], lambda: QueueReading(0, 0)
    )
    metrics.registry.register(MetadataCollector(MetadataStats))
    metrics.registry.register(RoutingCollector({}, {}, lambda: 0))
    metrics.record(3, 0.0).admitted(1, 0.0)
    metrics.count_error(InternalError("x"))
    exported = []
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported.append(Exported(name, family.type, tuple(sorted(labels)), family.documentation))
    return exported
