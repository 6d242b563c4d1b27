"""Fetching a model from the Hugging Face hub: the files we read, and no others.

Owns the selection (no pickles, no code, no second copies of the weights) and the report of
sizes and advance. Authentication, retries, the local cache and offline use are huggingface_hub's.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.progress import Progress, format_bytes

ALLOW_PATTERNS = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)
# Sub-folders hold other formats, and consolidated.* repeats the weights in another layout.
IGNORE_PATTERNS = ("*/*", "consolidated*")
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_REPORT_INTERVAL_S = 2.0


def is_hub_id(spec: str) -> bool:
    """Whether ``spec`` has the form owner/name, with an optional @revision."""
    name, _, _ = spec.partition("@")
    return _HUB_NAME.fullmatch(name) is not None and ".." not in name and "--" not in name


def download_model(
    hub_id: str, cache_dir: Path | None, progress: Progress, endpoint: str | None = None
) -> Path:
    """The local folder of ``hub_id`` (owner/name or owner/name@revision), fetched if need be.

    ``cache_dir`` and ``endpoint`` None are huggingface_hub's own. Without a connection the files
    of an earlier download serve. Raises ModelLoadError with the reason.
    """
    name, _, revision = hub_id.partition("@")
    fetch = partial(
        snapshot_download,
        name,
        revision=revision or None,
        cache_dir=cache_dir,
        endpoint=endpoint,
        allow_patterns=list(ALLOW_PATTERNS),
        ignore_patterns=list(IGNORE_PATTERNS),
    )
    try:
        meter = _Meter(hub_id, _announce(hub_id, fetch, progress), progress)
        return Path(fetch(tqdm_class=meter.bar_class()))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"Model {hub_id} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelLoadError(
            f"Unknown model {hub_id!r}: neither a folder here nor a model on the hub that can be "
            "read (a private one needs HF_TOKEN)"
        ) from error
    except Exception as error:  # the HTTP client's errors differ between versions of the library
        raise ModelLoadError(f"Cannot fetch model {hub_id}: {first_line(error)}") from error


def _announce(hub_id: str, fetch: Callable[..., Any], progress: Progress) -> int:
    """Say what is to be downloaded, before it is; returns bytes, 0 if the hub is out of reach."""
    try:
        plan = fetch(dry_run=True, tqdm_class=_Bar)
    except DryRunError:
        return 0
    missing = [file for file in plan if file.will_download]
    num_bytes = sum(file.file_size or 0 for file in missing)
    if missing:
        progress(f"Downloading {hub_id}: {len(missing)} files, {format_bytes(num_bytes)}")
    return num_bytes


class _Bar(tqdm):  # type: ignore[misc]
    """A bar that shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # an argument of huggingface_hub's own bars only
        self.is_bytes = kwargs.get("unit") == "B"
        super().__init__(*args, **{**kwargs, "disable": True})


class _Meter:
    """Follows a download and reports it now and then. Its bars are updated by several threads."""

    def __init__(self, hub_id: str, total: int, progress: Progress) -> None:
        self._hub_id = hub_id
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        # Bytes received and bytes written are counted by a bar each; the one ahead is the truth.
        self._done: dict[int, float] = {}
        self._reported_at = time.monotonic()

    def add(self, bar: int, num_bytes: float) -> None:
        with self._lock:
            self._done[bar] = self._done.get(bar, 0.0) + num_bytes
            now = time.monotonic()
            if now - self._reported_at < _REPORT_INTERVAL_S:
                return
            self._reported_at = now
            done = min(max(self._done.values()), self._total)
        self._progress(
            f"Downloading {self._hub_id}: {format_bytes(done)} of {format_bytes(self._total)}"
        )

    def bar_class(self) -> type[_Bar]:
        meter = self

        class Bar(_Bar):
            def update(self, n: float | None = 1) -> bool | None:
                if self.is_bytes:
                    meter.add(id(self), n or 0)
                return None

        return Bar
