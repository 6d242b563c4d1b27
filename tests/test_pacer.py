"""Prefill pacing: what the estimate allows, and how it follows the measurements."""

from __future__ import annotations

from model_worker.pacer import MIN_PREFILL_TOKENS, PrefillPacer


def test_without_streams_or_measurements_the_step_is_full() -> None:
    pacer = PrefillPacer(2.0, 512)
    assert pacer.prefill_budget(0) == 512
    assert pacer.prefill_budget(3) == 509


def test_a_chunk_costs_a_stream_no_more_than_the_factor() -> None:
    pacer = PrefillPacer(2.0, 512)
    pacer.record(1, 0, 0.050)
    pacer.record(0, 100, 0.250)  # 0.2 s above the weights' read: 2 ms a token
    assert pacer.prefill_budget(1) == 25
    assert pacer.prefill_budget(0) == 512
    assert PrefillPacer(2.0, 512).prefill_budget(1) == 511


def test_the_factor_scales_the_chunk_and_leaves_a_minimum() -> None:
    for factor, wanted in ((1.0, MIN_PREFILL_TOKENS), (3.0, 50), (100.0, 511), (1e308, 511)):
        pacer = PrefillPacer(factor, 512)
        pacer.record(1, 0, 0.050)
        pacer.record(0, 100, 0.250)
        assert pacer.prefill_budget(1) == wanted
    tight = PrefillPacer(1.0, 12)
    tight.record(8, 0, 0.050)
    tight.record(0, 100, 0.250)
    assert tight.prefill_budget(8) == 4
    assert tight.prefill_budget(12) == 0


def test_decode_steps_are_told_apart_by_size() -> None:
    pacer = PrefillPacer(2.0, 4096)
    pacer.record(1, 0, 0.040)
    pacer.record(16, 0, 0.080)
    pacer.record(0, 100, 0.240)
    assert pacer.prefill_budget(1) == 20
    assert pacer.prefill_budget(2) == 20  # nearest measured size
    assert pacer.prefill_budget(16) == 40


def test_new_measurements_replace_old_ones() -> None:
    pacer = PrefillPacer(2.0, 4096)
    pacer.record(1, 0, 0.040)
    pacer.record(0, 100, 0.240)
    for _ in range(100):
        pacer.record(1, 40, 0.200)  # 4 ms a token by now
    assert pacer.prefill_budget(1) == 10
