"""What workers are told of tenants: only what sets one apart, in plain numbers, and what all of
them share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_store.block_hash import Namespace
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.shared_prefixes import DividedNamespace
from model_worker.protocol import TenantPolicies, TenantPolicy, decode_gateway_message, encode
from service.config import GatewayConfig
from service.fleet import Fleet
from service.served_model import ServedModel
from service.tenants.directory import TenantDirectory
from service.tenants.shared_text import shared_token_ids
from service.tenants.tenant import EVERYONE, Caps, Size, Tenant
from service.tenants.tenant_file import SharedPrefix
from service.tenants.worker_policies import WorkerPolicies, policies_of
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import make_card, make_tokenizer
from tests.session_kit import ids_in
from tests.tenant_kit import write


def test_weights_and_caps_cross_the_link() -> None:
    caps = Caps(device_cache=Size(0), host_cache=Size(2**33))
    tenants = [
        EVERYONE,
        Tenant(tenant_id="plain", namespace_owner="plain"),
        Tenant(tenant_id="heavy", namespace_owner="", weight=2.5),
        Tenant(tenant_id="bound", namespace_owner="bound", caps=caps),
    ]
    expected = TenantPolicies(
        policies=(
            TenantPolicy(tenant="heavy", weight=2.5),
            TenantPolicy(tenant="bound", max_device_bytes=0, max_host_bytes=2**33),
        ),
        shared_prefixes=(b"\1\0\0\0",),
    )
    made = TenantPolicies(policies=tuple(policies_of(tenants)), shared_prefixes=(b"\1\0\0\0",))
    assert decode_gateway_message(encode(made)) == made == expected


async def test_registered_prefixes_reach_workers_and_look_ups(tmp_path: Path) -> None:
    text = """
[[shared.prefixes]]
text = "You are a helpful clerk of the library. Answer in one sentence."
[[shared.prefixes]]
messages = [{ role = "system", content = "Be brief." }]
[[shared.prefixes]]
messages = [{ role = "nobody", content = "x" }]
"""
    worker = FakeWorker(make_card(), lambda request: ())
    registry = WorkerRegistry([worker])
    config = GatewayConfig(tenant_file=write(tmp_path, text))
    store = MemoryMetadataStore()
    with ThreadPoolExecutor(1) as threads:
        fleet = Fleet(config, registry, store, threads)
        directory = TenantDirectory(config)
        told = WorkerPolicies(directory, registry, fleet, threads)
        assert worker.shared_prefixes == ()
        tokenizer = make_tokenizer()
        await told.share(ServedModel(make_card(), tokenizer, 0, threads))
        texts = [tokenizer.decode_exactly(ids_in(ids)) for ids in worker.shared_prefixes]
        written = "You are a helpful clerk of the library. Answer in one sentence"
        assert texts[0].startswith(f"<s>{written}")
        assert texts[1].startswith(written)
        assert texts[2].startswith("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert len(texts) == 3
        shared = fleet._locator.shared
        assert shared is not None
        prompt = tokenizer.encode(f"{written}. And then?", add_special_tokens=True)
        place = shared.divide(Namespace("f"), prompt)
        assert isinstance(place, DividedNamespace)
        assert place.num_head_tokens == len(ids_in(worker.shared_prefixes[0])) // 16 * 16 > 0
        write(tmp_path, "")
        await directory.reload()
        await told.share(ServedModel(make_card(), tokenizer, 0, threads))
        assert worker.shared_prefixes == ()
        await fleet.close()


@pytest.mark.parametrize("text", ["the answer", "the", "Shelf holds jars of plu", "x\n", "é"])
def test_the_ids_of_a_text_are_those_of_every_prompt_that_begins_with_it(text: str) -> None:
    """Unless its last word goes on: then its last tokens may be others."""
    tokenizer = make_tokenizer()
    found, problems = shared_token_ids(tokenizer, [SharedPrefix(text=text)])
    assert problems == []
    for following in (" is", ". And", "\n", "\n\nNow", "", "? Yes"):
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text + following, add_special_tokens=add_special_tokens)
            begins = [len(one) <= len(ids) and (ids[: len(one)] == one).all() for one in found]
            assert any(begins) or not found


def test_messages_that_the_template_cannot_express_are_told() -> None:
    prefixes = [
        SharedPrefix(messages=[{"role": "system"}]),
        SharedPrefix(messages=[{"role": "user", "content": [{"type": "image"}]}]),
        SharedPrefix(messages=[{"role": "user", "content": "Hello there, and goodbye."}]),
    ]
    found, problems = shared_token_ids(make_tokenizer(), prefixes)
    assert len(found) == 2
    assert [problem.partition(":")[0] for problem in problems] == ["shared.prefixes[1]"]
