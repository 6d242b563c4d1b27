"""Requests and tokens per minute, tenant by tenant.

Owns the buckets, the estimate of what a request will cost before that is known, and the headers
that tell a client where it stands. Knows nothing of queues or of HTTP beyond the headers' names.

A token bucket (Turner, IEEE Communications Magazine 24(10), 1986) of one minute's allowance: a
burst may take it whole, and it fills again at an even pace. What was reserved and what was used are
settled when a request ends, so the level of tokens can be below zero: that is paid back by waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.errors import RateLimited
from service.tenants.tenant import Tenant

__all__ = ["RateLimits", "TokenBucket"]

_FIRST_OUTPUT_TOKENS = 128.0  # expected of a tenant's first answers
_SLACK_SECONDS = 1e-6  # sums of floats
_ADAPTATION = 0.1  # weight of the latest request in what is expected of the next


@dataclass(slots=True)
class TokenBucket:
    """``per_minute`` is both what it holds and what comes in a minute. ``now`` in seconds."""

    per_minute: int
    level: float
    filled_at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> TokenBucket:
        return cls(per_minute, float(per_minute), now)

    def fill(self, per_minute: int, now: float) -> None:
        """Bring it up to ``now``; another ``per_minute`` than before counts from here on."""
        self.level += (now - self.filled_at) * self.per_minute / 60
        self.per_minute, self.filled_at = per_minute, now
        self.level = min(self.level, float(per_minute))

    def seconds_until(self, amount: float) -> float:
        """0 if ``amount`` is there. More than it can hold is there when it is full."""
        missing = min(amount, float(self.per_minute)) - self.level
        return max(0.0, missing * 60 / self.per_minute)


@dataclass(slots=True)
class _Account:
    """One tenant's buckets, and what its requests have been like."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    output_tokens: float = _FIRST_OUTPUT_TOKENS
    computed_share: float = 1.0  # of the prompt tokens

    def learn(self, num_prompt: int, num_computed: int, num_output: int) -> None:
        share = num_computed / num_prompt
        self.computed_share += _ADAPTATION * (share - self.computed_share)
        self.output_tokens += _ADAPTATION * (num_output - self.output_tokens)


@dataclass(slots=True)
class RateLimits:
    """Used from the event loop alone. ``clock`` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def take_request(self, tenant: Tenant) -> None:
        """Count one. Raises RateLimited, and counts nothing then."""
        bucket = self._account(tenant).requests
        if bucket is None:
            return
        self._require(bucket, 1.0, "requests")
        bucket.level -= 1

    def reserve_tokens(self, tenant: Tenant, num_prompt_tokens: int, max_tokens: int) -> float:
        """Take what the request is likely to use, by what its tenant's others have used, and say
        how much that was. Raises RateLimited, and takes nothing then."""
        account = self._account(tenant)
        if account.tokens is None:
            return 0.0
        likely_output = min(float(max_tokens), account.output_tokens)
        amount = num_prompt_tokens * account.computed_share + likely_output
        self._require(account.tokens, amount, "tokens")
        account.tokens.level -= amount
        return amount

    def settle_tokens(self, tenant: Tenant, reserved: float, used: int) -> None:
        """A request ended: give back what it did not use, or take what it used beyond."""
        account = self._account(tenant)
        if account.tokens is not None:
            account.tokens.level += reserved - used
            account.tokens.fill(account.tokens.per_minute, self.clock())

    def learn(self, tenant: Tenant, num_prompt: int, num_computed: int, num_output: int) -> None:
        """What an answered request was like, for the estimate of the next."""
        if tenant.limits.tokens_per_minute is not None:
            self._account(tenant).learn(num_prompt, num_computed, num_output)

    def headers(self, tenant: Tenant) -> Iterator[tuple[str, str]]:
        """x-ratelimit-*, as OpenAI's API has them; none for what has no limit."""
        account = self._account(tenant)
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{name}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{name}", str(max(0, math.floor(bucket.level)))
                yield f"x-ratelimit-reset-{name}", _duration(bucket.seconds_until(math.inf))

    def forget_all_but(self, tenant_ids: set[str]) -> None:
        """Tenants that are no more have no account."""
        for tenant_id in self._accounts.keys() - tenant_ids:
            del self._accounts[tenant_id]

    def _account(self, tenant: Tenant) -> _Account:
        """With buckets as the tenant's limits are now."""
        limits, now = tenant.limits, self.clock()
        account = self._accounts.get(tenant.tenant_id)
        if account is None:
            account = _Account()
            if limits.requests_per_minute is not None or limits.tokens_per_minute is not None:
                self._accounts[tenant.tenant_id] = account
        account.requests = _filled(account.requests, limits.requests_per_minute, now)
        account.tokens = _filled(account.tokens, limits.tokens_per_minute, now)
        return account

    def _require(self, bucket: TokenBucket, amount: float, kind: str) -> None:
        seconds = bucket.seconds_until(amount)
        if seconds > _SLACK_SECONDS:
            raise RateLimited(
                f"The limit of {bucket.per_minute} {kind} per minute is reached; try again in "
                f"{_duration(seconds)}.",
                retry_after=math.ceil(seconds - _SLACK_SECONDS),
            )


def _filled(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket.full(per_minute, now)
    bucket.fill(per_minute, now)
    return bucket


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    seconds = max(0.0, seconds - _SLACK_SECONDS)
    if seconds < 1 - _SLACK_SECONDS:
        return f"{math.ceil(seconds * 1_000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    text = f"{rest:.1f}".removesuffix(".0") + "s"
    return f"{minutes:.0f}m{text}" if minutes else text
