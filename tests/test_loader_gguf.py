"""GGUF files: converted exactly and once, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_worker.loader import LoadedModel, ModelLoadError, load_model, resolve_model
from tests.models import (
    EOS_TOKEN_ID,
    TURN_END_TOKEN_ID,
    VOCAB_SIZE,
    build_model,
    build_tokenizer,
)

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEXT = "x  2024\n\n2. the world"


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    pre: str = "gpt-2",
    extra_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    **fields: Any,
) -> Path:
    """``model`` (a Llama) as llama.cpp's converter writes it; ``fields`` are of its name space."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, value in fields.items():
        key = f"llama.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    add_tokenizer(writer, pre)
    for name, tensor in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        writer.add_tensor(name, permuted(tensor, heads.get(name.split(".")[-2])))
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def permuted(tensor: torch.Tensor, num_heads: int | None) -> np.ndarray[Any, Any]:
    """llama.cpp keeps the two halves of each rotary pair side by side."""
    array = tensor.numpy()
    if num_heads is None:
        return array
    paired = array.reshape(num_heads, 2, -1, array.shape[-1]).swapaxes(1, 2)
    return np.ascontiguousarray(paired.reshape(array.shape))


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    model = json.loads(build_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token_id < 4 else 1 for token_id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_eot_token_id(TURN_END_TOKEN_ID)
    writer.add_chat_template(TEMPLATE)


def load(file: Path, cache: Path) -> LoadedModel:
    return load_model(resolve_model(str(file), cache), attn_implementation="sdpa")


def refusal(file: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(file, file.parent / "cache")
    assert "\n" not in str(caught.value)
    assert not list((file.parent / "cache").glob("converted/[!.]*"))
    return str(caught.value)


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (1, 50), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_converted_weights_are_exact(name: str, tmp_path: Path) -> None:
    model = build_model(name)
    if name == "llama-tied":
        model.lm_head = torch.nn.Identity()  # no output.weight in the file
    file = write_gguf(tmp_path / "tiny.gguf", model)

    loaded = load(file, tmp_path / "cache")

    with torch.no_grad():
        assert torch.equal(loaded.model(prompt()).logits, build_model(name)(prompt()).logits)
    assert loaded.eos_token_ids == (EOS_TOKEN_ID, TURN_END_TOKEN_ID)
    assert loaded.max_model_len == 2048


def test_converted_once_and_found_by_content(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"))
    lines: list[str] = []
    first = resolve_model(str(file), tmp_path / "cache", lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("Converting tiny.gguf to safetensors, once")

    copy = Path(shutil.copy(file, tmp_path / "other-name.gguf"))
    second = resolve_model(str(copy), tmp_path / "cache", lines.append)

    assert len(lines) == 1
    assert second.folder == first.folder
    assert second.digest_files == (copy,)
    modes = {path.stat().st_mode & 0o777 for path in first.folder.iterdir()}
    assert modes == {0o644}


def test_fingerprint_is_of_the_original_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"))
    one = load(file, tmp_path / "cache").fingerprint

    assert load(file, tmp_path / "another-cache").fingerprint == one
    changed = write_gguf(tmp_path / "changed.gguf", build_model("llama"), comment="other bytes")
    assert load(changed, tmp_path / "cache").fingerprint != one


def test_an_interrupted_conversion_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"))

    def interrupt(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("model_worker.loader.gguf_conversion._generation_config", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(str(file), tmp_path / "cache")
    converted = tmp_path / "cache" / "converted"
    assert [path.name for path in converted.iterdir() if path.is_dir()] == []

    # Nor one that was killed, whose files are still there under the other name.
    (converted / ".tmp-killed").mkdir()
    (converted / ".tmp-killed" / "config.json").write_text("{")
    assert load(file, tmp_path / "cache").vocab_size == VOCAB_SIZE


def test_no_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    assert "where 1.0 kB are free" in refusal(file)


@pytest.mark.parametrize("size", [0, 3, 30, 5_000, 100_000])
def test_truncated_files(size: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"))
    file.write_bytes(file.read_bytes()[:size])

    assert f"Cannot read {file}: the file is truncated or not GGUF" in refusal(file)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), pre="smollm")
    folder = resolve_model(str(file), tmp_path / "cache").folder

    tokenizer = AutoTokenizer.from_pretrained(str(folder))

    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert ids == build_tokenizer().encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [TURN_END_TOKEN_ID]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, EOS_TOKEN_ID)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 2048
    assert "local" not in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["x", "Ġ", "Ġ2024", "Ċ", "Ċ", "2", ".", "Ġthe", "Ġworld"]),
        ("smollm", ["x", "ĠĠ", "2", "0", "2", "4", "ĊĊ", "2", ".", "Ġthe", "Ġworld"]),
        ("llama-bpe", ["x", "Ġ", "Ġ", "202", "4", "ĊĊ", "2", ".", "Ġthe", "Ġworld"]),
        ("qwen2", ["x", "Ġ", "Ġ", "2", "0", "2", "4", "ĊĊ", "2", ".", "Ġthe", "Ġworld"]),
    ],
)
def test_text_is_split_by_the_files_own_rule(pre: str, pieces: list[str], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), pre=pre)
    folder = resolve_model(str(file), tmp_path / "cache").folder

    backend = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer

    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(TEXT)] == pieces
    assert backend.model.ignore_merges is (pre == "llama-bpe")


