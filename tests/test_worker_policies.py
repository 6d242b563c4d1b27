"""What workers are told of tenants: only what sets one apart, in plain numbers."""

from __future__ import annotations

from model_worker.protocol import TenantPolicies, TenantPolicy, decode_gateway_message, encode
from service.tenants.tenant import EVERYONE, Caps, Size, Tenant
from service.tenants.worker_policies import policies_of


def test_weights_and_caps_cross_the_link() -> None:
    caps = Caps(device_cache=Size(0), host_cache=Size(2**33))
    tenants = [
        EVERYONE,
        Tenant(tenant_id="plain", namespace_owner="plain"),
        Tenant(tenant_id="heavy", namespace_owner="", weight=2.5),
        Tenant(tenant_id="bound", namespace_owner="bound", caps=caps),
    ]
    expected = TenantPolicies(
        policies=(
            TenantPolicy(tenant="heavy", weight=2.5),
            TenantPolicy(tenant="bound", max_device_bytes=0, max_host_bytes=2**33),
        )
    )
    made = TenantPolicies(policies=tuple(policies_of(tenants)))
    assert decode_gateway_message(encode(made)) == made == expected
