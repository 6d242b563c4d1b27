import pytest

from cache_store.block import KVCacheSpec, num_blocks_for


def make_spec(**changes: int) -> KVCacheSpec:
    fields = {
        "block_size": 32,
        "num_layers": 80,
        "num_kv_heads": 8,
        "head_dim": 128,
        "bytes_per_element": 2,
    }
    return KVCacheSpec(**(fields | changes), dtype="bfloat16")


def test_bytes_of_llama_70b_in_bf16() -> None:
    spec = make_spec()
    assert spec.bytes_per_token == 327_680
    assert spec.bytes_per_block == 327_680 * 32


def test_int8_counts_a_scale_for_each_vector() -> None:
    spec = KVCacheSpec(32, 80, 8, 128, "int8", 1)
    assert spec.scale_bytes == 4
    assert spec.bytes_per_token == 2 * 80 * 8 * (128 + 4)
    assert spec.bytes_per_block == 32 * spec.bytes_per_token
    assert spec.coding == "int8/float32"
    assert make_spec().scale_bytes == 0
    assert make_spec().coding == "bfloat16"


def test_int8_holds_almost_four_times_what_float32_holds_and_twice_what_bfloat16_does() -> None:
    for dtype, size, ratio in (("float32", 4, 3.76), ("bfloat16", 2, 1.88)):
        plain = KVCacheSpec(32, 30, 3, 64, dtype, size)
        coded = KVCacheSpec(32, 30, 3, 64, "int8", 1)
        assert coded.num_blocks_in(2**30) / plain.num_blocks_in(2**30) == pytest.approx(ratio, 0.01)


def test_only_whole_blocks_fit() -> None:
    spec = make_spec()
    assert spec.num_blocks_in(3 * spec.bytes_per_block - 1) == 2
    assert spec.num_blocks_in(3 * spec.bytes_per_block) == 3
    assert spec.num_blocks_in(-1) == 0


@pytest.mark.parametrize("field", ["block_size", "num_layers", "num_kv_heads", "head_dim"])
def test_a_size_below_one_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        make_spec(**{field: 0})


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_num_blocks_for_rounds_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 8) == expected
