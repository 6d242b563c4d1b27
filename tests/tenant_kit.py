"""Tenant files for tests: text in, a file and its keys out."""

from __future__ import annotations

from pathlib import Path

from service.tenants.key_table import digest_of

TENANTS = """
[tenants.acme]
keys = [{{ name = "one", sha256 = "{acme}" }}, {{ name = "two", sha256 = "{acme_two}" }}]

[tenants.globex]
keys = [{{ sha256 = "{globex}" }}]
"""


def hash_of(key: str) -> str:
    return digest_of(key).hex()


def two_tenants(extra: str = "") -> str:
    """acme with the keys hs-acme and hs-acme-two, globex with hs-globex."""
    names = ("acme", "acme_two", "globex")
    hashes = {name: hash_of("hs-" + name.replace("_", "-")) for name in names}
    return TENANTS.format(**hashes) + extra


def write(folder: Path, text: str) -> str:
    """Whole or not at all, as an operator's tool does."""
    path, draft = folder / "tenants.toml", folder / "draft"
    draft.write_text(text)
    draft.replace(path)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
