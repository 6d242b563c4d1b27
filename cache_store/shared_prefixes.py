"""Prefixes that every namespace may reuse, and where a prompt that begins with one is kept.

Owns the registered prefixes and the division of a prompt: its first tokens, whole blocks that are
exactly a registered prefix, are kept once, in a namespace that all have in common; what follows is
kept in a namespace of its own, which the request's own wall and that prefix make together. So two
ordinary namespaces hold what one held before: no match crosses either of them, the common one never
holds a token more than was registered, and what stands behind another prefix is never met.

Keys and values depend on the tokens before them, and of those the second namespace fixes what it
does not hold itself. Knows nothing of blocks, trees or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cache_store.block_hash import BlockHashes, Namespace, hash_blocks
from cache_store.token_bytes import TOKEN_BYTES, TokenIds, encode_tokens

MAX_SHARED_PREFIXES = 1_024

_COMMON = b"shared prefixes"
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class DividedNamespace:
    """``head`` is for the first ``num_head_tokens`` tokens, ``tail`` for those that follow."""

    head: Namespace
    num_head_tokens: int
    tail: Namespace


Place = Namespace | DividedNamespace
"""Where a prompt is kept."""


class SharedPrefixes:
    """``block_size`` in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._present: dict[bytes, int] = {}  # digest of the encoded tokens -> how many there are
        self._past: dict[bytes, int] = {}

    def set(self, prefixes: Iterable[TokenIds]) -> None:
        """These are shared from now on and no others; of each as much as fills whole blocks. What
        was kept behind others is not met any more, but can still be named."""
        present: dict[bytes, int] = {}
        for token_ids in prefixes:
            num_tokens = len(token_ids) // self._block_size * self._block_size
            if num_tokens and len(present) < MAX_SHARED_PREFIXES:
                present[_digest(encode_tokens(token_ids[:num_tokens]))] = num_tokens
        past = self._past | self._present
        newest = [(digest, size) for digest, size in past.items() if digest not in present]
        self._past = dict(newest[-MAX_SHARED_PREFIXES:])
        self._present = present

    def divide(self, namespace: Namespace, token_ids: TokenIds) -> Place:
        """Where a prompt is kept: divided behind the longest shared prefix that it begins with."""
        for digest, num_tokens in _beginnings(token_ids, self._present):
            return _divided(namespace, digest, num_tokens)
        return namespace

    def all_places(self, namespace: Namespace, token_ids: TokenIds) -> Iterator[Place]:
        """Wherever a prompt may have been kept, whatever was shared when it was."""
        for digest, num_tokens in _beginnings(token_ids, self._present | self._past):
            yield _divided(namespace, digest, num_tokens)
        yield namespace


def hash_prompt(place: Place, token_ids: TokenIds, block_size: int) -> BlockHashes:
    """Hashes of the full blocks of a prompt, in order, as they are in ``place``."""
    if isinstance(place, Namespace):
        return hash_blocks(place, token_ids, block_size)
    cut = place.num_head_tokens
    head = hash_blocks(place.head, token_ids[:cut], block_size)
    return BlockHashes(head.joined + hash_blocks(place.tail, token_ids[cut:], block_size).joined)


def _beginnings(token_ids: TokenIds, known: dict[bytes, int]) -> Iterator[tuple[bytes, int]]:
    """Those of ``known`` that ``token_ids`` begin with, the longest first."""
    sizes = sorted({size for size in known.values() if size <= len(token_ids)}, reverse=True)
    if not sizes:
        return
    encoded = encode_tokens(token_ids[: sizes[0]])
    for size in sizes:
        digest = _digest(encoded[: size * TOKEN_BYTES])
        if known.get(digest) == size:
            yield digest, size


def _divided(namespace: Namespace, digest: bytes, num_tokens: int) -> DividedNamespace:
    return DividedNamespace(
        Namespace(namespace.fingerprint, namespace.adapter, behind=_COMMON),
        num_tokens,
        Namespace(namespace.fingerprint, namespace.adapter, namespace.cache_salt, behind=digest),
    )


def _digest(encoded: bytes) -> bytes:
    # Whoever registers a prefix must not be able to make another one look like it.
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
