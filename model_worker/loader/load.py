"""From a model's files to a model ready to run, and all that the worker must know of it.

Owns the order: configuration, refusal, weights, rope, layout, fingerprint, tokenizer files.
Knows nothing of scheduling, of block pools, or of how attention is computed: the implementation
is named here and registered elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from cache_store.block import KVCacheSpec
from cache_store.block_hash import HASH_VERSION
from model_worker.int8_linear import INT8_CODING, quantize_linears
from model_worker.loader.attention_layout import AttentionLayout, causal_model_class
from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.fingerprint import (
    FingerprintInputs,
    canonical_config,
    compute_fingerprint,
)
from model_worker.loader.progress import Progress, format_bytes, no_progress, quiet_transformers
from model_worker.loader.rope import longrope_choice, pin_rope
from model_worker.loader.source import ModelSource
from model_worker.loader.support import check_supported, resolve_max_model_len
from model_worker.loader.tokenizer_files import find_eos_token_ids, read_tokenizer_files
from model_worker.protocol import TokenizerFile

ATTENTION_IMPLEMENTATION = "headstart"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("none", "int8")
_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, its rope pinned, its parameters frozen."""

    model: PreTrainedModel
    config: PretrainedConfig
    layout: AttentionLayout
    kv_spec: KVCacheSpec
    fingerprint: str
    tokenizer_files: tuple[TokenizerFile, ...]
    eos_token_ids: tuple[int, ...]
    vocab_size: int  # rows of logits
    max_model_len: int  # tokens
    dtype: torch.dtype
    device: torch.device


def read_config(source: ModelSource) -> PretrainedConfig:
    """The model's configuration, by transformers' own classes only. Raises ModelLoadError."""
    try:
        with quiet_transformers():
            config: PretrainedConfig = AutoConfig.from_pretrained(
                str(source.folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a configuration class may raise anything on odd values
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                f"Model {source.spec} needs code from its own repository (auto_map), which is "
                "never run: only models that transformers defines are served"
            ) from error
        raise ModelLoadError(
            f"Cannot read the configuration of {source.spec}: {first_line(error)}"
        ) from error
    return config


def resolve_dtype(requested: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on the CPU, elsewhere the model's own half-precision type or bfloat16."""
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelLoadError(f"--dtype {requested} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if own in _HALF else torch.bfloat16


def load_model(
    source: ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    max_model_len: int | None = None,
    block_size: int = 32,
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
    progress: Progress = no_progress,
    attn_implementation: str = ATTENTION_IMPLEMENTATION,
) -> LoadedModel:
    """Load ``source`` for contexts of ``max_model_len`` tokens (None: the model's limit).

    ``dtype`` is "auto" or a key of DTYPES, ``kv_cache_dtype`` "auto" (as ``dtype``) or "int8",
    ``quantization`` "none" or "int8": what linear layers keep their weights in.
    The weights are held once. Raises ModelLoadError for a model that cannot be served, and for
    weights that are missing or do not fit it.
    """
    place = torch.device(device)
    config = read_config(source)
    length = resolve_max_model_len(config, max_model_len)
    layout = check_supported(config, length)
    compute_dtype = resolve_dtype(dtype, config, place)
    size = sum(file.stat().st_size for file in source.weight_files)
    progress(f"Loading {source.spec} ({format_bytes(size)}) as {_name(compute_dtype)} on {place}")
    model = _read_model(source, config, place, compute_dtype, attn_implementation)
    pin_rope(model, length)
    kv_spec = _kv_spec(layout, block_size, compute_dtype, kv_cache_dtype)
    _quantize(model, quantization)
    files = read_tokenizer_files(source.folder)
    return LoadedModel(
        model=model,
        config=model.config,
        layout=layout,
        kv_spec=kv_spec,
        fingerprint=_fingerprint(source, config, compute_dtype, length, kv_spec, quantization),
        tokenizer_files=files,
        eos_token_ids=find_eos_token_ids(config, files),
        vocab_size=_vocab_size(model),
        max_model_len=length,
        dtype=compute_dtype,
        device=place,
    )


def _kv_spec(
    layout: AttentionLayout, block_size: int, compute_dtype: torch.dtype, kv_cache_dtype: str
) -> KVCacheSpec:
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ModelLoadError(
            f"--kv-cache-dtype {kv_cache_dtype} is not one of {', '.join(KV_CACHE_DTYPES)}"
        )
    stored = torch.int8 if kv_cache_dtype == "int8" else compute_dtype
    return KVCacheSpec(
        block_size=block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=_name(stored),
        bytes_per_element=stored.itemsize,
    )


def _quantize(model: PreTrainedModel, quantization: str) -> None:
    if quantization not in QUANTIZATIONS:
        raise ModelLoadError(
            f"--quantization {quantization} is not one of {', '.join(QUANTIZATIONS)}"
        )
    if quantization == "int8" and quantize_linears(model) == 0:
        raise ModelLoadError("--quantization int8: this model has no linear layers of torch's kind")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the weights took before counts as free memory again


def _read_model(
    source: ModelSource,
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
) -> PreTrainedModel:
    model_class = causal_model_class(config)
    assert model_class is not None  # check_supported has seen to it
    placement: dict[str, Any] = {}
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        placement = {"device_map": {"": device}}  # straight to the device, tensor by tensor
    try:
        with quiet_transformers():
            loaded: Any = model_class.from_pretrained(
                str(source.folder),
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported, and then refused by _check_report
                local_files_only=True,
                output_loading_info=True,
                **placement,
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"Cannot load the weights of {source.spec}: {first_line(error)}"
        ) from error
    model, report = loaded
    _check_report(source, report)
    model.requires_grad_(False)
    model.to(device)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Transformers fills what a checkpoint lacks with random numbers; that is no model."""
    for kind, meaning in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "have the wrong shape for"),
        ("error_msgs", "could not be read:"),
    ):
        keys = report.get(kind) or ()
        found = sorted(str(key[0] if isinstance(key, tuple) else key) for key in keys)
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ModelLoadError(f"The weights of {source.spec} {meaning} {found[0]}{more}")


def _fingerprint(
    source: ModelSource,
    config: PretrainedConfig,
    dtype: torch.dtype,
    max_model_len: int,
    kv_spec: KVCacheSpec,
    quantization: str,
) -> str:
    return compute_fingerprint(
        FingerprintInputs(
            weight_digests=tuple(source.digest_cache().digests(source.digest_files)),
            config=canonical_config(config),
            compute_dtype=_name(dtype),
            quantization=INT8_CODING if quantization == "int8" else quantization,
            rope=longrope_choice(config, max_model_len),
            kv_dtype=kv_spec.coding,
            block_size=kv_spec.block_size,
            hash_version=HASH_VERSION,
        )
    )


def _vocab_size(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(head.weight.shape[0] if head is not None else model.config.vocab_size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
