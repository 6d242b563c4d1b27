"""The curve of hit rate by size: exact where the sample holds all, near where it does not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from benchmarks.traces import source_named
from cache_store.events import Tier
from model_worker.protocol import TierReport, WorkerStats
from service.miss_ratio_curve import SAMPLE_BLOCKS, CacheSize, MissRatioCurve, sizes_of
from service.request_history import RequestRecord
from service.reuse_sample import ReuseSample
from tests.gateway_kit import BLOCK_SIZE, make_card
from tests.trace_kit import hashes_of_trace

CARD = make_card()


def found_by_lru(requests: Sequence[np.ndarray], capacity: int) -> float:
    """Looked up whole, then used from the deepest to the first, as a list of the latest."""
    latest: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for blocks in requests:
        num_found += sum(int(name) in latest for name in blocks)
        for name in reversed(blocks.tolist()):
            latest[name] = None
            latest.move_to_end(name)
        while len(latest) > capacity:
            latest.popitem(last=False)
    return num_found / sum(map(len, requests))


def make_requests(seed: int, count: int = 400) -> list[np.ndarray]:
    """Chains of blocks that branch: prefixes that are popular, and what follows."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 2**64, 20_000, dtype=np.uint64)
    requests = []
    for _ in range(count):
        root, conversation = int(rng.zipf(1.5)) % 20, int(rng.integers(60))
        size = int(rng.integers(1, 12))
        head = names[root * 5 : root * 5 + 5]
        requests.append(np.concatenate((head, names[200 + conversation * 12 :][:size])))
    return requests


def make_record(blocks: np.ndarray, *, num_cached: int = 0) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        at=0.0,
        tenant="",
        namespace="",
        session="",
        block_size=BLOCK_SIZE,
        block_hashes=blocks,
        num_prompt_blocks=len(blocks),
        num_prompt_tokens=len(blocks) * BLOCK_SIZE + 8,
        num_output_tokens=0,
        num_device_tokens=num_cached,
        num_host_tokens=0,
        num_disk_tokens=0,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_of_all_blocks_is_exact_up_to_its_cells(seed: int) -> None:
    requests = make_requests(seed)
    sample = ReuseSample(10**6)
    for blocks in requests:
        sample.use(blocks, len(blocks))
    assert sample.rate == 1.0
    for capacity in (16, 50, 100, 200, 400):
        exact = found_by_lru(requests, capacity)
        # A cell is 4.4 % of a size wide, and within one the curve is taken for straight.
        below, above = (
            found_by_lru(requests, int(capacity * 0.95)),
            found_by_lru(requests, int(capacity * 1.05) + 1),
        )
        assert below <= sample.found_within(capacity) <= above
        assert abs(sample.found_within(capacity) - exact) < 0.01
    distinct = len(np.unique(np.concatenate(requests)))
    assert sample.found_ever == found_by_lru(requests, distinct)


def test_a_use_that_is_only_stored_is_no_look_up() -> None:
    sample = ReuseSample(100)
    blocks = np.arange(1, 5, dtype=np.uint64) << np.uint64(40)
    sample.use(blocks, 2)
    assert (sample.num_used, sample.found_ever) == (2, 0.0)
    sample.use(blocks, 4)
    assert (sample.num_used, sample.found_ever) == (6, 4 / 6)
    # The first has none used later, the deepest has three.
    assert [sample.found_within(size) * 6 for size in (0, 1, 3, 4)] == pytest.approx([0, 1, 3, 4])


def test_the_sample_keeps_its_size() -> None:
    rng = np.random.default_rng(0)
    sample = ReuseSample(100)
    for _ in range(300):
        sample.use(rng.integers(0, 2**64, 40, dtype=np.uint64), 40)
        assert sample.num_blocks <= 125
    assert sample.num_blocks / sample.rate == pytest.approx(12_000, rel=0.3)


