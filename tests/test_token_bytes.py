import numpy as np
import pytest

from cache_store.token_bytes import decode_tokens, encode_tokens, num_common_tokens


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_four_big_endian_bytes_per_token() -> None:
    assert encode_tokens(tokens(1, 258)) == b"\x00\x00\x00\x01\x00\x00\x01\x02"


def test_encoding_round_trips_placeholders_too() -> None:
    ids = tokens(0, -1, 2**31 - 1)
    assert decode_tokens(encode_tokens(ids)).tolist() == ids.tolist()


def test_byte_order_is_token_order() -> None:
    ordered = [encode_tokens(tokens(*ids)) for ids in ([1], [1, 0], [1, 255], [1, 256], [256])]
    assert sorted(ordered) == ordered


@pytest.mark.parametrize("ids", [np.array([1, 2]), np.zeros((2, 2), dtype=np.int32)])
def test_other_arrays_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="token ids are"):
        encode_tokens(ids)


@pytest.mark.parametrize("length", [1, 32, 256, 257, 5000])
@pytest.mark.parametrize("where", ["first", "middle", "last", "never"])
def test_common_prefix_of_short_and_long_strings(length: int, where: str) -> None:
    left = np.arange(length, dtype=np.int32)
    right = np.append(left, np.int32(7))
    position = {"first": 0, "middle": length // 2, "last": length - 1, "never": length}[where]
    right[position] += 1 << 8  # differs in one inner byte only
    assert num_common_tokens(encode_tokens(left), bytearray(encode_tokens(right))) == position
