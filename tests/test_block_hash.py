import hashlib

import numpy as np
import pytest
import xxhash

from cache_store.block_hash import (
    HASH_BYTES,
    HASH_VERSION,
    NO_HASHES,
    Namespace,
    chain_hashes,
    hash_blocks,
)
from cache_store.token_bytes import encode_tokens

NAMESPACE = Namespace("f")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_hashes_are_chained_from_the_namespace() -> None:
    namespace = Namespace("f")
    first = xxhash.xxh3_128_digest(namespace.root_hash + bytes([0, 0, 0, 1, 0, 0, 0, 2]))
    second = xxhash.xxh3_128_digest(first + bytes([0, 0, 0, 3, 0, 0, 0, 4]))
    assert list(hash_blocks(namespace, tokens(1, 2, 3, 4), 2)) == [first, second]


def test_the_root_hash_is_part_of_the_format() -> None:
    parts = [b"f", b"", "sälz".encode()]
    stream = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = hashlib.blake2b(HASH_VERSION.encode() + stream, digest_size=16).digest()
    assert Namespace("f", cache_salt="sälz").root_hash == expected


def test_known_value() -> None:
    """Workers and gateways of other builds must agree: a change here needs a new HASH_VERSION."""
    hashes = hash_blocks(Namespace("model", "adapter", "salt"), tokens(*range(8)), 4)
    assert (HASH_VERSION, hashes[0].hex(), hashes[1].hex()) == (
        "xxh3_128-be32-1",
        "35c1bec22ecefb8a873092a3450804dd",
        "3d805bd69eb81d36e58abf4f8a02b3c1",
    )


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_a_partly_filled_block_has_no_hash(num_tokens: int, num_blocks: int) -> None:
    hashes = hash_blocks(Namespace("f"), np.arange(num_tokens, dtype=np.int32), 4)
    assert len(hashes) == num_blocks
    assert len(hashes.joined) == 16 * num_blocks


def test_a_changed_token_changes_all_hashes_from_its_block_on() -> None:
    ids = np.arange(12, dtype=np.int32)
    changed = ids.copy()
    changed[5] += 1
    left, right = (list(hash_blocks(Namespace("f"), each, 4)) for each in (ids, changed))
    assert [a == b for a, b in zip(left, right, strict=True)] == [True, False, False]


def test_an_index_beyond_the_blocks_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="block 1 of 1"):
        hash_blocks(Namespace("f"), tokens(1, 2), 2)[1]


def test_namespaces_do_not_collide_where_their_fields_join_alike() -> None:
    fields = [("ab", "c", ""), ("a", "bc", ""), ("abc", "", ""), ("", "", "abc"), ("", "abc", "")]
    assert len({Namespace(*each).root_hash for each in fields}) == len(fields)


def test_a_salt_is_not_shown() -> None:
    assert "hush" not in repr(Namespace("f", cache_salt="hush"))


def test_known_hashes_are_not_computed_again() -> None:
    tokens = np.arange(40, dtype=np.int32)
    whole = hash_blocks(NAMESPACE, tokens, 8)
    encoded = encode_tokens(tokens)
    for num_known in range(6):
        known = whole.joined[: num_known * HASH_BYTES]
        assert chain_hashes(NAMESPACE.root_hash, encoded, 8, known) == whole
    wrong = bytes(HASH_BYTES)  # taken at its word, and what follows is chained to it
    hashes = chain_hashes(NAMESPACE.root_hash, encoded, 8, wrong)
    assert hashes[0] == wrong
    assert hashes[1] == chain_hashes(wrong, encoded[32:64], 8)[0]


def test_a_part_of_the_hashes() -> None:
    whole = hash_blocks(NAMESPACE, np.arange(40, dtype=np.int32), 8)
    assert list(whole.between(1, 3)) == [whole[1], whole[2]]
    assert list(whole.between(3, 9)) == [whole[3], whole[4]]
    assert list(whole.between(7, 9)) == list(NO_HASHES) == []