@pytest.mark.parametrize("pre", ["default", "deepseek-llm"])
def test_an_unknown_rule_is_refused(pre: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), pre=pre)

    assert f"splits text by the rule '{pre}', which is not known" in refusal(file)


def test_tensors_that_would_be_dropped_are_refused(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), extra_tensors=bias)

    assert "llama model: blk.0.attn_q.bias has no place in it" in refusal(file)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    model = build_model("llama")
    model.model.layers[2].mlp.up_proj = torch.nn.Identity()
    file = write_gguf(tmp_path / "tiny.gguf", model)

    assert "do not match a llama model: blk.2.ffn_up.weight is missing" in refusal(file)


def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = build_model("llama"), build_model("llama")
    scaled.config.rope_parameters = parameters
    scaled.config.max_position_embeddings = 131072
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled.config, torch.device("cpu"))
    factors = (plain.model.rotary_emb.inv_freq / inv_freq).numpy()
    assert factors.max() == pytest.approx(32.0)
    file = write_gguf(tmp_path / "tiny.gguf", scaled, extra_tensors={"rope_freqs.weight": factors})

    loaded = load(file, tmp_path / "cache")

    assert loaded.config.rope_parameters == parameters
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, inv_freq)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    file = write_gguf(
        tmp_path / "tiny.gguf", build_model("llama"), extra_tensors={"rope_freqs.weight": factors}
    )
    assert "scales its rope in a way that cannot be converted exactly" in refusal(file)


def test_yarn_and_linear_rope(tmp_path: Path) -> None:
    linear = write_gguf(
        tmp_path / "linear.gguf",
        build_model("llama"),
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
    )
    yarn = write_gguf(
        tmp_path / "yarn.gguf",
        build_model("llama"),
        rope__scaling__type="yarn",
        rope__scaling__factor=8.0,
        rope__scaling__original_context_length=256,
    )

    assert load(linear, tmp_path / "cache").config.rope_parameters == {
        "rope_type": "linear",
        "factor": 4.0,
        "rope_theta": 10000.0,
    }
    assert load(yarn, tmp_path / "cache").config.rope_parameters == {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"rope__scaling__type": "longrope"},
        {"rope__scaling__type": "linear"},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 8.0,
            "rope__scaling__original_context_length": 256,
            "rope__scaling__attn_factor": 2.0,
        },
    ],
)
def test_rope_scaling_without_an_exact_counterpart(fields: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), **fields)

    assert "scales its rope in a way that cannot be converted exactly" in refusal(file)


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(str(file), "oddity")
    add_tokenizer(writer, "gpt-2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    assert "oddity" in refusal(file)
