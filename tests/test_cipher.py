"""Sealed records: what opens, what does not, and which key files are taken."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from cache_store.cipher import SEAL_BYTES, Cipher, CipherError, KeyFileError

KEY = bytes(range(32))


def write_key(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("plain", [b"", b"x", bytes(100_000)])
def test_what_is_sealed_opens_under_its_own_name(plain: bytes) -> None:
    cipher = Cipher(KEY)
    sealed = cipher.seal(plain, b"name")
    assert len(sealed) == len(plain) + SEAL_BYTES
    assert Cipher(KEY).open(sealed, b"name") == plain


def test_the_same_record_is_never_sealed_alike_and_shows_no_plain_text() -> None:
    cipher = Cipher(KEY)
    sealed = {cipher.seal(b"a needle in a record", b"name") for _ in range(100)}
    assert len(sealed) == 100
    assert not any(b"needle" in one for one in sealed)


def test_a_record_opens_neither_in_anothers_place_nor_with_another_key() -> None:
    sealed = Cipher(KEY).seal(b"plain", b"name")
    with pytest.raises(CipherError):
        Cipher(KEY).open(sealed, b"other")
    with pytest.raises(CipherError):
        Cipher(bytes(32)).open(sealed, b"name")


def test_a_record_with_any_byte_changed_or_missing_does_not_open() -> None:
    cipher = Cipher(KEY)
    sealed = cipher.seal(b"plain", b"name")
    for index in range(len(sealed)):
        damaged = sealed[:index] + bytes([sealed[index] ^ 1]) + sealed[index + 1 :]
        with pytest.raises(CipherError):
            cipher.open(damaged, b"name")
    for length in range(len(sealed)):
        with pytest.raises(CipherError):
            cipher.open(sealed[:length], b"name")


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        base64.b64encode(KEY),
        base64.b64encode(KEY) + b"\n",
        base64.urlsafe_b64encode(KEY),
    ],
)
def test_a_key_file_may_be_raw_hex_or_base64(tmp_path: Path, content: bytes) -> None:
    cipher = Cipher.from_key_file(write_key(tmp_path, content))
    assert cipher.open(Cipher(KEY).seal(b"plain", b"name"), b"name") == b"plain"


def test_a_base64_key_with_the_other_alphabet_is_the_same_key(tmp_path: Path) -> None:
    key = b"\xfb\xef\xff" * 10 + b"ab"
    for content in (base64.b64encode(key), base64.urlsafe_b64encode(key)):
        cipher = Cipher.from_key_file(write_key(tmp_path, content))
        assert cipher.open(Cipher(key).seal(b"plain", b""), b"") == b"plain"


def test_a_raw_key_that_looks_like_text_is_taken_as_it_is(tmp_path: Path) -> None:
    key = b"abcdefabcdefabcdefabcdefabcdef \n"
    cipher = Cipher.from_key_file(write_key(tmp_path, key))
    assert cipher.open(Cipher(key).seal(b"plain", b""), b"") == b"plain"


@pytest.mark.parametrize("content", [b"", b"short", KEY + b"x", KEY[:31].hex().encode(), b"%" * 44])
def test_a_key_of_another_length_is_refused_without_showing_it(
    tmp_path: Path, content: bytes
) -> None:
    file = write_key(tmp_path, content)
    with pytest.raises(KeyFileError) as caught:
        Cipher.from_key_file(file)
    assert str(caught.value) == (
        f"the key file {file} does not hold a key of 32 bytes (raw, hex or base64)"
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_key(tmp_path, KEY, mode)
    with pytest.raises(KeyFileError, match="can be read by others: chmod 600"):
        Cipher.from_key_file(file)


def test_a_key_file_that_is_absent_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="absent cannot be read: No such file"):
        Cipher.from_key_file(tmp_path / "absent")
    os.chmod(tmp_path, 0o700)
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        Cipher.from_key_file(tmp_path)


def test_a_key_in_memory_must_have_its_length() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        Cipher(bytes(16))
    assert KEY.hex() not in repr(Cipher(KEY))
