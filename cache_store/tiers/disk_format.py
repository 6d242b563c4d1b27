"""The bytes of the disk tier: the head of a segment, and a record in it.

Owns the format version, the layout, the checksums and the sealing. Knows nothing of files, folders
or slots.

A segment is a head of 4,096 bytes and then records of one fixed, page-aligned length, so that an
erased record (zeros) is stepped over. A record is

    header    16 bytes, the same in every record of a segment
    meta      key (token ids included), time of storing, digest of the payload; its own checksum
    payload   the block's keys and values as they came
    padding   zeros

The header's, meta's and payload's bytes are all covered by checksums (xxh3_128, against accidents;
against a forger only a cipher helps). With a cipher meta and payload are sealed, each bound to the
format, the payload also to its meta: a payload put beside another key does not open. They are not
bound to their place in the file, since a record says itself what it is, wherever it lies.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from enum import Enum, auto

import xxhash

from cache_store.cipher import SEAL_BYTES, Cipher, CipherError
from cache_store.token_bytes import TOKEN_BYTES
from cache_store.transfer import BlockKey

FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEAD_BYTES = PAGE_BYTES
SEGMENT_MAGIC = b"HSKVSEGM"
RECORD_MAGIC = b"HSKVBLCK"

_HEAD = struct.Struct(">8sHI")  # magic, format version, bytes of the JSON that follows
_HEADER = struct.Struct(">8sHHI")  # magic, format version, is sealed, bytes of meta
_META = struct.Struct(
    ">16s16s16sdI16s"
)  # key but for its tokens, stored_at, bytes of tokens, digest
_DIGEST_BYTES = 16
HEADER_BYTES = _HEADER.size

Buffer = bytes | bytearray | memoryview


class DiskStoreError(Exception):
    """The disk store cannot do what was asked; one line that says why, without user data."""


class CorruptBlock(DiskStoreError):
    """A record is not what was stored under its key: damaged, cut short, erased or another's."""


class MissingBlock(CorruptBlock):
    """The same, where that is nobody's damage: there is none, or another process may have erased
    its own."""


