"""Under which name a tenant's figures stand in the metrics, so that there is no end of none.

Owns the bound on how many names there are. Only tenants of the tenant file have one, given there by
the operator; a key is none. Knows nothing of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["MAX_TENANT_LABELS", "OTHER", "TenantLabels"]

MAX_TENANT_LABELS = 50
OTHER = "other"


class TenantLabels:
    """``named`` gives the tenants of the tenant file as it is now, in its order.

    A name that was given stays, since a series that ends and begins again under another name is of
    no use; so tenants beyond the first MAX_TENANT_LABELS, and keys that have no tenant in the file,
    are OTHER. Where no tenant has a name the label is empty.
    """

    def __init__(self, named: Callable[[], Collection[str]]) -> None:
        self._named = named
        self._given: dict[str, str] = {}

    def of(self, tenant_id: str) -> str:
        label = self._given.get(tenant_id)
        if label is not None:
            return label
        named = self._named()
        for name in named:  # in the file's order, whoever comes first
            if len(self._given) < MAX_TENANT_LABELS:
                self._given.setdefault(name, name)
        if tenant_id in self._given:
            return self._given[tenant_id]
        return OTHER if named or self._given else ""
