"""The tree of prefixes that requests have in common, and what previews keep."""

from __future__ import annotations

import numpy as np
import pytest

from service.dashboard.prefixes import MAX_BLOCKS, MAX_RECORDS, PrefixNode, prefix_tree
from service.dashboard.previews import MAX_CHARS, PromptPreviews
from service.request_history import RequestRecord

BLOCK = 16


def request(blocks: str, num_cached_blocks: int = 0, num_tail_tokens: int = 0) -> RequestRecord:
    """A prompt of blocks; each letter with what stands before it makes a hash."""
    hashes = [hash(blocks[: end + 1]) % 2**64 for end in range(len(blocks))]
    return RequestRecord(
        request_id="r",
        at=5.0,
        tenant="",
        namespace="n",
        session="",
        block_size=BLOCK,
        block_hashes=np.array(hashes, dtype=np.uint64),
        num_prompt_blocks=len(hashes),
        num_prompt_tokens=len(hashes) * BLOCK + num_tail_tokens,
        num_output_tokens=1,
        num_device_tokens=num_cached_blocks * BLOCK,
        num_host_tokens=0,
        num_disk_tokens=0,
    )


def shape(nodes: tuple[PrefixNode, ...]) -> list[tuple[int | None, int, int, int, int]]:
    return [
        (node.parent, node.num_tokens_before // BLOCK, node.num_tokens // BLOCK,
         node.num_requests, node.num_hits)
        for node in nodes
    ]  # fmt: skip


def test_nodes_end_where_prompts_part() -> None:
    tree = prefix_tree(
        [
            request("SSSa"),
            request("SSSab", num_cached_blocks=4),
            request("SSSc", num_cached_blocks=3),
            request("SSSac", num_cached_blocks=4),
            request("x"),
        ]
    )
    # S S S by four, one of them cold; a by three of these, twice found. x is nobody else's.
    assert shape(tree.nodes) == [(None, 0, 3, 4, 3), (0, 3, 1, 3, 2)]
    assert tree.num_requests == 5
    assert tree.num_prompt_tokens == 19 * BLOCK
    root, child = tree.nodes
    assert root.share == pytest.approx(12 / 19)
    assert child.share == pytest.approx(3 / 19)
    assert root.hit_share == pytest.approx(3 / 4)
    assert child.hit_share == pytest.approx(2 / 3)
    assert tree.since == 5.0


def test_a_part_of_a_node_that_was_found_counts_as_a_part() -> None:
    tree = prefix_tree([request("abcd"), request("abcd", num_cached_blocks=2)])
    (node,) = tree.nodes
    assert (node.num_requests, node.num_hits) == (2, 0)
    assert node.hit_share == pytest.approx(2 / 8)


def test_siblings_stand_by_what_they_come_to() -> None:
    few, many = [request("Sa")] * 2, [request("Sb")] * 3
    tree = prefix_tree([*few, *many, request("T"), request("T")])
    assert [node.num_requests for node in tree.nodes] == [5, 3, 2, 2]
    assert [node.parent for node in tree.nodes] == [None, 0, 0, None]


def test_the_largest_are_kept_with_all_they_stand_on() -> None:
    records = [request("S" + letter * 20) for letter in "abcdefgh" for _ in range(3)]
    records += [request("S" + "z" * 40)] * 4
    tree = prefix_tree(records, max_nodes=3)
    assert len(tree.nodes) == 3
    assert tree.nodes[0].num_requests == 28
    assert tree.nodes[1].num_tokens == 40 * BLOCK
    assert tree.nodes[1].parent == tree.nodes[2].parent == 0


def test_only_the_latest_are_looked_at() -> None:
    long = "S" * 1_000
    records = [request("T"), request("T"), *[request(long)] * 250]
    tree = prefix_tree(records)
    assert tree.num_requests == MAX_BLOCKS // len(long) == 200
    assert [node.num_requests for node in tree.nodes] == [200]
    assert prefix_tree([request("ab")] * (MAX_RECORDS + 10)).num_requests == MAX_RECORDS


def test_without_anything_in_common_there_is_no_node() -> None:
    assert prefix_tree([]).nodes == ()
    assert prefix_tree([request("a"), request("b")]).nodes == ()
    short = prefix_tree([request("", num_tail_tokens=5)] * 2)
    assert (short.nodes, short.num_prompt_tokens) == ((), 10)


# ---------------------------------------------------------------- previews


def decode(token_ids: object) -> str:
    assert isinstance(token_ids, list)
    return "".join(chr(token) for token in token_ids)


def test_a_preview_is_how_the_prefix_begins_as_long_as_it_is_kept() -> None:
    previews = PromptPreviews(max_blocks=3)
    first = request("ab")
    tokens = np.array([ord("A")] * BLOCK + [ord("B")] * BLOCK, dtype=np.int32)
    previews.note(first, tokens)
    one, two = first.block_hashes.tolist()
    assert previews.text([one], decode) == "A" * BLOCK
    assert previews.text([one, two], decode) == "A" * BLOCK + "B" * BLOCK
    previews.note(request("a"), tokens)  # seen again
    previews.note(request("xy"), tokens)
    assert len(previews) == 3
    assert previews.text([one, two], decode) == "A" * BLOCK
    assert previews.text([two], decode) is None
    previews.clear()
    assert previews.text([one], decode) is None


def test_a_long_preview_is_cut() -> None:
    previews = PromptPreviews()
    record = request("a")
    previews.note(record, np.full(BLOCK, ord("m"), dtype=np.int32))
    text = previews.text(record.block_hashes.tolist(), lambda ids: "word " * 100)
    assert text is not None
    assert len(text) == MAX_CHARS + 1
    assert text.endswith("…")
