"""A day at a library's chat: everybody gets the same system prompt, which says what time it is.

Owns the visitors and what they ask. In the morning the time stands before the rules, so no two
requests begin alike; once that is fixed it stands in the question. Knows nothing of how the server
is started or looked at.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

RULES = (
    "You are the clerk at the desk of a town library. Answer in one or two plain sentences. "
    "Books are lent for four weeks, films for one week, and nothing is lent twice to one household "
    "at a time. The reading room is open until eight in the evening, the desk until six. Whoever "
    "brings a book back late pays ten cents a day, at most what the book has cost. Children under "
    "twelve pay nothing. Newspapers stay in the reading room. What another branch has comes within "
    "three days. If you do not know something, say so and name the desk's telephone number, which "
    "is 555 0142. Never guess what a book says. "
)
QUESTIONS = (
    "How long may I keep a film?",
    "Is the reading room open at seven in the evening?",
    "What does it cost to bring a book back nine days late?",
    "My daughter is ten. Does she pay when she is late?",
    "May I take a newspaper home?",
    "How soon can I have a book from another branch?",
)
_OPENS_AT = datetime.datetime(2026, 11, 30, 8, 0, 12)
_STEP = datetime.timedelta(minutes=3, seconds=17)


@dataclass(frozen=True)
class Answered:
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass
class Day:
    """``rules`` may be shortened for a small model; ``visitors`` take turns, each in a session."""

    http: httpx.Client
    model: str
    rules: str = RULES
    visitors: Sequence[str] = ("ada", "bo", "cem", "dara", "eli", "fay")
    max_tokens: int = 24
    clock: Iterator[datetime.datetime] = field(default_factory=lambda: _clock())
    _talks: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def play(self, num_requests: int, *, is_fixed: bool) -> list[Answered]:
        """What each request was told of its prompt."""
        return [self._ask(number, is_fixed) for number in range(num_requests)]

    def _ask(self, number: int, is_fixed: bool) -> Answered:
        visitor = self.visitors[number % len(self.visitors)]
        now = f"It is {next(self.clock):%Y-%m-%d %H:%M:%S}."
        question = QUESTIONS[(number // len(self.visitors) + number) % len(QUESTIONS)]
        system = self.rules if is_fixed else f"{now} {self.rules}"
        talk = self._talks.setdefault(visitor, [])
        asked = {"role": "user", "content": f"{question} ({now})" if is_fixed else question}
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, *talk, asked],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        named = {"X-Session-ID": visitor}
        response = self.http.post("/v1/chat/completions", json=body, headers=named)
        assert response.status_code == 200, response.text
        said = response.json()
        answer = said["choices"][0]["message"]["content"]
        talk += [asked, {"role": "assistant", "content": answer}]
        if len(talk) > 4:  # the next visitor of that name
            talk.clear()
        usage = said["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answered(usage["prompt_tokens"], cached)


def hit_rate(answered: Sequence[Answered]) -> float:
    """By tokens."""
    asked = sum(item.num_prompt_tokens for item in answered)
    return sum(item.num_cached_tokens for item in answered) / asked


def _clock() -> Iterator[datetime.datetime]:
    now = _OPENS_AT
    while True:
        yield now
        now += _STEP
