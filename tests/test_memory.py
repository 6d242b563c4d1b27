"""Free memory as host and control groups tell it, and the bill for a KV pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.block import KVCacheSpec
from model_worker.loader import ModelLoadError
from model_worker.memory import free_host_memory, plan_memory

GIB = 1024**3
LLAMA_70B = KVCacheSpec(
    block_size=16,
    num_layers=80,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    bytes_per_element=2,
)


def system(root: Path, available: int, groups: str = "", **files: str) -> Path:
    """A fake /proc and /sys; ``files`` are named by path with __ for / and no dots needed."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for name, content in files.items():
        path = root / "sys" / "fs" / "cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_host_alone(tmp_path: Path) -> None:
    assert free_host_memory(system(tmp_path, 8 * GIB)) == 8 * GIB


def test_version_2_limit(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        8 * GIB,
        "0::/box\n",
        **{
            "box__memory.max": f"{4 * GIB}\n",
            "box__memory.current": f"{3 * GIB}\n",
            "box__memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 9\n",
        },
    )
    assert free_host_memory(root) == 4 * GIB - 3 * GIB + GIB // 2


def test_version_2_limit_of_a_parent(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        8 * GIB,
        "0::/slice/box\n",
        **{
            "slice__box__memory.max": "max\n",
            "slice__box__memory.current": "1000\n",
            "slice__memory.max": f"{2 * GIB}\n",
            "slice__memory.current": "1000\n",
        },
    )
    assert free_host_memory(root) == 2 * GIB - 1000


def test_version_2_inside_a_container_that_sees_itself_as_root(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        8 * GIB,
        "0::/../outer/box\n",
        **{"memory.max": f"{GIB}\n", "memory.current": "24\n"},
    )
    assert free_host_memory(root) == GIB - 24


def test_version_1_limit(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        8 * GIB,
        "5:cpu,cpuacct:/x\n4:memory:/box\n",
        **{
            "memory__box__memory.limit_in_bytes": f"{3 * GIB}\n",
            "memory__box__memory.usage_in_bytes": f"{GIB}\n",
            "memory__memory.limit_in_bytes": "9223372036854771712\n",
            "memory__memory.usage_in_bytes": f"{7 * GIB}\n",
        },
    )
    assert free_host_memory(root) == 2 * GIB


def test_the_host_counts_if_it_has_less_than_the_limit(tmp_path: Path) -> None:
    root = system(
        tmp_path, GIB, "0::/\n", **{"memory.max": f"{4 * GIB}\n", "memory.current": "0\n"}
    )
    assert free_host_memory(root) == GIB


def test_never_negative(tmp_path: Path) -> None:
    root = system(tmp_path, GIB, "0::/\n", **{"memory.max": "1000\n", "memory.current": "2000\n"})
    assert free_host_memory(root) == 0


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="--kv-cache-memory"):
        free_host_memory(tmp_path)


def test_this_machine_has_some() -> None:
    assert free_host_memory() > 0


def test_bill() -> None:
    bill = plan_memory(LLAMA_70B, 40 * GIB, 8192, free_bytes=45 * GIB)

    assert bill.kv_bytes_per_token == 327_680
    assert bill.num_blocks == 8192
    assert bill.num_tokens == 131_072
    assert bill.pool_bytes == 40 * GIB
    assert bill.num_conversations == 16
    assert bill.lines(LLAMA_70B) == (
        "KV per token: 2 x 80 layers x 8 kv heads x 128 x 2 B (bfloat16) = 327,680 B",
        "KV pool: 8,192 blocks of 16 tokens = 131,072 tokens, 40.00 GiB of 45.00 GiB free",
        "Room for 16 conversations of 8,192 tokens",
    )


def test_bill_of_int8_names_the_scales() -> None:
    spec = replace(LLAMA_70B, dtype="int8", bytes_per_element=1)
    bill = plan_memory(spec, 40 * GIB, 8192)

    assert bill.kv_bytes_per_token == 168_960
    assert bill.num_conversations == 31
    assert bill.lines(spec)[0] == (
        "KV per token: 2 x 80 layers x 8 kv heads x (128 x 1 B (int8) + 4 B scale) = 168,960 B"
    )


def test_conversations_take_whole_blocks() -> None:
    bill = plan_memory(LLAMA_70B, 4 * LLAMA_70B.bytes_per_block, 17)

    assert (bill.num_blocks, bill.num_conversations) == (4, 2)


def test_no_memory_for_one_block() -> None:
    with pytest.raises(ModelLoadError) as caught:
        plan_memory(LLAMA_70B, LLAMA_70B.bytes_per_block - 1, 16)
    assert str(caught.value) == (
        "There is no memory for one KV block: 5.00 MiB are available and a block of 16 tokens "
        "takes 5.00 MiB; raise --kv-cache-memory"
    )


def test_less_than_one_conversation() -> None:
    with pytest.raises(ModelLoadError) as caught:
        plan_memory(LLAMA_70B, 10 * LLAMA_70B.bytes_per_block, 161)
    assert str(caught.value) == (
        "The KV pool of 50.00 MiB holds 10 blocks of 16 tokens; --max-model-len 161 needs 12 "
        "(60.00 MiB): lower --max-model-len to 144 or raise --kv-cache-memory"
    )
