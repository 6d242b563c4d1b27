"""The prompts of the workloads: plain text, so that every server makes the same tokens of it.

Owns lengths in words of benchmarks.texts, whose words are some 1.03 tokens each.
"""

from __future__ import annotations

from benchmarks.texts import system_prompt

SHARED_WORDS = 1_205  # some 1,270 tokens

_ASKS = (
    "Where is parcel {n} now, and can its delivery address be changed today?",
    "How long is the refund window of order {n}, and who pays for sending it back?",
    "Which tax does invoice {n} have, and is there a discount for account {n}?",
)


def question(number: int) -> str:
    """Some 30 tokens that no other number has."""
    ask = _ASKS[number % len(_ASKS)].format(n=4000 + 7 * number)
    return f"\n\nCustomer {number}: {ask}\nAgent:"


def shared_prompt(seed: int, num_words: int = SHARED_WORDS) -> str:
    return f"Support desk {seed}. " + system_prompt(num_words, seed)
