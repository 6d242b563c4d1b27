"""One step of attention over a random pool, the same for every backend and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from cache_store.block import KVCacheSpec
from cache_store.tiers.device import DeviceTier
from model_worker.attention.backend import AttentionBackend
from model_worker.attention.metadata import AttentionMetadata, SequenceSpan

LAYER = 1


@dataclass(frozen=True)
class Share:
    """One sequence: context and new tokens; ``prefix`` blocks are shared by equal ``name``s."""

    context: int
    new: int
    prefix: int = 0
    name: str = ""


@dataclass(frozen=True)
class AttentionCase:
    shares: tuple[Share, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: as dtype
    seed: int = 0

    def spans(self) -> tuple[SequenceSpan, ...]:
        """Blocks in random order; a share's prefix is the leading part of its name's."""
        rng = np.random.default_rng(self.seed)
        size = self.block_size
        lengths = [-(-(share.context + share.new) // size) for share in self.shares]
        free = rng.permutation(self.num_blocks).tolist()
        prefixes: dict[str, list[int]] = {}
        spans = []
        row = 0
        for share, length in zip(self.shares, lengths, strict=True):
            prefix = prefixes.setdefault(share.name, [])
            assert share.prefix * size <= share.context
            while len(prefix) < share.prefix:
                prefix.append(free.pop())
            own = [free.pop() for _ in range(length - share.prefix)]
            spans.append(SequenceSpan(row, share.new, share.context, prefix[: share.prefix] + own))
            row += share.new
        return tuple(spans)

    @property
    def num_blocks(self) -> int:
        return 2 + sum(-(-(share.context + share.new) // self.block_size) for share in self.shares)

    @property
    def num_tokens(self) -> int:
        return sum(share.new for share in self.shares)


class Step:
    """The tensors of a case on a device. Rows that no sequence has written are NaN (or, in int8,
    have NaN scales), since such a row must not reach any result, not even multiplied by zero."""

    def __init__(self, case: AttentionCase, device: str = "cpu") -> None:
        self.case = case
        self.spans = case.spans()
        self._generator = torch.Generator().manual_seed(case.seed)
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self.query = self._new_rows(case.heads)
        self.key = self._new_rows(case.kv_heads)
        self.value = self._new_rows(case.kv_heads)
        self.slots = torch.tensor(
            [
                span.block_ids[position // case.block_size] * case.block_size
                + position % case.block_size
                for span in self.spans
                for position in range(span.context_len, span.kv_len)
            ],
            device=self._device,
        )
        self._tier = self._random_tier()

    def _new_rows(self, heads: int) -> torch.Tensor:
        """(1, heads, tokens, head_dim), tokens first in memory as a model's projections are."""
        shape = (1, self.case.num_tokens, heads, self.case.head_dim)
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(self._device, self._dtype).transpose(1, 2)

    def _random_tier(self) -> DeviceTier:
        case = self.case
        kv_dtype = case.kv_dtype or case.dtype
        element = torch.empty(0, dtype=getattr(torch, kv_dtype)).element_size()
        spec = KVCacheSpec(
            case.block_size, LAYER + 1, case.kv_heads, case.head_dim, kv_dtype, element
        )
        tier = DeviceTier(spec, case.num_blocks, self._device)
        written = torch.zeros(case.num_blocks, case.block_size, dtype=torch.bool)
        for span in self.spans:
            for position in range(span.context_len):
                block, row = divmod(position, case.block_size)
                written[span.block_ids[block], row] = True
        for tensor in tier.tensors:
            drawn = torch.randn(tensor.shape, generator=self._generator)
            if tensor.dtype is torch.int8:
                tensor.copy_((drawn * 50).clamp(-127, 127).round())
                continue
            if tensor.ndim == 4:  # scales
                drawn = drawn.abs() / 50
            drawn[:, ~written] = torch.nan
            tensor.copy_(drawn)
        return tier

    def copy_tier(self) -> DeviceTier:
        copy = DeviceTier(self._tier.spec, self._tier.num_blocks, self._device)
        for target, source in zip(copy.tensors, self._tier.tensors, strict=True):
            target.copy_(source)
        return copy

    def run(
        self, make: Callable[[DeviceTier], AttentionBackend]
    ) -> tuple[torch.Tensor, DeviceTier]:
        """(tokens, heads, head_dim) and the tier after the step."""
        tier = self.copy_tier()
        backend = make(tier)
        return self.forward(backend, backend.prepare(self.spans)), tier

    def forward(self, backend: AttentionBackend, plan: object) -> torch.Tensor:
        metadata = AttentionMetadata(backend, self.slots, self.spans, plan)
        scaling = 0.9 * self.case.head_dim**-0.5
        output = backend.forward(LAYER, self.query, self.key, self.value, scaling, metadata)
        assert output.shape == (1, self.case.num_tokens, self.case.heads, self.case.head_dim)
        assert output.dtype is self._dtype
        return output[0]

    def upcast(self) -> Step:
        """The same numbers in float32 on the CPU (int8 stays int8): what a result is held to."""
        step = object.__new__(Step)
        step.__dict__.update(self.__dict__)
        is_int8 = self._tier.spec.dtype == "int8"
        kv_dtype = "int8" if is_int8 else "float32"
        step.case = replace(self.case, dtype="float32", kv_dtype=kv_dtype)
        step._device, step._dtype = torch.device("cpu"), torch.float32
        step.query, step.key, step.value = (
            tensor.cpu().float() for tensor in (self.query, self.key, self.value)
        )
        step.slots = self.slots.cpu()
        spec = replace(self._tier.spec, dtype=kv_dtype, bytes_per_element=1 if is_int8 else 4)
        step._tier = DeviceTier(spec, self._tier.num_blocks, step._device)
        for target, source in zip(step._tier.tensors, self._tier.tensors, strict=True):
            target.copy_(source)
        return step

    def alone(self, index: int) -> Step:
        """The sequence ``index`` of this step as a step of its own, over the same pool."""
        step = object.__new__(Step)
        span = self.spans[index]
        rows = slice(span.query_start, span.query_stop)
        step.__dict__.update(self.__dict__)
        step.case = replace(self.case, shares=(self.case.shares[index],))
        step.spans = (msgspec.structs.replace(span, query_start=0),)
        step.query, step.key, step.value = (
            tensor[:, :, rows] for tensor in (self.query, self.key, self.value)
        )
        step.slots = self.slots[rows]
        return step
