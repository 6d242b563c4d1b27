"""Loading safetensors folders: right weights, right numbers, pinned rope, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cache_store.block import KVCacheSpec
from model_worker.loader import LoadedModel, ModelLoadError, load_model, resolve_model
from model_worker.loader.load import resolve_dtype
from tests.models import (
    FAMILIES,
    LONGROPE_ORIGINAL_LEN,
    MAX_POSITION_EMBEDDINGS,
    VOCAB_SIZE,
    build_model,
    save_model,
)


def load(
    folder: Path,
    max_model_len: int | None = None,
    *,
    dtype: str = "auto",
    block_size: int = 16,
) -> LoadedModel:
    source = resolve_model(str(folder), folder.parent / "cache")
    return load_model(
        source,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        attn_implementation="sdpa",
    )


def prompt(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(4, VOCAB_SIZE, (1, num_tokens), generator=generator)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"phi3-longrope"}))
def test_logits_equal_those_of_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path / "model")

    loaded = load(folder)

    with torch.no_grad():
        expected = build_model(name)(prompt(40)).logits
        assert torch.equal(loaded.model(prompt(40)).logits, expected)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_what_is_known_of_a_loaded_model(tmp_path: Path) -> None:
    loaded = load(save_model("qwen3", tmp_path / "model"), 100)

    assert loaded.kv_spec == KVCacheSpec(
        block_size=16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=32,
        dtype="float32",
        bytes_per_element=4,
    )
    assert loaded.max_model_len == 100
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.dtype == torch.float32
    assert loaded.eos_token_ids == (1, 3)
    assert len(loaded.fingerprint) == 32


def test_dtype_as_asked_for(tmp_path: Path) -> None:
    loaded = load(save_model("llama", tmp_path / "model"), dtype="bfloat16")

    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert (loaded.kv_spec.dtype, loaded.kv_spec.bytes_per_element) == ("bfloat16", 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_as_int8_whatever_the_model_computes_in(dtype: str, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    source = resolve_model(str(folder), tmp_path / "cache")
    loaded = load_model(source, dtype=dtype, kv_cache_dtype="int8", attn_implementation="sdpa")

    assert {str(parameter.dtype) for parameter in loaded.model.parameters()} == {f"torch.{dtype}"}
    assert (loaded.kv_spec.dtype, loaded.kv_spec.bytes_per_element) == ("int8", 1)
    exact = load_model(source, dtype=dtype, attn_implementation="sdpa").kv_spec
    assert loaded.kv_spec.head_dim == exact.head_dim == 16
    assert (loaded.kv_spec.coding, exact.coding) == ("int8/float32", dtype)


def test_an_unknown_kv_type_is_refused(tmp_path: Path) -> None:
    source = resolve_model(str(save_model("llama", tmp_path / "model")), tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="--kv-cache-dtype fp4 is not one of auto, int8"):
        load_model(source, kv_cache_dtype="fp4", attn_implementation="sdpa")


@pytest.mark.parametrize(
    ("own", "device", "expected"),
    [
        (torch.bfloat16, "cpu", torch.float32),
        (torch.bfloat16, "cuda", torch.bfloat16),
        (torch.float16, "cuda", torch.float16),
        (torch.float32, "cuda", torch.bfloat16),
        (None, "cuda", torch.bfloat16),
    ],
)
def test_automatic_dtype(own: torch.dtype | None, device: str, expected: torch.dtype) -> None:
    config = PretrainedConfig(dtype=own)

    assert resolve_dtype("auto", config, torch.device(device)) == expected


def test_tied_head_shares_its_weights(tmp_path: Path) -> None:
    loaded = load(save_model("llama-tied", tmp_path / "model"))

    model = loaded.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    whole = load(save_model("llama", tmp_path / "whole"))
    folder = save_model("llama", tmp_path / "shards", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2

    shards = load(folder)

    assert torch.equal(whole.model(prompt(9)).logits, shards.model(prompt(9)).logits)


@pytest.mark.parametrize(
    ("max_model_len", "factors"),
    [(LONGROPE_ORIGINAL_LEN, "short_factor"), (LONGROPE_ORIGINAL_LEN + 1, "long_factor")],
)
@pytest.mark.parametrize("num_tokens", [20, LONGROPE_ORIGINAL_LEN])
def test_longrope_is_pinned_once(
    max_model_len: int, factors: str, num_tokens: int, tmp_path: Path
) -> None:
    loaded = load(save_model("phi3-longrope", tmp_path / "model"), max_model_len)

    reference = build_model("phi3-longrope")
    parameters = reference.config.rope_parameters
    # With both sets alike, the reference has nothing to switch between.
    parameters["short_factor"] = parameters["long_factor"] = parameters[factors]
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](reference.config, torch.device("cpu"))
    rotary = reference.model.rotary_emb
    rotary.inv_freq.copy_(inv_freq)
    rotary.original_inv_freq.copy_(inv_freq)
    rotary.attention_scaling = scaling
    with torch.no_grad():
        expected = reference(prompt(num_tokens)).logits
        assert torch.equal(loaded.model(prompt(num_tokens)).logits, expected)


def test_pinned_longrope_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    folder = save_model("phi3-longrope", tmp_path / "model")
    ids, later = prompt(8), prompt(LONGROPE_ORIGINAL_LEN + 40)
    pinned, unpinned = load(folder).model, build_model("phi3-longrope")

    with torch.no_grad():
        before = pinned(ids).logits
        pinned(later)
        assert torch.equal(pinned(ids).logits, before)
        # Without the pin the first 8 tokens get other keys once the sequence is long.
        assert not torch.allclose(unpinned(later).logits[:, :8], unpinned(later[:, :8]).logits)
        assert torch.allclose(pinned(later).logits[:, :8], pinned(later[:, :8]).logits, atol=1e-4)


def test_longrope_over_its_limit_is_refused(tmp_path: Path) -> None:
    folder = save_model("phi3-longrope", tmp_path / "model")

    with pytest.raises(ModelLoadError, match=f"limit of {MAX_POSITION_EMBEDDINGS} tokens"):
        load(folder, MAX_POSITION_EMBEDDINGS + 1)


def test_truncated_weights(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    assert f"Cannot read the weights {weights}: the file is truncated" in refusal(folder)


def test_weights_that_are_not_safetensors(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not a header at all")

    assert "not safetensors" in refusal(folder)


def test_missing_weights_are_not_filled_with_random_numbers(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    assert refusal(folder).endswith("lack model.layers.1.self_attn.k_proj.weight")


def test_weights_of_another_shape(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 100
    (folder / "config.json").write_text(json.dumps(config))

    assert refusal(folder).endswith(
        "have the wrong shape for model.layers.0.mlp.down_proj.weight and 8 more"
    )


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model", max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()

    assert f"names {shard.name}, which is missing" in refusal(folder)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model", max_shard_size="100KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))

    assert "outside its folder" in refusal(folder)


def test_code_from_a_repository_is_never_run(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "newest_thing",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('code was run')")

    assert "code from its own repository (auto_map), which is never run" in refusal(folder)


def test_auto_map_of_a_model_that_transformers_defines_is_ignored(tmp_path: Path) -> None:
    folder = save_model("phi3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('code was run')")

    assert type(load(folder).model).__name__ == "Phi3ForCausalLM"


def test_an_unknown_model_type(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "newest_thing"
    (folder / "config.json").write_text(json.dumps(config))

    assert "newest_thing" in refusal(folder)
