"""The fingerprint of a model as served: equal only if its keys and values are.

Owns what goes into it. It is computed from content alone, never from paths, names or hosts, so
that workers on different machines agree; every block's namespace starts with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

# Configuration fields that cannot change what the model computes.
_IRRELEVANT = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_model_name_or_path",
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class FingerprintInputs:
    """All that decides the value of a stored block; see each field.

    ``weight_digests`` are those of the files in name order (for GGUF, of the original file);
    ``rope`` is "fixed", or which factors longrope was pinned to; ``kv_dtype`` is how stored
    numbers are coded, scales included.
    """

    weight_digests: tuple[str, ...]
    config: dict[str, Any]
    compute_dtype: str
    quantization: str
    rope: str
    kv_dtype: str
    block_size: int
    hash_version: str


def canonical_config(config: PretrainedConfig) -> dict[str, Any]:
    """The part of ``config`` that decides what the model computes, as plain JSON values."""
    fields = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _IRRELEVANT}


def compute_fingerprint(inputs: FingerprintInputs) -> str:
    """32 hexadecimal digits; different if any one field of ``inputs`` is."""
    fields: Sequence[object] = (
        list(inputs.weight_digests),
        inputs.config,
        inputs.compute_dtype,
        inputs.quantization,
        inputs.rope,
        inputs.kv_dtype,
        inputs.block_size,
        inputs.hash_version,
    )
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]
