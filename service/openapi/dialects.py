"""The table of operations, continued: Anthropic's Messages API and OpenAI's Responses API.

Owns nothing that a struct says already. Knows nothing of how any of it is carried out.
"""

from __future__ import annotations

from service.dialects.message_fields import COUNTED_FIELDS, MESSAGE_FIELDS
from service.dialects.response_fields import RESPONSE_FIELDS
from service.errors import AnthropicErrorBody
from service.openapi.operation import (
    GENERATING,
    OF_A_MODEL,
    OF_A_SESSION,
    OF_ANSWERS,
    SESSION,
    Answer,
    Body,
    Operation,
    Parameter,
)
from service.schemas import message_bodies as messages
from service.schemas import response_bodies as responses
from service.schemas.messages import MessagesRequest
from service.schemas.responses import Order, PageLimit, ResponsesRequest

__all__ = ["DIALECTS"]

_MESSAGE_EVENTS = (
    *(messages.MessageStart, messages.Ping, messages.ContentBlockStart),
    *(messages.ContentBlockDelta, messages.ContentBlockStop, messages.MessageDelta),
    *(messages.MessageStop, AnthropicErrorBody),
)
_RESPONSE_EVENTS = (
    *(responses.ResponseEvent, responses.ItemEvent, responses.PartEvent, responses.TextDelta),
    *(responses.TextDone, responses.ArgumentsDelta, responses.ArgumentsDone),
    responses.ErrorEvent,
)

_MESSAGES = (
    Operation(
        method="post",
        path="/v1/messages",
        summary="An answer in Anthropic's form, streamed or not",
        body=Body((MessagesRequest,), MESSAGE_FIELDS),
        parameters=(SESSION,),
        answers={200: Answer((messages.Message,), events=_MESSAGE_EVENTS, headers=OF_ANSWERS)},
        errors=GENERATING | {529},
        error_bodies=(AnthropicErrorBody,),
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="How many input tokens the same message would have",
        body=Body(
            (MessagesRequest,),
            tuple(row for row in MESSAGE_FIELDS if row.name in COUNTED_FIELDS),
        ),
        answers={200: Answer((messages.TokenCount,))},
        errors=OF_A_MODEL,
        error_bodies=(AnthropicErrorBody,),
    ),
)

_RESPONSES = (
    Operation(
        method="post",
        path="/v1/responses",
        summary="A response, streamed or not, that later ones can go on from",
        body=Body((ResponsesRequest,), RESPONSE_FIELDS),
        answers={
            200: Answer((responses.ResponseBody,), events=_RESPONSE_EVENTS, headers=OF_ANSWERS)
        },
        errors=GENERATING,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A stored response",
        answers={200: Answer((responses.ResponseBody,))},
        errors=OF_A_SESSION,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget a stored response",
        answers={200: Answer((responses.ResponseDeleted,))},
        errors=OF_A_SESSION,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="What a stored response was asked with, in pages",
        parameters=(
            Parameter("order", "query", Order),
            Parameter("limit", "query", PageLimit),
            Parameter("after", "query", str, "the id of an item"),
        ),
        answers={200: Answer((responses.ItemList,))},
        errors=OF_A_SESSION,
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="Refused: no response is in the background",
        answers={},
        errors=OF_A_SESSION | {415},
    ),
)

DIALECTS = (*_MESSAGES, *_RESPONSES)
