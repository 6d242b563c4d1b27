"""Steps of a few sizes, captured once and replayed: a decode step is hundreds of small kernels, and
launching them one by one takes longer than they do.

Owns which sizes there are, the choice among them, the static memory that a graph reads, and the
padding: rows past a step's own have token 0 at position 0, slot -1 (which stores nothing) and
belong to no sequence. What no graph holds runs eagerly. Knows nothing of requests; of CUDA only
what CudaCapture does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from model_worker.attention.backend import CapturableBackend
from model_worker.attention.metadata import AttentionMetadata
from model_worker.forward import EagerForward, HandedTokens, call_model
from model_worker.host_copy import to_device
from model_worker.memory import size_text
from model_worker.step_inputs import StepInputs

# A suffix behind a cached prefix: short ones are what a warm first token consists of, and beyond
# the longest the kernels themselves take longer than their launches.
SUFFIX_TOKENS = (16, 64, 128, 256)
# Rows of logits that a suffix has: its own, and those of drafts that are verified.
SUFFIX_LOGITS = 16
NO_SLOT = -1


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """The most that a graph holds: new tokens, rows of logits, sequences."""

    num_rows: int
    num_logits: int
    num_spans: int

    def holds(self, inputs: StepInputs) -> bool:
        return bool(
            inputs.per_token.shape[1] <= self.num_rows
            and len(inputs.logit_rows) <= self.num_logits
            and len(inputs.spans) <= self.num_spans
        )


def graph_shapes(max_num_seqs: int, max_num_tokens: int) -> tuple[GraphShape, ...]:
    """Decode by batch, doubling up to ``max_num_seqs``, and suffixes of one sequence; from the
    smallest to the largest, none beyond ``max_num_tokens``."""
    batches = {min(2**power, max_num_seqs) for power in range(max_num_seqs.bit_length() + 1)}
    decode = {GraphShape(batch, batch, batch) for batch in batches}
    suffixes = {GraphShape(rows, min(rows, SUFFIX_LOGITS), 1) for rows in SUFFIX_TOKENS}
    return tuple(sorted(s for s in decode | suffixes if s.num_rows <= max_num_tokens))


class GraphCapture(Protocol):
    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run ``function`` and return what does to the device the same once more. It reads and
        writes memory that stays where it is."""
        ...


class CudaCapture:
    """All graphs share one pool of memory, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is set up or tuned at the first call must not be captured
                function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: those that copy between tiers.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph.replay


class _Graph:
    """One captured size: ``memory`` int64 is ids, positions and slots of each row, and then the
    rows of logits, so that a step is one copy."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: CapturableBackend,
        shape: GraphShape,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._shape = shape
        self._memory = torch.from_numpy(_padding(shape)).to(device)
        per_token = self._memory[: 3 * shape.num_rows].view(3, shape.num_rows)
        self._token_ids, self._positions, slots = per_token
        self._logit_rows = self._memory[3 * shape.num_rows :]
        plan = backend.reserve(shape.num_rows, shape.num_spans, max_model_len)
        self._metadata = AttentionMetadata(backend, slots, (), plan)
        self._logits: torch.Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def record(self, capture: GraphCapture) -> None:
        self._replay = capture.capture(self._compute)

    def _compute(self) -> None:
        self._logits = call_model(
            self._model, self._token_ids, self._positions, self._logit_rows, self._metadata
        )

    def run(self, inputs: StepInputs, handed: HandedTokens | None) -> torch.Tensor | None:
        """None where the backend's plan cannot hold the step."""
        if not self._backend.refill(self._metadata.plan, inputs.spans):
            return None
        host = _padding(self._shape)
        rows = host[: 3 * self._shape.num_rows].reshape(3, -1)
        rows[:, : inputs.per_token.shape[1]] = inputs.per_token
        num_logits = len(inputs.logit_rows)
        host[rows.size : rows.size + num_logits] = inputs.logit_rows
        self._memory.copy_(to_device(host, self._memory.device))
        if handed is not None:
            handed.put_into(self._token_ids)
        assert self._replay is not None
        self._replay()
        assert self._logits is not None
        return self._logits[:num_logits]


def _padding(shape: GraphShape) -> np.ndarray:
    memory = np.zeros(3 * shape.num_rows + shape.num_logits, dtype=np.int64)
    memory[2 * shape.num_rows : 3 * shape.num_rows] = NO_SLOT
    return memory


class GraphForward:
    """Replays the smallest graph that holds a step, and runs the others eagerly."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: CapturableBackend,
        shapes: Sequence[GraphShape],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._eager = EagerForward(model, backend, device)
        self._graphs = {
            shape: _Graph(model, backend, shape, max_model_len, device) for shape in sorted(shapes)
        }

    @torch.inference_mode()
    def record(self, capture: GraphCapture) -> None:
        """Largest first: the smaller ones find their memory in its pool."""
        for shape in reversed(self._graphs):
            self._graphs[shape].record(capture)

    def run(self, inputs: StepInputs, handed: HandedTokens | None = None) -> torch.Tensor:
        if len(inputs.logit_rows):
            for shape, graph in self._graphs.items():
                if shape.holds(inputs):
                    logits = graph.run(inputs, handed)
                    if logits is not None:
                        return logits
                    break
        return self._eager.run(inputs, handed)


def record_cuda_graphs(
    model: torch.nn.Module,
    backend: CapturableBackend,
    shapes: Sequence[GraphShape],
    max_model_len: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> GraphForward:
    """Raises RuntimeError where something in the model cannot be captured."""
    started = time.monotonic()
    free_before, _ = torch.cuda.mem_get_info(device)
    forward = GraphForward(model, backend, shapes, max_model_len, device)
    forward.record(CudaCapture(device))
    free_after, _ = torch.cuda.mem_get_info(device)
    largest = max(shape.num_spans for shape in shapes)
    progress(
        f"CUDA graphs: {len(shapes)}, for up to {largest} requests that decode and suffixes of up "
        f"to {max(shape.num_rows for shape in shapes if shape.num_spans == 1)} tokens, "
        f"{size_text(max(0, free_before - free_after))}, {time.monotonic() - started:.1f} s"
    )
    return forward
