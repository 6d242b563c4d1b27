"""Requests and tokens per minute: taken, refused, given back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from service.errors import RateLimited
from service.tenants.rate_limits import RateLimits, TokenBucket
from service.tenants.tenant import EVERYONE, Limits, Tenant


@dataclass
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


def tenant(requests: int | None = None, tokens: int | None = None, name: str = "acme") -> Tenant:
    limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens)
    return Tenant(tenant_id=name, namespace_owner=name, limits=limits)


def headers(rates: RateLimits, who: Tenant) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): value for name, value in rates.headers(who)}


def test_a_minute_of_requests_may_come_at_once_and_then_at_an_even_pace() -> None:
    clock = Clock()
    rates, acme = RateLimits(clock), tenant(requests=6)
    for _ in range(6):
        rates.take_request(acme)
    with pytest.raises(RateLimited, match=r"6 requests per minute is reached; .* in 10s\.") as no:
        rates.take_request(acme)
    assert (no.value.status, no.value.code) == (429, "rate_limit_exceeded")
    assert no.value.headers() == {"Retry-After": "10"}
    clock.now += 9.5
    with pytest.raises(RateLimited, match="in 500ms") as no:
        rates.take_request(acme)
    assert no.value.headers() == {"Retry-After": "1"}
    clock.now += 0.5
    rates.take_request(acme)
    with pytest.raises(RateLimited):
        rates.take_request(acme)


def test_a_bucket_holds_no_more_than_a_minute() -> None:
    clock = Clock()
    rates, acme = RateLimits(clock), tenant(requests=2)
    rates.take_request(acme)
    clock.now += 86_400
    for _ in range(2):
        rates.take_request(acme)
    with pytest.raises(RateLimited):
        rates.take_request(acme)


def test_tenants_have_buckets_of_their_own_and_may_have_none() -> None:
    rates = RateLimits(Clock())
    one, other = tenant(requests=1), tenant(requests=1, name="globex")
    rates.take_request(one)
    rates.take_request(other)
    for _ in range(100):
        rates.take_request(EVERYONE)
    assert rates.reserve_tokens(EVERYONE, 10**9, 10**9) == 0.0
    assert headers(rates, EVERYONE) == {}


def test_tokens_are_reserved_by_estimate_and_settled_by_use() -> None:
    rates, acme = RateLimits(Clock()), tenant(tokens=1_000)
    reserved = rates.reserve_tokens(acme, 300, 50)
    assert reserved == 350.0
    assert headers(rates, acme)["remaining-tokens"] == "650"
    rates.settle_tokens(acme, reserved, used=40)  # most of it was cached
    assert headers(rates, acme)["remaining-tokens"] == "960"


def test_an_answer_of_unknown_length_counts_as_those_before() -> None:
    rates, acme = RateLimits(Clock()), tenant(tokens=10_000)
    assert rates.reserve_tokens(acme, 100, 8_000) == 100 + 128
    for _ in range(100):
        rates.learn(acme, num_prompt=100, num_computed=10, num_output=500)
    assert rates.reserve_tokens(acme, 100, 8_000) == pytest.approx(10 + 500, rel=0.01)
    assert rates.reserve_tokens(acme, 100, 7) == pytest.approx(10 + 7, rel=0.01)


def test_what_was_used_beyond_the_estimate_is_paid_back_by_waiting() -> None:
    clock = Clock()
    rates, acme = RateLimits(clock), tenant(tokens=600)
    reserved = rates.reserve_tokens(acme, 500, 100)
    rates.settle_tokens(acme, reserved, used=900)
    assert headers(rates, acme) == {
        "limit-tokens": "600",
        "remaining-tokens": "0",
        "reset-tokens": "1m30s",
    }
    with pytest.raises(RateLimited, match=r"600 tokens per minute .* in 31s") as no:
        rates.reserve_tokens(acme, 9, 1)
    assert no.value.headers() == {"Retry-After": "31"}
    clock.now += 31
    assert rates.reserve_tokens(acme, 9, 1) == 10.0


def test_what_is_larger_than_the_whole_bucket_passes_when_it_is_full() -> None:
    clock = Clock()
    rates, acme = RateLimits(clock), tenant(tokens=60)
    assert rates.reserve_tokens(acme, 100, 20) == 120.0
    with pytest.raises(RateLimited):
        rates.reserve_tokens(acme, 100, 20)
    clock.now += 119.9
    with pytest.raises(RateLimited):
        rates.reserve_tokens(acme, 100, 20)
    clock.now += 0.1
    rates.reserve_tokens(acme, 100, 20)


def test_another_limit_counts_at_once_and_keeps_what_was_used() -> None:
    clock = Clock()
    rates = RateLimits(clock)
    for _ in range(10):
        rates.take_request(tenant(requests=10))
    with pytest.raises(RateLimited, match="5 requests"):
        rates.take_request(tenant(requests=5))
    clock.now += 12
    rates.take_request(tenant(requests=5))
    assert headers(rates, tenant(requests=2))["limit-requests"] == "2"
    rates.take_request(tenant())  # no limit any more


def test_who_is_gone_has_no_account() -> None:
    rates, acme = RateLimits(Clock()), tenant(requests=1)
    rates.take_request(acme)
    rates.forget_all_but({"acme"})
    with pytest.raises(RateLimited):
        rates.take_request(acme)
    rates.forget_all_but(set())
    rates.take_request(acme)


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0.5, "500ms"), (0.0, "0ms"), (1.0, "1s"), (1.5, "1.5s"), (60.0, "1m0s"), (90.5, "1m30.5s")],
)
def test_times_are_written_as_openai_writes_them(amount: float, shown: str) -> None:
    clock = Clock()
    bucket = TokenBucket.full(60, clock.now)  # one a second
    rates, acme = RateLimits(clock), tenant(requests=60)
    rates.take_request(acme)
    account = rates._accounts["acme"]
    assert account.requests is not None
    account.requests.level = bucket.level - amount
    assert headers(rates, acme)["reset-requests"] == shown
