"""The release gate through every tier: what comes back from memory or disk answers as before.

Over grouped-query, multi-query and multi-head attention. The device's memory is overwritten while a
prompt is away, so that only what was brought back can answer. Negative controls show that one wrong
byte in host memory fails the gate, and that one on disk is a miss and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cache_store.events import Tier
from cache_store.stats import TierStats
from cache_store.transfer import TransferOrder
from model_worker.protocol import PrefixAction, PrefixCommand, PrefixReply
from tests.deferred import DeferredRunner
from tests.disk_kit import files_in
from tests.rig import FINGERPRINT, EngineRig, Reference, RigOptions, TeacherSampler, disk_cache_size
from tests.test_token_equality import (
    NEW_TOKENS,
    model_of,
    reference_of,
    references,
    shared_prefix_prompts,
    token_ids,
)

FAMILIES = ("llama", "llama-mqa", "llama-mha")  # grouped-query, multi-query, multi-head
PROMPT = token_ids(70, seed=2)
NUM_STORED = 70 + NEW_TOKENS - 1  # the last token of an answer is never computed
ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def rig_of(family: str, options: RigOptions) -> Iterator[EngineRig]:
    rig = EngineRig(model_of(family), options)
    try:
        yield rig
    finally:
        rig.close()


def on_prefix(rig: EngineRig, action: PrefixAction, ids: Sequence[int]) -> PrefixReply:
    encoded = np.asarray(ids, dtype="<i4").tobytes()
    return rig.engine.act_on_prefix(
        PrefixCommand(call_id="c", action=action, prompt_token_ids=encoded)
    )


def in_tiers(rig: EngineRig, ids: Sequence[int]) -> tuple[int, int, int]:
    """Stored tokens on the device, in host memory and on disk."""
    reply = on_prefix(rig, PrefixAction.INSPECT, ids)
    return (reply.num_device_tokens, reply.num_host_tokens, reply.num_disk_tokens)


def demote(rig: EngineRig, reference: Reference) -> None:
    """Take a prompt and its answer off the device, and leave nothing true there."""
    ids = [*reference.prompt, *reference.token_ids]
    on_prefix(rig, PrefixAction.DEMOTE, ids)
    rig.settle()
    assert in_tiers(rig, ids)[0] == 0
    if not rig.cache.stats().num_cached:
        for tensor in rig.tier.tensors:
            tensor.fill_(50.0)


def from_tiers(rig: EngineRig, name: str) -> tuple[int, int, int]:
    """Tokens of a prompt that came from anywhere, from host memory, from disk."""
    outputs = rig.outputs[name]
    return (
        rig.num_cached(name),
        sum(output.num_host_tokens for output in outputs),
        sum(output.num_disk_tokens for output in outputs),
    )


def tier_stats(rig: EngineRig, tier: Tier) -> TierStats:
    (found,) = [stats for stats in rig.cache.stats().tiers if stats.tier is tier]
    return found


def noted_orders(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> list[TransferOrder]:
    """All transfers from now on."""
    assert rig.tiers is not None
    orders: list[TransferOrder] = []
    submit = rig.tiers.threads.submit

    def note(order: TransferOrder) -> None:
        orders.append(order)
        submit(order)

    monkeypatch.setattr(rig.tiers.threads, "submit", note)
    return orders


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_demoted_to_host_and_promoted(family: str, block_size: int) -> None:
    wanted = reference_of(family, tuple(PROMPT))
    with rig_of(family, RigOptions(block_size=block_size, num_host=16)) as rig:
        rig.check({"cold": wanted})
        for number in range(2):  # the second time it is in host memory still
            demote(rig, wanted)
            assert in_tiers(rig, [*PROMPT, *wanted.token_ids]) == (0, NUM_STORED, 0)
            rig.check({f"warm {number}": wanted})
            assert from_tiers(rig, f"warm {number}") == (69, 69, 0)
        turn = [*PROMPT, *wanted.token_ids, *token_ids(9, seed=3)]
        demote(rig, wanted)
        rig.check({"turn": reference_of(family, tuple(turn))}).assert_passes()
        assert from_tiers(rig, "turn") == (NUM_STORED, NUM_STORED, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_written_to_disk_and_promoted(family: str, block_size: int, tmp_path: Path) -> None:
    wanted = reference_of(family, tuple(PROMPT))
    options = RigOptions(block_size=block_size, disk_folder=tmp_path, num_disk=32)
    with rig_of(family, options) as rig:
        rig.check({"cold": wanted})
        rig.settle()
        demote(rig, wanted)
        assert in_tiers(rig, [*PROMPT, *wanted.token_ids]) == (0, 0, NUM_STORED)
        rig.check({"warm": wanted})
        assert from_tiers(rig, "warm") == (69, 0, 69)
        turn = [*PROMPT, *wanted.token_ids, *token_ids(9, seed=3)]
        demote(rig, wanted)
        rig.check({"turn": reference_of(family, tuple(turn))}).assert_passes()
        assert from_tiers(rig, "turn") == (NUM_STORED, 0, NUM_STORED)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_host_to_disk_and_promoted(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host tier holds two of three prompts, so that the first is on disk alone."""
    wanted = reference_of(family, tuple(PROMPT))
    others = {f"b{i}": reference_of(family, tuple(token_ids(67, seed=4 + i))) for i in range(2)}
    options = RigOptions(block_size=8, num_host=18, disk_folder=tmp_path, num_disk=64)
    with rig_of(family, options) as rig:
        orders = noted_orders(rig, monkeypatch)
        rig.check({"cold": wanted})
        demote(rig, wanted)
        ways = [(order.source, order.target) for order in orders]
        assert ways == [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)]
        for name, other in others.items():
            rig.check({name: other})
            demote(rig, other)
        assert in_tiers(rig, [*PROMPT, *wanted.token_ids]) == (0, 0, NUM_STORED)
        assert [in_tiers(rig, other.prompt)[1] for other in others.values()] == [67, 67]
        rig.check({"warm": wanted, "other": others["b1"]}).assert_passes()
        assert from_tiers(rig, "warm") == (69, 0, 69)
        assert from_tiers(rig, "other") == (66, 66, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_restart(family: str, tmp_path: Path) -> None:
    """Forks of one prefix, with partly filled blocks at their ends."""
    prompts = shared_prefix_prompts(5)
    wanted = references(family, prompts)
    options = RigOptions(block_size=16, disk_folder=tmp_path, num_disk=64)
    with rig_of(family, options) as rig:
        rig.check(wanted).assert_passes()
        rig.settle()
        num_saved = tier_stats(rig, Tier.DISK).num_cached
    with rig_of(family, options) as rig:
        assert rig.num_restored == num_saved
        rig.check(wanted).assert_passes()
        for name, prompt in prompts.items():
            assert rig.num_cached(name) == len(prompt) - 1
        # What several share is loaded once: the others find it on the device.
        assert from_tiers(rig, "p0") == (len(prompts["p0"]) - 1, 0, len(prompts["p0"]) - 1)
        rig.settle()
        assert tier_stats(rig, Tier.DISK).stored_total == 0  # nothing is written twice


def test_two_that_live_on_one_folder(tmp_path: Path) -> None:
    """The second finds what the first had stored, and what the first gives up then is a miss."""
    wanted = references("llama", shared_prefix_prompts(4))
    options = RigOptions(block_size=8, disk_folder=tmp_path, num_disk=64)
    with rig_of("llama", options) as first:
        first.check(wanted).assert_passes()
        first.settle()
        with rig_of("llama", options) as second:
            assert second.num_restored == tier_stats(first, Tier.DISK).num_cached
            second.check({"p0": wanted["p0"]}).assert_passes()
            assert from_tiers(second, "p0") == (47, 0, 47)
            first.engine.reset_cache()
            first.close()  # its thread ends when all that it had to erase is erased
            second.check({name: wanted[name] for name in ("p1", "p2", "p3")}).assert_passes()
            assert tier_stats(second, Tier.DISK).failed_total > 0
            second.settle()


OTHER_PROCESS = """
import json, sys
import numpy as np
from cache_store.block_hash import HASH_VERSION, Namespace
from cache_store.eviction import make_eviction_policy
from cache_store.events import Tier
from cache_store.prefix_cache import PrefixCache
from cache_store.restore import StoredBlock
from cache_store.transfer_desk import LowerTiers
from cache_store.tiers.disk_format import DiskFormat
from cache_store.tiers.disk_store import DiskStore

folder, payload_bytes, max_bytes, fingerprint, *prompts = map(json.loads, sys.argv[1:])
form = DiskFormat(fingerprint, HASH_VERSION, 16, payload_bytes, "exact:float32")
store = DiskStore(folder, form, max_bytes)
lower = LowerTiers({Tier.DISK: store.num_slots}, None, None, None)
cache = PrefixCache(64, 16, make_eviction_policy("lru"), lower)
cache.restore([StoredBlock(each.key, each.stored_at) for each in store.scan()])
namespace = Namespace(fingerprint)
found = [cache.inspect(namespace, np.array(ids, dtype=np.int32)) for ids in prompts]
print(json.dumps([report.num_disk_tokens for report in found]))
"""


def test_a_process_with_another_hash_seed_finds_the_same_blocks(tmp_path: Path) -> None:
    """Also one without a seed. Each has a copy of the folder."""
    prompts = shared_prefix_prompts(3)
    wanted = references("llama", prompts)
    here = tmp_path / "here"
    options = RigOptions(block_size=16, disk_folder=here, num_disk=64)
    with rig_of("llama", options) as rig:
        rig.check(wanted).assert_passes()
        rig.settle()
        block_bytes = rig.spec.bytes_per_block
    stored = [[*reference.prompt, *reference.token_ids[:-1]] for reference in wanted.values()]
    for seed in ("1", None):
        folder = tmp_path / f"seed-{seed}"
        shutil.copytree(here, folder)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        told = (str(folder), block_bytes, disk_cache_size(64, block_bytes), FINGERPRINT, *stored)
        command = [sys.executable, "-c", OTHER_PROCESS, *map(json.dumps, told)]
        found = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        assert json.loads(found.stdout) == [len(ids) for ids in stored]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_thrashing(family: str, policy: str, tmp_path: Path) -> None:
    """Nine prompts over a device for two, a tiny host tier and a disk for half of them."""
    options = RigOptions(
        block_size=8, num_blocks=20, max_num_seqs=2, policy=policy,
        num_host=6, disk_folder=tmp_path, num_disk=12,
    )  # fmt: skip
    wanted = references(family, shared_prefix_prompts(9))
    with rig_of(family, options) as rig:
        for turn in range(3):
            named = {f"{name}.{turn}": reference for name, reference in wanted.items()}
            rig.check(named).assert_passes()
            rig.settle()
        host, disk = tier_stats(rig, Tier.HOST), tier_stats(rig, Tier.DISK)
        assert host.stored_total > host.num_blocks
        assert disk.stored_total > disk.num_blocks
        assert host.promoted_total + disk.promoted_total > 0
        assert host.failed_total == disk.failed_total == 0


@pytest.mark.parametrize(("num_host", "num_disk"), [(64, 0), (4, 64), (0, 64)])
def test_preempted_requests_come_back_from_lower_tiers(
    num_host: int, num_disk: int, tmp_path: Path
) -> None:
    """Five requests of up to 11 blocks in a pool of 16; those thrown out go down at once.

    Left alone, most of what they had computed stays on the device: how far down it gets before they
    are admitted again is a matter of how quick the copies are.
    """
    options = RigOptions(
        block_size=8, num_blocks=16, chunk=32, max_model_len=120, num_host=num_host,
        disk_folder=tmp_path if num_disk else None, num_disk=num_disk,
    )  # fmt: skip
    prompts = {f"p{i}": token_ids(40 + 3 * i, seed=20 + i) for i in range(5)}
    wanted = {n: reference_of("llama", tuple(p), 24) for n, p in prompts.items()}
    with rig_of("llama", options) as rig:
        demote_when_preempted(rig)
        report = rig.check(wanted)
        report.assert_passes()
        assert report.num_positions == 5 * 24
        rig.settle()
        stats = rig.cache.stats().tiers
        # Whatever the copies' times, the first two fill the pool with eight blocks each before one
        # of them has ended: then the second goes, and has them all to come back.
        assert sum(tier.promoted_total for tier in stats) >= 8
        assert [tier.failed_total for tier in stats] == [0] * len(stats)


def demote_when_preempted(rig: EngineRig) -> None:
    """After a step that preempted, take off the device what no running request holds."""
    step = rig.step

    def step_and_demote() -> None:
        before = rig.scheduler.counters.preemptions
        step()
        if rig.scheduler.counters.preemptions == before:
            return
        rig.settle()  # what is being copied cannot be sent elsewhere
        assert isinstance(rig.sampler, TeacherSampler)
        for name, reference in rig.sampler.references.items():
            ids = [*reference.prompt, *(rig.tokens(name) if name in rig.outputs else ())]
            # A tier that is smaller than this takes some of it and hands that on.
            while on_prefix(rig, PrefixAction.DEMOTE, ids).num_blocks_changed:
                rig.settle()
        rig.arrived.set()  # what this step waited for may have come meanwhile

    rig.step = step_and_demote  # type: ignore[method-assign]


def test_a_prefetched_prompt_is_on_the_device_when_it_is_asked_for() -> None:
    wanted = reference_of("llama", tuple(PROMPT))
    with rig_of("llama", RigOptions(num_host=16)) as rig:
        rig.check({"cold": wanted})
        demote(rig, wanted)
        assert on_prefix(rig, PrefixAction.PREFETCH, PROMPT).num_blocks_changed == 5
        rig.settle()
        rig.check({"warm": wanted}).assert_passes()
        assert from_tiers(rig, "warm") == (69, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_negative_control_one_wrong_byte_in_host_memory_fails_the_gate(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reference_of(family, tuple(PROMPT))
    with rig_of(family, RigOptions(block_size=8, num_host=16)) as rig:
        orders = noted_orders(rig, monkeypatch)
        rig.check({"cold": wanted})
        demote(rig, wanted)
        assert rig.tiers is not None
        assert rig.tiers.host is not None
        # The upper bits of the exponent of one number among the values of a full block.
        payload = rig.tiers.host.payloads[orders[0].target_ids[4]]
        payload[len(payload) // 2 + 3] ^= 0x40
        with pytest.raises(AssertionError):
            rig.check({"warm": wanted}).assert_passes()
        assert from_tiers(rig, "warm") == (69, 69, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9])
def test_one_wrong_byte_on_disk_is_a_counted_miss(
    family: str, place: float, tmp_path: Path
) -> None:
    """At the start of a record (its header), and at three places of its payload."""
    wanted = reference_of(family, tuple(PROMPT))
    options = RigOptions(block_size=8, disk_folder=tmp_path, num_disk=32)
    with rig_of(family, options) as rig:
        rig.check({"cold": wanted})
        rig.settle()
        demote(rig, wanted)
        (path,) = files_in(tmp_path)
        content = bytearray(path.read_bytes())
        stride = (len(content) - 4096) // 10
        content[4096 + 4 * stride + int(place * rig.spec.bytes_per_block)] ^= 1  # of the fifth
        path.write_bytes(content)
        rig.check({"warm": wanted}).assert_passes()
        assert tier_stats(rig, Tier.DISK).failed_total >= 1
        assert tier_stats(rig, Tier.DISK).promoted_total == 4
        rig.settle()
        rig.check({"again": wanted}).assert_passes()
        assert from_tiers(rig, "again") == (69, 0, 0)


def test_a_folder_that_vanishes_is_a_counted_miss(tmp_path: Path) -> None:
    wanted = reference_of("llama", tuple(PROMPT))
    folder = tmp_path / "tier"
    with rig_of("llama", RigOptions(disk_folder=folder, num_disk=32)) as rig:
        rig.check({"cold": wanted})
        rig.settle()
        demote(rig, wanted)
        shutil.rmtree(folder)
        rig.check({"warm": wanted}).assert_passes()
        assert from_tiers(rig, "warm") == (0, 0, 0)
        assert tier_stats(rig, Tier.DISK).failed_total == 5
        rig.settle()


def test_a_damaged_folder_is_used_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """A restart on files that were cut short and files that are not ours."""
    prompts = shared_prefix_prompts(4)
    wanted = references("llama", prompts)
    options = RigOptions(block_size=8, disk_folder=tmp_path, num_disk=64)
    with rig_of("llama", options) as rig:
        for name in prompts:
            rig.check({name: wanted[name]})
            rig.settle()
    paths = files_in(tmp_path)
    assert len(paths) == 4
    paths[1].write_bytes(paths[1].read_bytes()[:-5000])
    paths[2].write_bytes(b"not ours")
    (paths[0].parent / "notes.txt").write_text("nor this")
    with rig_of("llama", options) as rig:
        rig.check(wanted).assert_passes()
        assert rig.num_cached("p0") == len(prompts["p0"]) - 1
        assert rig.num_cached("p2") == 45
    assert (paths[0].parent / "notes.txt").read_text() == "nor this"


def test_blocks_come_and_go_under_steps_that_run_ahead() -> None:
    """More prompts than the device holds, over and over: what is evicted for one is brought back
    for another while steps are in flight."""
    options = RigOptions(
        block_size=8, num_blocks=24, chunk=32, max_num_seqs=3, num_host=120, runs_ahead=True
    )
    with rig_of("llama", options) as rig:
        for turn in range(3):
            wanted = references("llama", shared_prefix_prompts(9))
            rig.check({f"{name}.{turn}": each for name, each in wanted.items()}).assert_passes()
        assert tier_stats(rig, Tier.HOST).promoted_total > 0
        assert isinstance(rig.runner, DeferredRunner)
        assert rig.runner.max_queued == 2
