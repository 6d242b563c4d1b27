"""The trace replay finds the hit rates that other simulators found, and says so if it does not."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace_plot import plot_policies
from benchmarks.trace_replay import differences, markdown, replay, replay_source
from benchmarks.traces import CATALOGUE, Trace, TraceRequest, load_trace, source_named


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
        ("synthetic", 10_000, 0.4239),
        ("agentic", 2_000, 0.8341),
        ("conversation", 5_000, 0.1118),
    ],
)
def test_lru_hits_what_other_simulators_found(name: str, capacity: int, expected: float) -> None:
    assert round(replay(trace_of(name), capacity, "lru").block_hit_rate, 4) == expected


@pytest.mark.parametrize(
    ("name", "by_blocks", "by_tokens"),
    [
        ("airline", 0.9686, 0.9629),
        ("synthetic", 0.6396, 0.6512),
        ("agentic", 0.9703, 0.9682),
        ("conversation", 0.3664, 0.3736),
    ],
)
def test_an_unbounded_cache_hits_what_was_found(
    name: str, by_blocks: float, by_tokens: float
) -> None:
    found = trace_of(name)
    result = replay(found, found.num_unique_blocks, "lru")
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
    result = replay(prompts, 3, "lru")
    assert (result.num_hit_blocks, result.num_blocks) == (4, 11)
    assert (result.num_hit_tokens, result.num_tokens) == (40, 110)
    assert result.num_evicted_blocks == 4


def test_a_partly_filled_block_counts_as_the_tokens_that_it_has() -> None:
    result = replay(trace([1, 2], [1, 2], num_tokens=13), 2, "lru")
    assert (result.num_hit_blocks, result.num_hit_tokens, result.num_tokens) == (2, 13, 26)


def test_policies_differ_where_they_should() -> None:
    prompts = trace([1], [2], [1], [3], [1])  # 1 was used last, but came first
    assert replay(prompts, 2, "lru").num_hit_blocks == 2
    assert replay(prompts, 2, "fifo").num_hit_blocks == 1


def test_a_cache_that_cannot_hold_the_longest_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks cannot hold a prompt of 3"):
        replay(trace([1], [1, 2, 3]), 2, "lru")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    source = dataclasses.replace(CATALOGUE[0], file="other.jsonl.gz")
    (tmp_path / source.file).write_bytes(gzip.compress(b'{"prompt": "hello"}\n'))
    with pytest.raises(ValueError, match="no request of a trace: prompt"):
        load_trace(source, tmp_path)


def test_results_are_compared_tabulated_and_plotted(tmp_path: Path) -> None:
    source = dataclasses.replace(source_named("airline"), capacities=(500,))
    lines: list[str] = []
    result = replay_source(source, ("lru", "fifo"), _data(), lines.append)
    assert list(differences(source, result)) == []
    assert len(lines) == 3
    table = markdown([result], ("lru", "fifo"))
    assert "| 500 | 0.03 M | 0.9084 | 0.9076 | 0.9031 |  |" in table
    assert "| 6,137 (no eviction) | 0.39 M | 0.9686 | 0.9686 | 0.9629 | +0.0598 |" in table
    plot_policies([result], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_figure_that_is_not_the_reference_is_named() -> None:
    wrong = dataclasses.replace(
        source_named("airline"),
        capacities=(500,),
        lru_by_capacity={500: 0.9085},
        unbounded=(0.9686, 0.9999),
    )
    result = replay_source(wrong, ("lru", "fifo"), _data(), lambda line: None)
    assert list(differences(wrong, result)) == [
        "airline, 500 blocks, lru: 0.9084, not 0.9085",
        "airline, unbounded: (0.9686, 0.9629), not (0.9686, 0.9999)",
    ]


def _data() -> Path:
    return Path(__file__).resolve().parent.parent / "benchmarks" / "data"
