"""Coalescing: who leads a block, who waits for it, and when it is let go."""

from __future__ import annotations

from model_worker.coalescer import Coalescer
from tests.request_kit import make_request


def test_a_follower_waits_for_the_first_block_it_lacks() -> None:
    coalescer = Coalescer(block_size=4)
    leader = make_request(range(12), name="leader")
    follower = make_request([*range(8), 99, 98, 97, 96], name="follower")
    coalescer.lead(leader)
    assert len(coalescer) == 3
    assert not coalescer.is_waiting(follower)
    assert coalescer.must_wait(follower, num_matched_tokens=0)
    assert coalescer.is_waiting(follower)

    leader.num_computed_tokens = 6
    coalescer.advance(leader, 0)
    assert not coalescer.is_waiting(follower)
    assert coalescer.must_wait(follower, num_matched_tokens=4)

    leader.num_computed_tokens = 9
    coalescer.advance(leader, 6)
    assert not coalescer.must_wait(follower, num_matched_tokens=8)  # they part here
    assert len(coalescer) == 1


def test_leaving_frees_what_was_not_computed() -> None:
    coalescer = Coalescer(block_size=4)
    leader = make_request(range(12), name="leader")
    follower = make_request(range(12), name="follower")
    coalescer.lead(leader)
    assert coalescer.must_wait(follower, 0)
    coalescer.leave(leader)
    assert len(coalescer) == 0
    assert not coalescer.is_waiting(follower)


def test_a_second_leader_takes_nothing_from_the_first() -> None:
    coalescer = Coalescer(block_size=4)
    first = make_request(range(8), name="first")
    second = make_request(range(8), name="second")
    coalescer.lead(first)
    coalescer.lead(second)
    coalescer.leave(second)
    assert len(coalescer) == 2
    coalescer.leave(first)
    assert len(coalescer) == 0


def test_a_prompt_within_one_block_never_waits() -> None:
    coalescer = Coalescer(block_size=4)
    coalescer.lead(make_request(range(3), name="first"))
    assert not coalescer.must_wait(make_request(range(3), name="second"), 0)