@dataclass(frozen=True, slots=True)
class DiskFormat:
    """What the payloads of a store are; a store reads only what has the same format.

    ``payload_bytes`` is the size of one block, ``codec`` says how its values are coded
    ("exact:float32", "int8"). Raises ValueError for a size that is not positive.
    """

    fingerprint: str
    hash_version: str
    block_size: int
    payload_bytes: int
    codec: str

    def __post_init__(self) -> None:
        for name in ("block_size", "payload_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """What a record says of itself. ``stored_at`` is in seconds since the epoch."""

    key: BlockKey
    stored_at: float
    payload_digest: bytes


class HeadKind(Enum):
    """Whose segment it is, as its head tells."""

    SAME = auto()  # this format, readable with this key
    PLAIN = auto()  # this format, not sealed although this store seals
    OTHER = auto()  # ours, but of another version, format or key
    NOT_OURS = auto()


class RecordCodec:
    """Bytes from keys and payloads and back, for one format and at most one key.

    ``stride`` is the length of a record, ``lead_bytes`` that of its header and meta together.
    Raises DiskStoreError for a format whose description is too long for a head.
    """

    def __init__(self, format: DiskFormat, cipher: Cipher | None) -> None:
        self.format = format
        self._cipher = cipher
        self._digest = format.digest
        self._token_bytes = format.block_size * TOKEN_BYTES
        seal_bytes = SEAL_BYTES if cipher else 0
        meta_bytes = _META.size + self._token_bytes
        meta_bytes += SEAL_BYTES if cipher else _DIGEST_BYTES
        self._header = _HEADER.pack(RECORD_MAGIC, FORMAT_VERSION, cipher is not None, meta_bytes)
        self.lead_bytes = HEADER_BYTES + meta_bytes
        self.stored_payload_bytes = format.payload_bytes + seal_bytes
        used = self.lead_bytes + self.stored_payload_bytes
        self.stride = -(-used // PAGE_BYTES) * PAGE_BYTES
        self._padding = bytes(self.stride - used)
        self.head = self._encode_head()

    def _encode_head(self) -> bytes:
        sealed = self._cipher.seal(b"", self._digest) if self._cipher else b""
        body = json.dumps({**asdict(self.format), "key_check": sealed.hex()}).encode()
        head = _HEAD.pack(SEGMENT_MAGIC, FORMAT_VERSION, len(body)) + body
        head += xxhash.xxh3_128_digest(head)
        if len(head) > HEAD_BYTES:
            raise DiskStoreError("the model's fingerprint is too long for the disk store's files")
        return head.ljust(HEAD_BYTES, b"\0")

    def head_kind(self, head: bytes) -> HeadKind:
        """``head`` is the first HEAD_BYTES of a file, or what there is of them."""
        if not head.startswith(SEGMENT_MAGIC):
            return HeadKind.NOT_OURS
        fields = _decode_head(head)
        if fields is None:
            return HeadKind.OTHER
        key_check = fields.pop("key_check", None)
        if fields != asdict(self.format) or not isinstance(key_check, str):
            return HeadKind.OTHER
        if self._cipher is None:
            return HeadKind.OTHER if key_check else HeadKind.SAME
        if not key_check:
            return HeadKind.PLAIN
        try:
            self._cipher.open(bytes.fromhex(key_check), self._digest)
        except (CipherError, ValueError):
            return HeadKind.OTHER
        return HeadKind.SAME

    def encode(self, key: BlockKey, stored_at: float, payload: Buffer) -> list[Buffer]:
        """The record as parts to be written one after another. AssertionError for a key or a
        payload whose size is not the format's."""
        view = memoryview(payload).cast("B")
        num_bytes = len(key.tokens)
        assert len(view) == self.format.payload_bytes, f"a payload of {len(view)} bytes"
        assert 0 < num_bytes <= self._token_bytes, f"{num_bytes} bytes of tokens"
        assert num_bytes % TOKEN_BYTES == 0, f"{num_bytes} bytes of tokens"
        hashes = (key.root_hash, key.parent_hash, key.block_hash)
        assert all(len(value) == _DIGEST_BYTES for value in hashes), "hashes have 16 bytes"
        digest = xxhash.xxh3_128_digest(view)
        meta = _META.pack(*hashes, stored_at, num_bytes, digest)
        meta += key.tokens.ljust(self._token_bytes, b"\0")
        if self._cipher is None:
            checksum = xxhash.xxh3_128_digest(self._header + meta)
            return [self._header, meta, checksum, view, self._padding]
        sealed = self._cipher.seal(meta, self._header + self._digest)
        payload = self._cipher.seal(bytes(view), self._digest + meta)
        return [self._header, sealed, payload, self._padding]

    def decode_lead(self, lead: Buffer) -> RecordMeta | None:
        """``lead`` is a record's first ``lead_bytes``; None for an erased record. Raises
        CorruptBlock."""
        raw = bytes(lead)
        if raw[:HEADER_BYTES] != self._header:
            if not any(raw[:HEADER_BYTES]):
                return None
            raise CorruptBlock("a record on disk has no valid header")
        meta = self._open_meta(raw[HEADER_BYTES:])
        root, parent, block, stored_at, num_bytes, digest = _META.unpack_from(meta)
        tokens = meta[_META.size : _META.size + num_bytes]
        return RecordMeta(BlockKey(root, parent, block, tokens), stored_at, digest)

    def _open_meta(self, stored: bytes) -> bytes:
        if self._cipher is None:
            meta, checksum = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
            if xxhash.xxh3_128_digest(self._header + meta) != checksum:
                raise CorruptBlock("a record on disk does not match its checksum")
            return meta
        try:
            return self._cipher.open(stored, self._header + self._digest)
        except CipherError as error:
            raise CorruptBlock(str(error)) from None

    def payload_buffer(self, into: memoryview) -> memoryview:
        """Where the stored payload is to be read: ``into`` itself unless it is sealed."""
        return memoryview(bytearray(self.stored_payload_bytes)) if self._cipher else into

    def check_payload(self, meta: RecordMeta, stored: memoryview, into: memoryview) -> None:
        """Verify what was read, and fill ``into`` if it was sealed. Raises CorruptBlock."""
        if self._cipher is not None:
            key = meta.key
            hashes = (key.root_hash, key.parent_hash, key.block_hash)
            plain = _META.pack(*hashes, meta.stored_at, len(key.tokens), meta.payload_digest)
            plain += key.tokens.ljust(self._token_bytes, b"\0")
            try:
                into[:] = self._cipher.open(bytes(stored), self._digest + plain)
            except CipherError as error:
                raise CorruptBlock(str(error)) from None
        if xxhash.xxh3_128_digest(into) != meta.payload_digest:
            raise CorruptBlock("a payload on disk does not match its checksum")


def _decode_head(head: bytes) -> dict[str, object] | None:
    """The fields of a head of this version, or None."""
    if len(head) < _HEAD.size:
        return None
    _, version, num_bytes = _HEAD.unpack_from(head)
    end = _HEAD.size + num_bytes
    checksum = head[end : end + _DIGEST_BYTES]
    if version != FORMAT_VERSION or xxhash.xxh3_128_digest(head[:end]) != checksum:
        return None
    try:
        fields = json.loads(head[_HEAD.size : end])
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
