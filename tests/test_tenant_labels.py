"""Names of tenants in the metrics: there is an end of them."""

from service.tenant_labels import MAX_TENANT_LABELS, OTHER, TenantLabels


def test_without_a_tenant_file_there_is_one_label() -> None:
    labels = TenantLabels(lambda: ())
    assert {labels.of(tenant) for tenant in ("", "default", "0f" * 16)} == {""}


def test_tenants_of_the_file_have_their_names_and_keys_have_none() -> None:
    labels = TenantLabels(lambda: ("acme", "globex"))
    assert [labels.of(each) for each in ("globex", "acme", "0f" * 16, "")] == [
        "globex", "acme", OTHER, OTHER,
    ]  # fmt: skip


def test_there_are_so_many_and_no_more_whoever_comes_first() -> None:
    named = [f"t{number}" for number in range(3 * MAX_TENANT_LABELS)]
    labels = TenantLabels(lambda: named)
    given = [labels.of(tenant) for tenant in reversed(named)][::-1]
    assert given[:MAX_TENANT_LABELS] == named[:MAX_TENANT_LABELS]
    assert set(given[MAX_TENANT_LABELS:]) == {OTHER}


def test_a_name_stays_and_a_new_one_may_come() -> None:
    named = ["acme"]
    labels = TenantLabels(lambda: named)
    assert labels.of("acme") == "acme"
    assert labels.of("globex") == OTHER
    named[:] = ["globex"]
    assert (labels.of("acme"), labels.of("globex")) == ("acme", "globex")
    for number in range(100):
        named[:] = [f"t{number}"]
        labels.of(f"t{number}")
    assert labels.of("t10") == "t10"
    assert labels.of("t99") == OTHER
