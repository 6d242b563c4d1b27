"""Generated prompts of a wanted length: plain words in random order, the same for the same seed."""

from __future__ import annotations

import random

WORDS = tuple(
    """order invoice customer refund parcel warehouse policy agent ticket status region tax discount
    account delivery courier label stock return window charge gateway email phone address""".split()
)

QUESTIONS = (
    "How long is the refund window, and who pays for sending the parcel back?",
    "Where is my parcel now, and can I change the delivery address today if it has not left?",
)


def system_prompt(num_words: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))
