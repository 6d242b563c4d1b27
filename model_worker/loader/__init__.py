"""Model loading: from what --model names to a model that can be served, or a clear refusal.

Owns sources, conversion, support checks, fingerprints and tokenizer files. Knows nothing of
scheduling, caching or links.
"""

from model_worker.loader.attention_layout import AttentionLayout
from model_worker.loader.errors import ModelLoadError
from model_worker.loader.load import ATTENTION_IMPLEMENTATION, LoadedModel, load_model
from model_worker.loader.progress import Progress, no_progress
from model_worker.loader.source import ModelSource, resolve_model
from model_worker.loader.support import check_supported, model_limit, resolve_max_model_len

__all__ = [
    "ATTENTION_IMPLEMENTATION",
    "AttentionLayout",
    "LoadedModel",
    "ModelLoadError",
    "ModelSource",
    "Progress",
    "check_supported",
    "load_model",
    "model_limit",
    "no_progress",
    "resolve_max_model_len",
    "resolve_model",
]
