"""Generated prompts of a wanted length: plain words in random order, the same for the same seed."""

from __future__ import annotations

import random

_WORDS = """order invoice customer refund parcel warehouse policy agent ticket status region tax
discount account delivery courier label stock return window charge gateway email phone address"""

QUESTIONS = (
    "How long is the refund window, and who pays for sending the parcel back?",
    "Where is my parcel now, and can I change the delivery address today if it has not left?",
)


def system_prompt(num_words: int, seed: int) -> str:
    generator = random.Random(seed)
    words = _WORDS.split()
    return " ".join(generator.choice(words) for _ in range(num_words))
