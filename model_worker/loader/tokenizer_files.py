"""The files a gateway needs to tokenize for a model, and the ids that end an answer.

Owns which files these are and that they suffice on their own: from them alone
``AutoTokenizer.from_pretrained(folder)`` gives the same ids as from the model's folder, without
torch. Knows nothing of weights, and nothing of how the files travel.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig

from model_worker.loader.errors import ModelLoadError, first_line
from model_worker.loader.progress import quiet_transformers
from model_worker.protocol import TokenizerFile

# config.json is among them because transformers chooses the tokenizer's class by it.
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def read_tokenizer_files(folder: Path) -> tuple[TokenizerFile, ...]:
    """The files of FILE_NAMES that ``folder`` has; a missing tokenizer.json is made first.

    Raises ModelLoadError if the folder has no usable tokenizer.
    """
    if (folder / "tokenizer.json").is_file():
        contents = _contents(folder, FILE_NAMES)
    else:
        contents = _contents(folder, ("generation_config.json", "config.json"))
        contents |= _converted_tokenizer(folder)
    return tuple(
        TokenizerFile(name=name, content=content, sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    )


def find_eos_token_ids(config: PretrainedConfig, files: Sequence[TokenizerFile]) -> tuple[int, ...]:
    """Every id that ends an answer, in rising order: of the generation defaults, the model, and
    the tokenizer (chat models often name their end of turn in one of these places only)."""
    contents = {file.name: file.content for file in files}
    ids = {
        *_as_ids(_json(contents, "generation_config.json").get("eos_token_id")),
        *_as_ids(getattr(config, "eos_token_id", None)),
    }
    token = _json(contents, "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        tokenizer = Tokenizer.from_buffer(contents["tokenizer.json"])
        found = tokenizer.token_to_id(token)
        if found is not None:
            ids.add(found)
    return tuple(sorted(ids))


def _contents(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _converted_tokenizer(folder: Path) -> dict[str, bytes]:
    """Older formats (vocabulary and merges, SentencePiece) in the one a gateway reads."""
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory() as target:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(target)
            contents = _contents(Path(target), FILE_NAMES)
    except Exception as error:  # tokenizer code raises what it likes; all of it means "unusable"
        raise ModelLoadError(f"{folder} has no usable tokenizer: {first_line(error)}") from error
    if "tokenizer.json" not in contents:
        raise ModelLoadError(f"{folder} has no tokenizer.json, and none could be made from it")
    return contents


def _json(contents: dict[str, bytes], name: str) -> dict[str, Any]:
    if name not in contents:
        return {}
    try:
        value = json.loads(contents[name])
    except ValueError as error:
        raise ModelLoadError(f"The model's {name} is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"The model's {name} is not a JSON object")
    return value


def _as_ids(value: object) -> list[int]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
    return []
