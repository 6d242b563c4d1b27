"""Names of blocks: a chained hash over everything that a block's keys and values depend on.

Owns the namespace, the hash function and its version. A block's hash covers its own tokens and
the hash of the block before it, and so the whole prefix; the first block's parent is the hash of
the namespace. Hashes name blocks to others (routing, events, lower tiers); the tree itself
compares token ids, and nothing here is proof that two blocks are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from cache_store.token_bytes import TOKEN_BYTES, TokenBytes, TokenIds, encode_tokens

HASH_VERSION = "xxh3_128-be32-1"
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Requests share blocks only within one namespace.

    ``fingerprint`` stands for the model and its KV layout, ``cache_salt`` is the client's own
    wall around its prompts (kept out of repr, since knowing it is what opens the wall). ``behind``
    names the tokens that everything in it comes after, if it does (cache_store.shared_prefixes).
    """

    fingerprint: str
    adapter: str = ""
    cache_salt: str = field(default="", repr=False)
    behind: bytes = b""
    root_hash: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A salt is chosen by the client, so this one hash has to withstand a forger. Each field
        # goes in behind its length: ("ab", "c") and ("a", "bc") are different namespaces.
        digest = hashlib.blake2b(HASH_VERSION.encode(), digest_size=HASH_BYTES)
        for text in (self.fingerprint, self.adapter, self.cache_salt):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        digest.update(self.behind)  # the last one: where it begins is known
        object.__setattr__(self, "root_hash", digest.digest())


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """Hashes of consecutive full blocks, 16 bytes each, joined."""

    joined: bytes

    def __len__(self) -> int:
        return len(self.joined) // HASH_BYTES

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self.joined[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return self.between(0, len(self))

    def between(self, first: int, stop: int) -> Iterator[bytes]:
        """Those of the blocks from ``first`` to before ``stop``, as far as there are any."""
        return (self[index] for index in range(first, min(stop, len(self))))


NO_HASHES = BlockHashes(b"")


def hash_blocks(namespace: Namespace, token_ids: TokenIds, block_size: int) -> BlockHashes:
    """Hashes of the full blocks of a 1-D int32 array; a partly filled last block has none."""
    num_tokens = len(token_ids) // block_size * block_size
    return chain_hashes(namespace.root_hash, encode_tokens(token_ids[:num_tokens]), block_size)


def chain_hashes(
    parent_hash: bytes, encoded: TokenBytes, block_size: int, known: bytes = b""
) -> BlockHashes:
    """Hashes of the blocks in ``encoded`` (a whole number of them) that follow ``parent_hash``.

    ``known``: those of the first of them, joined, which are not computed again.
    """
    block_bytes = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    hashes = [known]
    parent_hash = known[-HASH_BYTES:] or parent_hash
    for start in range(len(known) // HASH_BYTES * block_bytes, len(encoded), block_bytes):
        parent_hash = digest(parent_hash + encoded[start : start + block_bytes])
        hashes.append(parent_hash)
    return BlockHashes(b"".join(hashes))
