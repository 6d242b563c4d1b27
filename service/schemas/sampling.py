"""The fields that both endpoints share, and how they become sampling parameters.

Owns their types, their defaults, and the stop strings' limits. Ranges of the sampling numbers
belong to model_worker.sampling_params.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from model_worker.protocol import SamplingParams
from service.errors import InvalidRequest
from service.schemas.prompt_cache import (
    PromptCacheBreakpoint,
    PromptCacheOptions,
    PromptCacheRetention,
    longest_ttl,
    retention_of,
)
from service.schemas.structured import (
    AnswerFormat,
    ResponseFormat,
    StructuredOutputs,
    format_of,
)
from service.stream_usage import StreamUsage

__all__ = [
    "MAX_LOGPROBS",
    "MAX_RETENTION",
    "MAX_STOP_LENGTH",
    "MAX_STOP_STRINGS",
    "CommonFields",
    "NumLogprobs",
    "Priority",
    "Retention",
    "StreamOptions",
    "check_salt",
]

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512  # characters

MAX_LOGPROBS = 20  # likeliest tokens beside each
MAX_RETENTION = 30 * 86_400  # seconds

Priority = Annotated[int, msgspec.Meta(ge=-10, le=10)]
Retention = Annotated[float, msgspec.Meta(ge=0, le=MAX_RETENTION)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: never sent


class CommonFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[_TokenId] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_logprobs: NumLogprobs | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: Priority | None = None
    retention: Retention | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: PromptCacheRetention | None = None
    explain_cache: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def check(self) -> None:
        """Rules across fields, and of single strings. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options: only allowed together with stream true.", param="stream_options"
            )
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation: not supported.",
                param="stream_options.include_obfuscation",
                code="unsupported_parameter",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: not in a stream.", param="prompt_logprobs")
        check_salt(self.cache_salt)
        self._check_stop()
        _ = self.answer_format

    @property
    def cache_breakpoints(self) -> list[PromptCacheBreakpoint]:
        """Those that parts of the prompt bear."""
        return []

    def retention_s(self, most: float | None) -> float | None:
        """How long its blocks are to count as used later; see service.schemas.prompt_cache."""
        ttl = longest_ttl(self.prompt_cache_options, self.cache_breakpoints)
        return retention_of(self.retention, ttl, self.prompt_cache_retention, most)

    def _check_stop(self) -> None:
        stop = self.stop_strings
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop: at most {MAX_STOP_STRINGS} strings, got {len(stop)}.", param="stop"
            )
        if any(not text for text in stop):
            raise InvalidRequest("stop: must not hold an empty string.", param="stop")
        if any(len(text) > MAX_STOP_LENGTH for text in stop):
            raise InvalidRequest(f"stop: at most {MAX_STOP_LENGTH} characters each.", param="stop")

    @property
    def answer_format(self) -> AnswerFormat | None:
        """What the whole answer must match, if anything. Raises InvalidRequest."""
        guided = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return format_of(self.response_format, self.structured_outputs, guided)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stream_usage(self) -> StreamUsage:
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamUsage.NEVER
        return StreamUsage.ALWAYS if options.continuous_usage_stats else StreamUsage.LAST

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are named beside each of the answer's; None asks for none."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def sampling_params(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        """With ``max_tokens`` as it was resolved. Raises InvalidRequest naming a field."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(max(self.top_k, 0), vocab_size) if self.top_k >= -1 else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_token_biases(self.logit_bias),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=min(self.min_tokens, max_tokens),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )
        violation = params.violation(vocab_size)
        if violation is not None:
            field, allowed = violation
            raise InvalidRequest(f"{field}: {allowed}.", param=field)
        return params


def check_salt(cache_salt: str | None) -> None:
    if cache_salt == "":
        raise InvalidRequest(
            "cache_salt: must not be empty; leave it out to share.", param="cache_salt"
        )


def _token_biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        try:
            if not key.isascii():
                raise ValueError
            biases[int(key)] = bias
        except ValueError:
            raise InvalidRequest(
                f"logit_bias: '{key[:32]}' is not a token id.", param="logit_bias"
            ) from None
    return biases
