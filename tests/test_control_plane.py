"""The comparison of bookkeeping: what it asks of a cache, and its arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.control_plane import __main__ as control_plane
from benchmarks.control_plane.measure import fill
from benchmarks.control_plane.sides import OurSide

BLOCK = 32


def test_our_side_stores_what_it_admits_and_finds_it() -> None:
    side = OurSide(16, BLOCK)
    prompt = side.prepare(np.arange(4 * BLOCK, dtype=np.int32))
    assert side.match(prompt) == 0
    handle = side.admit(prompt)
    assert side.match(prompt) == 4 * BLOCK
    side.release(handle)
    assert side.num_free == 12
    side.take(14)  # two of them from what is stored
    assert side.match(prompt) == 2 * BLOCK


def test_a_full_cache_has_no_room_for_another_prompt() -> None:
    side = OurSide(1_000, BLOCK)
    fill(side, 1_000, BLOCK)
    assert side.num_free < 4
    side.take(side.num_free + 500)
    assert side.num_free == 0


def test_ratios_say_how_many_times_as_fast_ours_is() -> None:
    names = ("admit", "match_stored", "evict_1", "evict_32", "evict_3125")
    ours = {name: [0.2, 0.1, 0.9] for name in names}
    theirs = {**{name: [0.5] for name in names}, "evict_1": [0.6]}
    pair = control_plane.compare(
        "vllm",
        {
            "headstart": {"version": "1", "samples": ours},
            "vllm": {"version": "2", "samples": theirs},
        },
    )
    assert pair["times_as_fast"]["admit"] == 2.5
    assert pair["reached"] == {
        "admit": False,
        "evict_1": True,
        "evict_32": False,
        "evict_3125": False,
    }
    rows = control_plane.table([pair])
    assert rows[0] == (
        "match, allocate and commit 100,000 tokens", "vllm 2", "200,000.00", "500,000.00", "2.50",
        ">= 3",
    )  # fmt: skip


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Failed:
        returncode = 1
        stderr = "Traceback\nModuleNotFoundError: No module named 'vllm'\n"

    def run(command: list[str], **options: Any) -> Failed:
        seen.append(command)
        return Failed()

    monkeypatch.setattr(control_plane.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"^ModuleNotFoundError: No module named 'vllm'$"):
        control_plane.measured(Path(sys.executable), "vllm", 64)
    assert seen[0][1:] == ["-m", "benchmarks.control_plane.measure", "headstart,vllm", "64", "32"]
