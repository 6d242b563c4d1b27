"""Which metadata store a gateway uses: embedded, or Redis and what outlasts its outages.

Owns the choice and the making of it from the configuration. Knows nothing of what is stored.
"""

from __future__ import annotations

from pathlib import Path

from cache_store.cipher import Cipher, KeyFileError
from cache_store.metadata.base import MetadataStore
from cache_store.metadata.memory import MemoryMetadataStore
from cache_store.metadata.redis import RedisMetadataStore
from cache_store.metadata.redis_link import RedisLink
from cache_store.metadata.resilient import ResilientMetadataStore
from cache_store.metadata.session_file import SessionFile
from service.config import ConfigError, GatewayConfig

__all__ = ["make_metadata_store"]

# Beyond what sessions allow themselves (service.sessions.book): they give up in a better order.
_MAX_SESSIONS = 250_000
_MAX_SESSION_BYTES = 512 * 2**20


def make_metadata_store(config: GatewayConfig) -> MetadataStore:
    """Not started yet. Raises ConfigError for a key file that cannot be used."""
    try:
        file = config.encryption_key_file
        cipher = None if file is None else Cipher.from_key_file(file)
    except KeyFileError as error:
        raise ConfigError(f"--encryption-key-file: {error}") from None
    if config.redis_url is not None:
        link = RedisLink(config.redis_url)
        return ResilientMetadataStore(RedisMetadataStore(link, cipher=cipher))
    folder = config.sessions_dir
    return MemoryMetadataStore(
        file=None if folder is None else SessionFile(Path(folder), cipher),
        max_sessions=_MAX_SESSIONS,
        max_session_bytes=_MAX_SESSION_BYTES,
    )
