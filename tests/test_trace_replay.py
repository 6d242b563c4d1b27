"""The trace replay finds the hit rates that other simulators found, and says so if it does not."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.report import RESULTS
from benchmarks.trace_plot import plot_policies, plot_tiers
from benchmarks.trace_replay import capacity_runs, differences, replay_source, tier_capacities
from benchmarks.trace_tables import markdown
from benchmarks.traces import CATALOGUE, TraceSource, load_trace, source_named
from cache_store.simulation.replay import Capacity, ReplayResult, TraceReplay, replay
from cache_store.simulation.trace import Trace, TraceRequest


@functools.cache
def trace_of(name: str) -> Trace:
    return load_trace(source_named(name))


def trace(*prompts: list[int], num_tokens: int = 0) -> Trace:
    requests = [
        TraceRequest(0.0, np.asarray(ids, dtype=np.int32), num_tokens or 10 * len(ids))
        for ids in prompts
    ]
    return Trace(10, tuple(requests))


@pytest.mark.parametrize(
    ("name", "capacity", "expected"),
    [
        ("airline", 200, 0.7929),
        ("airline", 500, 0.9084),
        ("airline", 2_000, 0.9685),
        ("synthetic", 1_000, 0.0841),
        ("synthetic", 20_000, 0.5718),
        ("agentic", 2_000, 0.8341),
    ],
)
def test_lru_hits_what_other_simulators_found(name: str, capacity: int, expected: float) -> None:
    assert round(replay(trace_of(name), Capacity(capacity), "lru").block_hit_rate, 4) == expected


@pytest.mark.parametrize(
    ("name", "by_blocks", "by_tokens"),
    [
        ("airline", 0.9686, 0.9629),
        ("agentic", 0.9703, 0.9682),
    ],
)
def test_an_unbounded_cache_hits_what_was_found(
    name: str, by_blocks: float, by_tokens: float
) -> None:
    found = trace_of(name)
    result = replay(found, Capacity(found.num_unique_blocks), "lru")
    assert (round(result.block_hit_rate, 4), round(result.token_hit_rate, 4)) == (
        by_blocks,
        by_tokens,
    )
    assert result.num_evicted_blocks == 0


@pytest.mark.parametrize(
    ("name", "num_requests", "num_blocks", "num_unique", "num_longest", "num_tokens"),
    [
        ("conversation", 12_031, 288_500, 182_790, 247, 144_793_823),
        ("synthetic", 3_993, 121_877, 43_924, 374, 61_194_628),
        ("agentic", 3_876, 909_205, 27_037, 1_093, 466_496_974),
        ("airline", 2_454, 195_214, 6_137, 166, 12_567_012),
    ],
)
def test_the_files_hold_the_traces_whole(
    name: str,
    num_requests: int,
    num_blocks: int,
    num_unique: int,
    num_longest: int,
    num_tokens: int,
) -> None:
    found = trace_of(name)
    assert len(found.requests) == num_requests
    assert (found.num_blocks, found.num_unique_blocks) == (num_blocks, num_unique)
    assert (found.num_longest_blocks, found.num_tokens) == (num_longest, num_tokens)
    arrivals = [request.arrival_s for request in found.requests]
    assert arrivals == sorted(arrivals)


def test_the_files_are_small() -> None:
    data = Path(__file__).resolve().parent.parent / "benchmarks" / "data"
    assert sum(file.stat().st_size for file in data.iterdir()) < 2_000_000


def test_hits_and_evictions_of_a_trace_by_hand() -> None:
    # 1 2 3 stays, then 4 5 push 3 and 2 out; the second 1 2 3 finds 1 alone.
    prompts = trace([1, 2, 3], [1, 2, 3], [4, 5], [1, 2, 3])
    result = replay(prompts, Capacity(3), "lru")
    assert (result.num_hit_blocks, result.num_blocks) == (4, 11)
    assert (result.num_hit_tokens, result.num_tokens) == (40, 110)
    assert result.num_evicted_blocks == 4


def test_a_partly_filled_block_counts_as_the_tokens_that_it_has() -> None:
    result = replay(trace([1, 2], [1, 2], num_tokens=13), Capacity(2), "lru")
    assert (result.num_hit_blocks, result.num_hit_tokens, result.num_tokens) == (2, 13, 26)


def test_policies_differ_where_they_should() -> None:
    prompts = trace([1], [2], [1], [3], [1])  # 1 was used last, but came first
    assert replay(prompts, Capacity(2), "lru").num_hit_blocks == 2
    assert replay(prompts, Capacity(2), "fifo").num_hit_blocks == 1


def test_a_cache_that_cannot_hold_the_longest_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks cannot hold a request of 3"):
        replay(trace([1], [1, 2, 3]), Capacity(2, host=9), "lru")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    source = dataclasses.replace(CATALOGUE[0], file="other.jsonl.gz")
    (tmp_path / source.file).write_bytes(gzip.compress(b'{"prompt": "hello"}\n'))
    with pytest.raises(ValueError, match="no request of a trace: prompt"):
        load_trace(source, tmp_path)


def shares(result: ReplayResult) -> tuple[int, int, int]:
    return result.num_device_blocks, result.num_host_blocks, result.num_disk_blocks


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        # 4 5 6 push 1 2 3 out of the device; with the second 1 2 3 they go themselves
        (Capacity(3), (0, 0, 0)),
        (Capacity(3, host=3), (0, 3, 0)),
        (Capacity(3, host=6), (0, 6, 0)),
        (Capacity(3, disk=6), (0, 0, 6)),
        (Capacity(6), (6, 0, 0)),
    ],
)
def test_hits_are_counted_in_the_tier_that_had_them(
    capacity: Capacity, expected: tuple[int, int, int]
) -> None:
    prompts = trace([1, 2, 3], [4, 5, 6], [1, 2, 3], [4, 5, 6])
    assert shares(replay(prompts, capacity, "lru")) == expected


@pytest.mark.parametrize("policy", ["lru", "adaptive", "lfu", "fifo"])
@pytest.mark.parametrize(
    "capacity", [Capacity(200, host=300), Capacity(200, disk=300), Capacity(200, 200, 400)]
)
def test_the_cache_is_whole_after_each_of_many_requests(capacity: Capacity, policy: str) -> None:
    player = TraceReplay(capacity, policy)
    for number, request in enumerate(trace_of("airline").requests[:300]):
        player.run(request)
        if number % 30 == 29:
            player.cache.check_integrity([])


def test_a_host_tier_hits_nearly_what_a_larger_device_does() -> None:
    found = Trace(64, trace_of("airline").requests[:700])
    tiered = replay(found, Capacity(300, host=300), "lru")
    alike = replay(found, Capacity(600), "lru")
    assert alike.block_hit_rate - 0.005 < tiered.block_hit_rate <= alike.block_hit_rate
    assert tiered.num_device_blocks > 5 * tiered.num_host_blocks > 0


def test_an_unbounded_disk_hits_all_that_was_ever_seen() -> None:
    found = Trace(64, trace_of("airline").requests[:700])
    seen: set[int] = set()
    num_again = 0
    for request in found.requests:
        ids = set(request.block_ids.tolist())
        num_again += len(ids & seen)
        seen |= ids
    result = replay(found, Capacity(300, disk=len(seen)), "lru")
    assert (result.num_hit_blocks, result.num_evicted_blocks) == (num_again, 0)
    assert result.num_disk_blocks > 0


def test_lower_tiers_are_tried_apart_and_together() -> None:
    assert tier_capacities(500, 6_137) == [
        Capacity(500),
        Capacity(500, host=500),
        Capacity(500, host=2_000),
        Capacity(500, disk=6_137),
        Capacity(500, host=2_000, disk=6_137),
    ]


def short_source(folder: Path) -> TraceSource:
    """The first 200 requests of a trace, and what replays of them come to."""
    source = source_named("airline")
    with gzip.open(_data() / source.file, "rt") as lines:
        text = "".join(itertools.islice(lines, 200))
    (folder / source.file).write_bytes(gzip.compress(text.encode()))
    found = load_trace(source, folder)
    bounded = replay(found, Capacity(200), "lru")
    unbounded = replay(found, Capacity(found.num_unique_blocks), "lru")
    return dataclasses.replace(
        source,
        capacities=(200,),
        lru_by_capacity={200: round(bounded.block_hit_rate, 4)},
        unbounded=(round(unbounded.block_hit_rate, 4), round(unbounded.token_hit_rate, 4)),
    )


def test_results_are_compared_tabulated_and_plotted(tmp_path: Path) -> None:
    source = short_source(tmp_path)
    lines: list[str] = []
    result = replay_source(source, ("lru", "fifo"), tmp_path, lines.append)
    assert list(differences(source, result)) == []
    assert len(lines) == 1 * 2 + 1 + 5 * 2
    lru, fifo, unbounded = result["capacity_runs"]
    gained = unbounded["token_hit_rate"] - lru["token_hit_rate"]
    table = markdown([result], ("lru", "fifo")).splitlines()
    assert (
        f"| 200 | 0.01 M | {lru['block_hit_rate']:.4f} | {fifo['block_hit_rate']:.4f} "
        f"| {lru['token_hit_rate']:.4f} |  |" in table
    )
    (last,) = (line for line in table if "(no eviction)" in line)
    assert last.endswith(f"| {gained:+.4f} |")
    assert len([line for line in table if line.startswith("| 500 |")]) == 10
    for name, plot in (("policies", plot_policies), ("tiers", plot_tiers)):
        plot([result], tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_figure_that_is_not_the_reference_is_named(tmp_path: Path) -> None:
    source = short_source(tmp_path)
    rate, unbounded = source.lru_by_capacity[200], source.unbounded
    wrong = dataclasses.replace(source, lru_by_capacity={200: 0.5}, unbounded=(unbounded[0], 0.5))
    runs = list(capacity_runs(wrong, load_trace(wrong, tmp_path), ("lru", "fifo")))
    assert list(differences(wrong, {"capacity_runs": runs})) == [
        f"airline, 200 blocks, lru: {rate}, not 0.5",
        f"airline, unbounded: {unbounded}, not {(unbounded[0], 0.5)}",
    ]


def test_the_kept_results_are_those_of_the_reference() -> None:
    for result in json.loads((RESULTS / "trace_replay.json").read_text())["results"]:
        source = source_named(result["trace"])
        assert list(differences(source, result)) == []
        kept = {run["device_blocks"] for run in result["capacity_runs"]}
        assert set(source.lru_by_capacity) <= kept


def _data() -> Path:
    return Path(__file__).resolve().parent.parent / "benchmarks" / "data"
