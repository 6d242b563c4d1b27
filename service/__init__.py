"""The gateway: HTTP in, token ids out to workers; it holds no weights and needs no torch."""

__version__ = "0.1.0"
