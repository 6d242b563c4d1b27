"""How many bytes the device's KV pool gets when nobody has said.

Owns the defaults by device. Knows nothing of what the pool is used for.
"""

from __future__ import annotations

import torch

from cache_store.block import KVCacheSpec, num_blocks_for
from model_worker.loader.errors import ModelLoadError
from model_worker.memory import MemoryBill, free_host_memory, plan_memory
from model_worker.protocol import WorkerConfig

CPU_SHARE_OF_FREE = 0.25
CPU_DEFAULT_BYTES = 4 * 2**30
# Conversations of max_model_len beyond which more memory by default would only be taken away from
# others: the operator who wants more says so.
CPU_DEFAULT_CONVERSATIONS = 16


def plan_pool(
    config: WorkerConfig, spec: KVCacheSpec, max_model_len: int, device: torch.device
) -> MemoryBill:
    """The bill of the pool for ``spec`` on ``device``, after the weights are loaded.

    Raises ModelLoadError if more is asked for than is free, and if the pool cannot hold one
    conversation of ``max_model_len``.
    """
    if device.type == "cuda":
        free = default = _free_cuda(device, config.gpu_memory_utilization)
    else:
        free = free_host_memory()
        default = _cpu_budget(free, spec, max_model_len)
    budget = config.kv_cache_memory or default
    if budget > free:
        raise ModelLoadError(
            f"--kv-cache-memory asks for {budget / 2**30:.2f} GiB and {free / 2**30:.2f} GiB "
            "are free once the weights are loaded"
        )
    return plan_memory(spec, budget, max_model_len, free)


def _free_cuda(device: torch.device, utilization: float) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def _cpu_budget(free: int, spec: KVCacheSpec, max_model_len: int) -> int:
    one = (num_blocks_for(max_model_len, spec.block_size) + 1) * spec.bytes_per_block
    wanted = min(int(free * CPU_SHARE_OF_FREE), CPU_DEFAULT_BYTES, CPU_DEFAULT_CONVERSATIONS * one)
    # A quarter that holds no conversation is of no use: rather take what one needs, if there is it.
    return min(max(wanted, one), free)