@pytest.mark.parametrize("name", ["conversation", "synthetic", "airline"])
def test_it_is_near_what_the_real_cache_finds(name: str) -> None:
    """The figures of the catalogue are those of the real tree, which test_trace_replay holds."""
    source = source_named(name)
    sample = ReuseSample(SAMPLE_BLOCKS)
    for blocks in hashes_of_trace(source):
        sample.use(blocks, len(blocks))
    errors = [
        abs(sample.found_within(capacity) - rate)
        for capacity, rate in source.lru_by_capacity.items()
    ]
    assert sum(errors) / len(errors) < 0.01
    assert abs(sample.found_ever - source.unbounded[0]) < 0.01


def test_a_report_marks_the_sizes_that_there_are() -> None:
    curve = MissRatioCurve()
    requests = make_requests(1)
    for blocks in requests:
        curve.add(make_record(blocks, num_cached=16))
    sizes = (CacheSize("device", 50), CacheSize("device+host", 200))
    report = curve.report(CARD, sizes)
    tokens = sum(len(blocks) * BLOCK_SIZE + 8 for blocks in requests)
    per_block = sum(map(len, requests)) * BLOCK_SIZE / tokens
    for size, point in zip(sizes, report.sizes, strict=True):
        assert (point.name, point.num_blocks) == (size.name, size.num_blocks)
        assert point.num_bytes == size.num_blocks * BLOCK_SIZE * CARD.kv_bytes_per_token
        exact = found_by_lru(requests, size.num_blocks) * per_block
        assert point.hit_rate == pytest.approx(exact, abs=0.01)
    assert report.ideal_hit_rate == pytest.approx(found_by_lru(requests, 10**6) * per_block)
    assert report.measured_hit_rate == pytest.approx(16 * len(requests) / tokens)
    rates = [point.hit_rate for point in report.points]
    assert rates == sorted(rates)
    assert report.points[-1].num_blocks >= 4 * 200
    assert rates[-1] == pytest.approx(report.ideal_hit_rate)
    assert 10 < len(report.points) < 60
    assert (report.num_requests, report.sample_rate) == (400, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(report))["sizes"][0]["name"] == "device"


def test_an_empty_report_says_that_nothing_is_known() -> None:
    report = MissRatioCurve().report(CARD, ())
    assert (report.ideal_hit_rate, report.measured_hit_rate, report.num_requests) == (None, None, 0)
    assert {point.hit_rate for point in report.points} == {0.0}


def test_old_traffic_is_forgotten() -> None:
    curve = MissRatioCurve(window=100)
    same = make_record(np.arange(1, 9, dtype=np.uint64) << np.uint64(50))
    rng = np.random.default_rng(3)
    for _ in range(200):
        curve.add(same)
    assert curve.report(CARD, ()).ideal_hit_rate == pytest.approx(128 / 136, abs=0.01)
    for _ in range(200):
        curve.add(make_record(rng.integers(0, 2**64, 8, dtype=np.uint64)))
    report = curve.report(CARD, ())
    assert report.ideal_hit_rate == pytest.approx(0.0, abs=0.01)
    assert report.num_requests == 125


def test_what_was_used_before_the_window_is_not_taken_for_new() -> None:
    curve = MissRatioCurve(window=100)
    rng = np.random.default_rng(3)
    pool = rng.integers(0, 2**64, (25, 8), dtype=np.uint64)
    for number in range(201):  # the second sample has just taken over
        curve.add(make_record(pool[number % 25]))
    assert curve.report(CARD, ()).ideal_hit_rate == pytest.approx(128 / 136)


def test_sizes_are_those_of_all_workers_and_tiers() -> None:
    tiers = (TierReport(tier=Tier.HOST, num_blocks=5), TierReport(tier=Tier.DISK, num_blocks=7))
    stats = [WorkerStats(num_blocks=10, tiers=tiers), WorkerStats(num_blocks=10, tiers=tiers)]
    assert sizes_of(stats) == (
        CacheSize("device", 20),
        CacheSize("device+host", 30),
        CacheSize("device+host+disk", 44),
    )
    assert sizes_of([WorkerStats()]) == ()
