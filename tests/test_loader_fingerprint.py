"""The fingerprint: equal for equal content wherever it lies, different for each part of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model_worker.loader import load_model, resolve_model
from model_worker.loader.digests import DigestCache
from model_worker.loader.fingerprint import FingerprintInputs, canonical_config, compute_fingerprint
from tests.models import FAMILIES, save_model

INPUTS = FingerprintInputs(
    weight_digests=("aa", "bb"),
    config={"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.0}},
    compute_dtype="bfloat16",
    quantization="none",
    rope="fixed",
    kv_dtype="bfloat16",
    block_size=16,
    hash_version="1",
)
# Changes only together with what goes in: every stored block would be lost.
KNOWN = "c9722efabd48a11c4f53e1cd6b3fd28f"


def fingerprint(folder: Path, **options: Any) -> str:
    source = resolve_model(str(folder), folder.parent / "cache")
    return load_model(source, attn_implementation="sdpa", **options).fingerprint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_digests", ("aa", "bc")),
        ("weight_digests", ("bb", "aa")),
        ("weight_digests", ("aabb",)),
        ("config", {"hidden_size": 64, "rope_parameters": {"rope_theta": 10000.5}}),
        ("compute_dtype", "float16"),
        ("quantization", "int8"),
        ("rope", "long"),
        ("kv_dtype", "int8"),
        ("block_size", 32),
        ("hash_version", "2"),
    ],
)
def test_each_input_counts(field: str, value: object) -> None:
    changed = dataclasses.replace(INPUTS, **{field: value})  # type: ignore[arg-type]

    assert compute_fingerprint(changed) != compute_fingerprint(INPUTS)


def test_known_value() -> None:
    assert compute_fingerprint(INPUTS) == KNOWN


def test_order_of_configuration_fields_does_not_count() -> None:
    reordered = dict(reversed(INPUTS.config.items()))

    assert compute_fingerprint(dataclasses.replace(INPUTS, config=reordered)) == KNOWN


def test_names_and_versions_are_not_part_of_the_configuration() -> None:
    one, other = FAMILIES["llama"].config(), FAMILIES["llama"].config()
    other.name_or_path = "/elsewhere"
    other.transformers_version = "4.0.0"
    other.eos_token_id = [1, 3]
    other._attn_implementation = "eager"
    assert canonical_config(one) == canonical_config(other)

    other.rms_norm_eps = 1e-5
    assert canonical_config(one) != canonical_config(other)


def test_a_copy_elsewhere_has_the_same(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "one" / "model")
    copy = tmp_path / "other" / "named-differently"
    shutil.copytree(folder, copy)

    assert fingerprint(folder) == fingerprint(copy)


def test_differs_by_what_the_model_is_served_with(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    served = [
        fingerprint(folder),
        fingerprint(folder, dtype="bfloat16"),
        fingerprint(folder, block_size=16),
        fingerprint(folder, kv_cache_dtype="int8"),
        fingerprint(folder, dtype="bfloat16", kv_cache_dtype="int8"),
    ]

    assert len(set(served)) == 5
    assert fingerprint(folder, max_model_len=64) == served[0]


def test_differs_by_the_pinned_rope(tmp_path: Path) -> None:
    folder = save_model("phi3-longrope", tmp_path / "model")

    assert fingerprint(folder, max_model_len=64) != fingerprint(folder, max_model_len=65)
    assert fingerprint(folder, max_model_len=65) == fingerprint(folder)


def test_differs_by_one_weight(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][5] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    assert fingerprint(folder) != before


def test_digests_are_remembered_by_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 100)
    status = file.stat()
    cache = DigestCache(tmp_path / "cache" / "digests.json")
    (first,) = cache.digests([file])

    file.write_bytes(b"b" * 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.digests([file]) == [first]  # the file was not read again

    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert cache.digests([file]) != [first]


def test_digests_depend_on_content_and_not_on_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_worker.loader.digests.CHUNK_BYTES", 1000)
    monkeypatch.setattr("model_worker.loader.digests.READ_BYTES", 300)
    contents = [b"x" * 2500, b"x" * 2499, b"x" * 2400 + b"y" * 100, b""]
    files = []
    for number, content in enumerate(contents):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(content)

    digests = DigestCache(tmp_path / "digests.json").digests(files)

    assert len(set(digests)) == 4
    copy = tmp_path / "copy"
    copy.write_bytes(contents[0])
    assert DigestCache(tmp_path / "other.json").digests([copy]) == digests[:1]


def test_a_broken_digest_file_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    memory = tmp_path / "digests.json"
    (expected,) = DigestCache(memory).digests([file])
    for broken in ("", "[1, 2]", '{"x": 3}', "{"):
        memory.write_text(broken)
        assert DigestCache(memory).digests([file]) == [expected]
