"""`headstart plan`: weights and KV by formula, held to the models and to published figures."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cache_store.tiers.disk_format import DiskFormat
from cache_store.tiers.disk_store import DiskStore
from model_worker.loader.attention_layout import probe_attention
from model_worker.protocol import EXIT_CONFIG
from service.config import ConfigError
from service.planning.estimate import Plan, Wanted, make_plan, spec_of
from service.planning.shape import FAMILIES, ModelShape, shape_of
from service.planning.sources import model_shape
from tests.cli_kit import Command, command_line
from tests.docs_kit import example

GIB = 2**30
TINY = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "gemma": {"head_dim": 16},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
}


def wanted(**fields: Any) -> Wanted:
    known: dict[str, Any] = {
        "gpu_memory": 80 * 10**9,
        "gpu_memory_utilization": 0.9,
        "host_memory": 0,
        "disk": 0,
        "context": 16_384,
        "concurrency": 64,
        "shared_prefix": 0,
        "block_size": 32,
        "dtype": "bfloat16",
        "kv_cache_dtypes": ("auto", "int8"),
        "bandwidth": None,
        "flops": None,
    }
    return Wanted(**(known | fields))


def plan_of(name: str, **fields: Any) -> Plan:
    asked = wanted(**fields)
    return make_plan(model_shape(name, asked.context), asked)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`headstart plan` in this process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return command_line(monkeypatch, capsys, "plan", columns=120)


# ---------------------------------------------------------------- the formulas


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_kv_are_those_of_the_model_itself(family: str) -> None:
    config = AutoConfig.for_model(family, **TINY, **OTHERS.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of("tiny", config, 128)
    assert shape.num_weights == sum(weight.numel() for weight in model.parameters())
    layout = probe_attention(config)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
        layout.num_layers,
        layout.num_heads,
        layout.num_kv_heads,
        layout.head_dim,
    )


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        # The makers' own counts, and 2 x layers x KV heads x head dimension x 2.
        ("Llama-3.2-1B", 1.24, 32_768),
        ("Llama-3.2-3B", 3.21, 114_688),
        ("Llama-3.1-8B", 8.03, 131_072),
        ("Llama-3.1-70B", 70.55, 327_680),
        ("Llama-3.1-405B", 405.85, 516_096),
        ("Mistral-7B-v0.3", 7.25, 131_072),
        ("Mixtral-8x7B", 46.70, 131_072),
        ("Qwen3-8B", 8.19, 147_456),
        ("Qwen3-32B", 32.76, 262_144),
        ("Qwen3-30B-A3B", 30.53, 98_304),
        ("demo", 0.13, 46_080),
    ],
)
def test_known_models_have_their_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    shape = model_shape(name, 8_192)
    assert round(shape.num_weights / 1e9, 2) == billions
    assert spec_of(shape, wanted(dtype=shape.dtype), "auto").bytes_per_token == kv_bytes


def test_active_weights_are_what_the_name_says() -> None:
    assert round(model_shape("Qwen3-30B-A3B", 4_096).num_active_weights / 1e9, 1) == 2.7
    assert round(model_shape("Mixtral-8x7B", 4_096).num_active_weights / 1e9, 1) == 12.6


def test_the_published_figures_of_llama_70b() -> None:
    for context, gigabytes in ((2_500, 0.8), (131_072, 42.9)):
        row, in_8_bits = plan_of("Llama-3.1-70B", context=context).kv
        assert row.bytes_per_token == 327_680
        assert round(row.bytes_per_conversation / 1e9, 1) == gigabytes
        assert in_8_bits.bytes_per_token == 168_960
    assert plan_of("Llama-3.1-70B").weights_bytes == 141_107_412_992


def test_conversations_that_fit_by_hand() -> None:
    plan = plan_of("Llama-3.1-8B", host_memory=100 * GIB, disk=1000 * GIB)
    assert plan.pool_bytes == 72 * 10**9 - plan.weights_bytes
    row = plan.kv[0]
    per = 16_384 * 131_072
    assert row.bytes_per_conversation == per == 2 * GIB
    assert [room.tier for room in row.tiers] == ["device", "host", "disk"]
    assert row.tiers[0].num_conversations == plan.pool_bytes // per == 26
    assert row.tiers[1].num_conversations == 50
    assert 490 < row.tiers[2].num_conversations < 500  # records are whole pages
    assert not row.holds_concurrency
    assert plan_of("Llama-3.1-8B", concurrency=26).kv[0].holds_concurrency


def test_a_shared_prefix_is_kept_once() -> None:
    plan = plan_of("Llama-3.1-8B", shared_prefix=8_200)  # 256 whole blocks and a bit
    blocks = plan.pool_bytes // (32 * 131_072)
    assert plan.kv[0].tiers[0].num_conversations == (blocks - 256) // (512 - 256)


def test_what_fits_on_disk_is_what_the_store_finds_room_for(tmp_path: Path) -> None:
    asked = wanted(disk=100 * GIB)
    shape = model_shape("Llama-3.1-8B", 16_384)
    spec = spec_of(shape, asked, "auto")
    form = DiskFormat("m", "1", 32, spec.bytes_per_block, "exact")
    store = DiskStore(tmp_path, form, 100 * GIB)
    room = make_plan(shape, asked).kv[0].tiers[-1]
    assert room.tier == "disk"
    assert room.num_tokens == pytest.approx(store.num_slots * 32, rel=0.01)
    store.close()


def test_floors_by_hand() -> None:
    shape = ModelShape(
        name="m",
        model_type="llama",
        dtype="bfloat16",
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=None,
        num_weights=1_100,
        num_dense_weights=1_000,
        num_head_weights=100,
    )
    asked = wanted(context=400, concurrency=3, shared_prefix=64, bandwidth=1e6, flops=1e9)
    plan = make_plan(shape, asked)
    per_token = 2 * 2 * 2 * 8 * 2
    row = plan.kv[0]
    assert row.decode_floor_one_s == (1_100 * 2 + 400 * per_token) / 1e6
    assert row.decode_floor_all_s == (1_100 * 2 + (64 + 3 * 336) * per_token) / 1e6
    assert [item.num_cached for item in plan.prefill] == [0, 64, 144]
    pairs = sum(range(65, 401))
    flops = 2 * 1_000 * 336 + 2 * 100 + 4 * 2 * 4 * 8 * pairs
    assert (plan.prefill[1].flops, plan.prefill[1].floor_s) == (flops, flops / 1e9)


def test_experts_are_read_as_far_as_a_batch_needs_them() -> None:
    shape = model_shape("Mixtral-8x7B", 4_096)
    one = wanted(context=32, concurrency=1, bandwidth=1.0)
    row = make_plan(shape, one).kv[0]
    read = shape.num_active_weights + shape.num_head_weights
    assert row.decode_floor_one_s == pytest.approx(read * 2 + 32 * 131_072)
    many = make_plan(shape, msgspec.structs.replace(one, concurrency=200)).kv[0]
    assert many.decode_floor_all_s == pytest.approx(
        (shape.num_weights - shape.num_head_weights) * 2 + 200 * 32 * 131_072, rel=1e-3
    )


# ---------------------------------------------------------------- where a model comes from


def save(folder: Path, **fields: Any) -> Path:
    config = {"model_type": "llama", **TINY, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_and_its_file_are_the_same(tmp_path: Path) -> None:
    folder = save(tmp_path, torch_dtype="float16")
    shape = model_shape(str(folder), 128)
    assert shape.dtype == "float16"
    assert msgspec.structs.asdict(plan_of(str(folder), context=128)) | {"model": ""} == (
        msgspec.structs.asdict(plan_of(str(folder / "config.json"), context=128)) | {"model": ""}
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_says_the_same_as_its_configuration(tmp_path: Path, *, is_tied: bool) -> None:
    config = AutoConfig.for_model("llama", **TINY, tie_word_embeddings=is_tied)
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(256)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding = model.get_input_embeddings().weight.numel()
    rest = sum(weight.numel() for weight in model.parameters()) - embedding * (2 - is_tied)
    writer.add_tensor("token_embd.weight", np.zeros((120, 32), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", np.zeros(4, dtype=np.float32))
    writer.add_tensor("all_others", np.zeros(rest, dtype=np.float32))
    if not is_tied:
        writer.add_tensor("output.weight", np.zeros((120, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read, known = model_shape(str(file), 128), shape_of(str(file), config, 128)
    assert dataclasses.replace(read, dtype=known.dtype) == known
    (tmp_path / "torn.gguf").write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"torn\.gguf is truncated or not GGUF"):
        model_shape(str(tmp_path / "torn.gguf"), 128)


# ---------------------------------------------------------------- the command


def test_the_guides_example_is_what_it_prints(command: Command) -> None:
    words = shlex.split(example("sizing.md", "sh").replace("\\\n", " "))
    code, out, _ = command(*words[2:])
    assert (code, words[:2]) == (0, ["headstart", "plan"])
    printed = example("sizing.md", "text")
    assert [line.rstrip() for line in out.splitlines()] == printed.splitlines()


def test_json_and_a_picture(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, out, _ = command(
        "llama-3.1-8b", "--gpu", "h100", "--context", "16k", "--concurrency", 8,
        "--host-memory", "64GiB", "--kv-cache-dtype", "int8", "--flops", "1P", "--json",
        "--plot", picture,
    )  # fmt: skip
    assert code == 0
    made = json.loads(out)
    assert made["wanted"]["bandwidth"] == 3.35e12
    assert made["wanted"]["flops"] == 1e15
    assert (made["wanted"]["context"], made["wanted"]["gpu_memory"]) == (16_384, 80 * 10**9)
    (row,) = made["kv"]
    assert (row["kv_cache_dtype"], row["bytes_per_token"]) == ("int8", 67_584)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_weights_that_do_not_fit_are_said(command: Command) -> None:
    code, out, _ = command("Llama-3.1-70B", "--gpu-memory", "80GB")
    assert code == 0
    assert "The weights alone do not fit: they need a device of 146 GiB or more" in out
    assert "Floors of time need --gpu, or --bandwidth and --flops." in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo"], "give --gpu-memory, or --gpu with a device that is known by name"),
        (["demo", "--gpu", "TPU"], "--gpu: expected one of A10, A100-40GB"),
        (["demo", "--gpu-memory", "80"], "MODEL: demo: --context 16384 is over the model's limit"),
        (["demo", "--gpu-memory", "much"], "--gpu-memory: expected a size such as 512MB"),
        (["demo", "--gpu", "L4", "--context", "k"], "--context: expected a number of tokens such"),
        (
            ["demo", "--gpu", "L4", "--context", "0"],
            "--context: must be from 1 to 2147483647, got 0",
        ),
        (
            ["demo", "--gpu", "L4", "--context", "1k", "--shared-prefix", "1k"],
            "--shared-prefix: must be less than --context 1024, got 1024",
        ),
        (["demo", "--gpu", "L4", "--concurrency", "0"], "--concurrency: must be at least 1, got 0"),
        (["demo", "--gpu", "L4", "--bandwidth", "x"], "--bandwidth: expected a rate such as 3.3TB"),
        (["demo", "--gpu", "L4", "--dtype", "int4"], "--dtype: expected one of auto, float32"),
        (["demo", "--gpu", "L4", "--plot", "x.pdf"], "--plot: the file's name must end in .png"),
        (["/nowhere.gguf", "--gpu", "L4"], "MODEL: cannot read /nowhere.gguf: No such file"),
        (["/nowhere.json", "--gpu", "L4"], "MODEL: cannot read /nowhere.json: No such file"),
        (["no/such", "--gpu", "L4"], "MODEL: 'no/such' is no folder, config.json, .gguf file"),
    ],
)
def test_mistakes_get_one_line(command: Command, arguments: list[str], message: str) -> None:
    if "--context" not in arguments and "limit" in message:
        arguments = [*arguments, "--context", "16k"]
    code, out, err = command(*arguments)
    assert (code, out) == (EXIT_CONFIG, "")
    assert err.startswith(f"headstart: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "deepseek_v3 keeps one compressed vector of 576 numbers per token and layer",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            "its sliding window of 64 tokens is shorter than --context 128: it is served with "
            "--context 64 or less",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64,
             "max_window_layers": 0},
            "its sliding window of 64 tokens is shorter than --context 128",
        ),
        ({"model_type": "gemma2"}, "gemma2 uses attention soft-capping, and is not served"),
        ({"model_type": "qwen3_next"}, "some layers of qwen3_next keep a state that is not keys"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder; only decoders are served"),
        ({"model_type": "starcoder2"}, "the weights of a starcoder2 model cannot be counted"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(
    command: Command, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = save(tmp_path, **fields)
    code, out, err = command(folder, "--gpu", "L4", "--context", 128)
    assert (code, out) == (EXIT_CONFIG, "")
    assert err.startswith(f"headstart: MODEL: {folder}: {message}")


def test_windows_that_do_not_slide_or_are_long_enough_are_served(tmp_path: Path) -> None:
    for fields in (
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": 128},
    ):
        assert model_shape(str(save(tmp_path, **fields)), 128).num_layers == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is no JSON object"),
        ("{}", "the configuration has no model_type"),
        ('{"model_type": "no-such"}', "MODEL: "),
    ],
)
def test_what_is_no_configuration_is_refused(
    command: Command, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = command(tmp_path, "--gpu", "L4")
    assert code == EXIT_CONFIG
    assert message in err
    assert err.count("\n") == 1
