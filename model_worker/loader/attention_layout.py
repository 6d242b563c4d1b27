"""What a model's attention layers ask of a paged KV cache, found by watching them run.

Owns a dry run: the model is built without weights (meta device) and called once with a recording
function in the place of attention. What it is handed is the truth about shapes, windows and
extras, whatever the configuration calls them. Knows nothing of weights or of KV blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.progress import quiet_transformers

_PROBE = "headstart_probe"
_MARKER = "headstart_marker"
_NUM_TOKENS = 4

# Keyword arguments that change nothing, or that a paged attention honours or may drop: dropout is
# off in evaluation, a window is checked against the context, positions are already in q and k.
_HONOURED = frozenset(
    {
        "dropout",
        "scaling",
        "sliding_window",
        "is_causal",
        "position_ids",
        "cache_position",
        "cache",
        "past_key_values",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        _MARKER,
    }
)
_REASONS = {
    "softcap": "attention soft-capping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
}


@dataclass(frozen=True)
class AttentionLayout:
    """Shapes of a model's per-token keys and values, equal in all its layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens; the shortest of all layers


@dataclass(frozen=True)
class _Call:
    layer_idx: int | None
    query_heads: int
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    window: int | None


@dataclass
class _Recorder:
    """Stands in for attention during the dry run and keeps what it is handed."""

    calls: list[_Call] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        self._object(module, attention_mask, kwargs)
        window = kwargs.get("sliding_window")
        self.calls.append(
            _Call(
                layer_idx=getattr(module, "layer_idx", None),
                query_heads=query.shape[1],
                key_shape=tuple(key.shape),
                value_shape=tuple(value.shape),
                window=int(window) if window else None,
            )
        )
        batch, num_heads, num_tokens, _ = query.shape
        return query.new_empty(batch, num_tokens, num_heads, value.shape[-1]), None

    def _object(
        self, module: torch.nn.Module, mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.objections.append("attends to later tokens (it is bidirectional)")
        if mask is not None:
            self.objections.append("builds its own attention mask or position bias")
        if _MARKER not in kwargs:
            self.objections.append("does not pass keyword arguments on to its attention layers")
        for name, value in kwargs.items():
            if name not in _HONOURED and value is not None and value is not False:
                reason = _REASONS.get(name, f"the attention argument {name!r}")
                self.objections.append(f"uses {reason}, which paged attention does not honour")


def causal_model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Transformers' own causal language model class for ``config``, if there is one."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return chosen


def probe_attention(config: PretrainedConfig) -> AttentionLayout:
    """Run the model of ``config`` once without weights and return its attention layout.

    Raises ModelLoadError with the reason if its attention cannot be paged.
    """
    model_class = causal_model_class(config)
    if model_class is None:
        raise ModelLoadError(f"{config.model_type} has no causal language model in transformers")
    name = model_class.__name__
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"{name} is not served: it does not use transformers' attention interface, so its "
            "keys and values cannot be paged"
        )
    recorder = _Recorder()
    try:
        _dry_run(model_class, config, recorder)
    except Exception as error:  # whatever a model's code raises, it means "cannot be verified"
        raise ModelLoadError(
            f"{name} is not served: its attention could not be examined ({first_line(error)})"
        ) from error
    if recorder.objections:
        raise ModelLoadError(f"{name} is not served: it {recorder.objections[0]}")
    return _layout(name, config, recorder.calls)


def _dry_run(
    model_class: type[PreTrainedModel], config: PretrainedConfig, recorder: _Recorder
) -> None:
    probed = copy.deepcopy(config)
    with quiet_transformers(), _registered(recorder), torch.device("meta"), torch.no_grad():
        model = model_class._from_config(  # type: ignore[no-untyped-call]
            probed, attn_implementation=_PROBE, dtype=torch.bfloat16
        )
        model.eval()
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long)
        positions = torch.arange(_NUM_TOKENS).unsqueeze(0)
        model(input_ids=ids, position_ids=positions, use_cache=False, **{_MARKER: True})


@contextmanager
def _registered(recorder: _Recorder) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS[_PROBE] = recorder
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_PROBE]  # type: ignore[no-untyped-call]


def _layout(name: str, config: PretrainedConfig, calls: list[_Call]) -> AttentionLayout:
    num_layers = int(config.num_hidden_layers)
    if [call.layer_idx for call in calls] != list(range(num_layers)):
        raise ModelLoadError(
            f"{name} is not served: its {num_layers} layers call attention {len(calls)} times "
            "instead of once each, so not every layer's state is keys and values per token"
        )
    shapes = {(call.query_heads, call.key_shape[1], call.key_shape[3]) for call in calls}
    if len(shapes) != 1:
        raise ModelLoadError(f"{name} is not served: its layers differ in heads or head size")
    if any(call.key_shape != call.value_shape for call in calls):
        raise ModelLoadError(f"{name} is not served: its keys and values differ in shape")
    ((num_heads, num_kv_heads, head_dim),) = shapes
    windows = [call.window for call in calls if call.window is not None]
    return AttentionLayout(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=min(windows, default=None),
    )
