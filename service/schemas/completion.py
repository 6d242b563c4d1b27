"""The body of POST /v1/completions.

Owns the forms a prompt may take. Knows nothing of tokenizing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from service.errors import InvalidRequest
from service.request_fields import Endpoint, keep_acting
from service.schemas.parsing import convert, parse_object
from service.schemas.sampling import CommonFields, NumLogprobs

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_PROMPTS",
    "CompletionRequest",
    "PromptField",
    "completion_request",
    "parse_completion_request",
]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128

Prompt = str | list[int]


class CompletionRequest(CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompts: list[Prompt]  # text or token ids, one choice each
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: NumLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs: echo with logprobs gives those of the prompt already.",
                param="prompt_logprobs",
            )

    @property
    def requested_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class PromptField(msgspec.Struct, frozen=True):
    prompt: str | list[int | str | list[int]]


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest naming the field at fault by its path."""
    return completion_request(keep_acting(parse_object(body), Endpoint.COMPLETIONS))


def completion_request(fields: dict[str, Any]) -> CompletionRequest:
    """From fields that act. Raises InvalidRequest."""
    if "prompt" not in fields:
        raise InvalidRequest("prompt: required, but missing.", param="prompt")
    others = {name: value for name, value in fields.items() if name != "prompt"}
    prompts = _prompts(fields["prompt"])
    request = convert({**others, "prompts": prompts}, CompletionRequest)
    request.check()
    return request


def _prompts(given: Any) -> list[Prompt]:
    prompt = convert({"prompt": given}, PromptField).prompt
    if not prompt:
        raise InvalidRequest("prompt: must not be empty.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise InvalidRequest(
            "prompt: token ids of one prompt cannot stand beside other prompts; "
            "put them into a list of their own.",
            param="prompt",
        )
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompts)}.", param="prompt"
        )
    for index, item in enumerate(prompts):
        if not item:
            raise InvalidRequest(f"prompt[{index}]: must not be empty.", param=f"prompt[{index}]")
    return prompts
