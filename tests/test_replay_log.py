"""What of a stream is kept for later, and how much."""

from __future__ import annotations

from model_worker.replay_log import ReplayLog


def test_batches_are_numbered_and_found_by_number() -> None:
    log = ReplayLog(10, 1000)
    assert [log.append(text) for text in (b"a", b"b", b"c")] == [0, 1, 2]
    assert list(log.since(1)) == [(1, b"b"), (2, b"c")]
    assert list(log.since(3)) == []


def test_the_oldest_go_by_number_and_by_bytes() -> None:
    log = ReplayLog(2, 1000)
    for text in (b"a", b"b", b"c"):
        log.append(text)
    assert list(log.since(0)) == [(1, b"b"), (2, b"c")]
    log = ReplayLog(10, 5)
    for text in (b"aa", b"bb", b"cc"):
        log.append(text)
    assert list(log.since(0)) == [(1, b"bb"), (2, b"cc")]
    log.append(b"larger than all")
    assert list(log.since(0)) == [(3, b"larger than all")]
    log.append(b"d")
    assert list(log.since(0)) == [(4, b"d")]
