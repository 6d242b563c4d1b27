"""How one request wants its tokens drawn and when it ends.

Owns the numbers and their legal ranges. Knows nothing of logits, text or HTTP: stop *strings* are
the gateway's, since a worker sees token ids only.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

MAX_LOGIT_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 2**18
# Below it logits divided by the temperature leave float32, and the best token wins in any case.
MIN_TEMPERATURE = 1e-5


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer's text must match as a whole: a JSON schema, a regular expression (Rust's
    syntax), or a grammar in llguidance's dialect of Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling parameters of one request, checked by :meth:`violation`.

    ``max_tokens`` 0 only computes the KV of the prompt, and its logprobs where they are asked for.
    ``temperature`` below MIN_TEMPERATURE is greedy. ``top_k`` 0 keeps the whole vocabulary.
    ``seed`` None lets the worker draw one. Penalties follow OpenAI's definitions;
    ``repetition_penalty`` is the multiplicative one of CTRL (Keskar et al., 2019) over prompt and
    output tokens.

    ``num_logprobs`` None wants none; 0 that of each token that was drawn; more also the likeliest
    ones in its place. ``num_prompt_logprobs`` is the same for the tokens of the prompt. Both are of
    the model's own distribution, whatever else is asked for here. Before ``min_tokens`` nothing
    that would end the answer is drawn. ``grammar`` bounds what is drawn to what it allows.

    A peer of the minor version before refuses a request with a field that it does not know, and
    never sees one at its default.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    min_tokens: int = 0
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def needs_output_tokens(self) -> bool:
        """Whether a token cannot be drawn before those in front of it are known to the host."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.grammar is not None
        )

    def violation(self, vocab_size: int) -> tuple[str, str] | None:
        """The first field out of range as (field, what is allowed), or None."""
        for field, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, 10.0),
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and low <= value <= high):
                return field, f"must be a number between {low:g} and {high:g}"
        if self.top_p == 0.0:
            return "top_p", "must be greater than 0"
        if self.repetition_penalty == 0.0:
            return "repetition_penalty", "must be greater than 0"
        if self.max_tokens < 0:
            return "max_tokens", "must be at least 0"
        if self.top_k < 0:
            return "top_k", "must be 0 (off) or more"
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            return "seed", "must fit into 64 bits"
        return self._extra_violation() or self._token_violation(vocab_size)

    def _extra_violation(self) -> tuple[str, str] | None:
        for field in ("num_logprobs", "num_prompt_logprobs"):
            number = getattr(self, field)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                return field, f"must be a number between 0 and {MAX_LOGPROBS}"
        if not 0 <= self.min_tokens <= self.max_tokens:
            return "min_tokens", "must be between 0 and max_tokens"
        if self.grammar is not None and len(self.grammar.text) > MAX_GRAMMAR_CHARS:
            return "grammar", f"may have at most {MAX_GRAMMAR_CHARS} characters"
        return None

    def _token_violation(self, vocab_size: int) -> tuple[str, str] | None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            return "stop_token_ids", f"may hold at most {MAX_STOP_TOKEN_IDS} ids"
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                return "stop_token_ids", f"id {token_id} is outside the vocabulary of {vocab_size}"
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                return "logit_bias", f"id {token_id} is outside the vocabulary of {vocab_size}"
            if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                return "logit_bias", f"values must be between -{MAX_LOGIT_BIAS:g} and 100"
        return None
