"""The table of operations: every route of the server, with what it takes and gives.

Owns nothing that a struct says already. Knows nothing of how any of it is carried out.
"""

from __future__ import annotations

from typing import Any

from service.errors import AnthropicErrorBody, ErrorBody
from service.openapi.dashboard import DASHBOARD
from service.openapi.dialects import DIALECTS
from service.openapi.operation import (
    GENERATING,
    NOT_READY,
    OF_A_MODEL,
    OF_A_SESSION,
    OF_ANSWERS,
    SESSION,
    Access,
    Answer,
    Body,
    Operation,
    Parameter,
    fields_of,
)
from service.request_fields import REQUEST_FIELDS, Endpoint
from service.schemas import bodies, explain, operating, session
from service.schemas.chat import ChatRequest
from service.schemas.completion import CompletionRequest, PromptField
from service.schemas.history import (
    BLOCK_BYTES_HEADER,
    BLOCKS_HEADER,
    LINES,
    HistoryLimit,
    HistoryLine,
)
from service.schemas.message_bodies import ModelInfo, ModelPage
from service.schemas.tokenize import CHAT_FIELDS, Detokenize, Detokenized, Tokenize, Tokenized

__all__ = ["OPERATIONS"]

_ANTHROPIC = Parameter(
    "anthropic-version", "header", str, "any; asks for the form of Anthropic's API"
)
_CHAT_ROWS = tuple(row for row in REQUEST_FIELDS if Endpoint.CHAT in row.endpoints)
_COMPLETION_ROWS = tuple(row for row in REQUEST_FIELDS if Endpoint.COMPLETIONS in row.endpoints)

_OPENAI = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="A chat answer, streamed or not",
        body=Body((ChatRequest,), _CHAT_ROWS),
        parameters=(SESSION,),
        answers={
            200: Answer((bodies.ChatCompletion,), events=(bodies.ChatChunk,), headers=OF_ANSWERS)
        },
        errors=GENERATING,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Text after a prompt",
        body=Body((CompletionRequest, PromptField), _COMPLETION_ROWS),
        parameters=(SESSION,),
        answers={
            200: Answer((bodies.Completion,), events=(bodies.Completion,), headers=OF_ANSWERS)
        },
        errors=GENERATING,
    ),
    Operation(
        method="get",
        path="/v1/models",
        summary="The served names",
        answers={200: Answer((bodies.ModelList, ModelPage))},
        errors=NOT_READY,
        parameters=(_ANTHROPIC,),
        error_bodies=(ErrorBody, AnthropicErrorBody),
    ),
    Operation(
        method="get",
        path="/v1/models/{model_id}",
        summary="One of the served names",
        answers={200: Answer((bodies.ModelEntry, ModelInfo))},
        errors=OF_A_MODEL,
        parameters=(_ANTHROPIC,),
        error_bodies=(ErrorBody, AnthropicErrorBody),
    ),
)

_TOKENS = (
    Operation(
        method="post",
        path="/tokenize",
        summary="A text or a conversation as token ids",
        body=Body(
            (Tokenize, ChatRequest),
            (*fields_of(Tokenize), *(row for row in _CHAT_ROWS if row.name in CHAT_FIELDS)),
            required=frozenset(),
        ),
        answers={200: Answer((Tokenized,))},
        errors=OF_A_MODEL,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Token ids as text",
        body=Body.of(Detokenize),
        answers={200: Answer((Detokenized,))},
        errors=OF_A_MODEL,
    ),
)

_SESSIONS = (
    Operation(
        method="post",
        path="/v1/sessions",
        summary="A session, before its first request",
        body=Body.of(session.CreateSession, may_be_empty=True),
        parameters=(SESSION,),
        answers={201: Answer((session.SessionView,))},
        errors=GENERATING | {409},
    ),
    Operation(
        method="get",
        path="/v1/sessions",
        summary="The caller's sessions, in pages",
        parameters=(
            Parameter("cursor", "query", str, "next_cursor of the page before"),
            Parameter("limit", "query", session.PageLimit),
        ),
        answers={200: Answer((session.SessionList,))},
        errors=frozenset({400, 503}),
    ),
    Operation(
        method="get",
        path="/v1/sessions/{session_id}",
        summary="One of the caller's sessions",
        answers={200: Answer((session.SessionView,))},
        errors=OF_A_SESSION,
    ),
    Operation(
        method="post",
        path="/v1/sessions/{session_id}/fork",
        summary="Another session that goes on from here",
        body=Body.of(session.ForkSession, may_be_empty=True),
        answers={201: Answer((session.SessionView,))},
        errors=OF_A_SESSION | {409},
    ),
    Operation(
        method="post",
        path="/v1/sessions/{session_id}/prewarm",
        summary="Compute or call back its prefix ahead of its next request",
        body=Body.of(session.PrewarmSession, may_be_empty=True),
        answers={200: Answer((session.Prewarmed,))},
        errors=OF_A_SESSION | {429},
    ),
    Operation(
        method="delete",
        path="/v1/sessions/{session_id}",
        summary="Forget a session, and remove what only it has stored",
        answers={200: Answer((session.SessionDeleted,))},
        errors=OF_A_SESSION,
    ),
    Operation(
        method="delete",
        path="/v1/tenants/me/data",
        summary="Forget all sessions of the caller's key, and remove what only they have stored",
        answers={200: Answer((session.DataDeleted,))},
        errors=NOT_READY,
    ),
)

_CACHE = (
    Operation(
        method="post",
        path="/v1/cache/prewarm",
        summary="Compute the KV of messages or of a prompt, and generate nothing",
        body=Body.of(session.PrewarmPrefix),
        parameters=(SESSION,),
        answers={200: Answer((session.Prewarmed,))},
        errors=GENERATING,
    ),
    Operation(
        method="get",
        path="/v1/cache/explain",
        summary="Why the caller's latest requests found no more in the cache",
        parameters=(Parameter("limit", "query", explain.ListLimit),),
        answers={200: Answer((explain.CacheExplanationList,))},
        errors=frozenset({400}),
    ),
    Operation(
        method="get",
        path="/v1/cache/explain/{request_id}",
        summary="Why one of the caller's requests found no more in the cache",
        answers={200: Answer((explain.ExplainedRequest,))},
        errors=frozenset({404}),
    ),
    Operation(
        method="post",
        path="/reset_prefix_cache",
        summary="Drop every cached block that no running request holds, in all tiers",
        access=Access.ADMIN,
        body=Body.of(operating.CacheReset, may_be_empty=True),
        parameters=(Parameter("running", "query", operating.Running, "goes before the body's"),),
        answers={200: Answer((operating.BlocksDropped,))},
        errors=frozenset({409, 503}),
    ),
    Operation(
        method="get",
        path="/v1/cache/history",
        summary="The requests of late, as hashes: a trace, one line of JSON each",
        access=Access.ADMIN,
        parameters=(Parameter("limit", "query", HistoryLimit, "the latest ones; all without it"),),
        answers={
            200: Answer(
                (HistoryLine,), media_type=LINES, headers=(BLOCKS_HEADER, BLOCK_BYTES_HEADER)
            )
        },
        errors=frozenset({400, 404}),
    ),
)

_STATE = (
    Operation(
        method="get",
        path="/health",
        summary="Whether requests are answered",
        access=Access.OPEN,
        answers={200: Answer((operating.Health,))},
        errors=NOT_READY,
    ),
    Operation(
        method="get",
        path="/live",
        summary="Whether the process runs",
        access=Access.OPEN,
        answers={200: Answer((operating.Health,))},
    ),
    Operation(
        method="get",
        path="/version",
        summary="The version",
        access=Access.OPEN,
        answers={200: Answer((operating.Version,))},
    ),
    Operation(
        method="get",
        path="/openapi.json",
        summary="This document",
        access=Access.OPEN,
        answers={200: Answer((dict[str, Any],))},
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Metrics in Prometheus' text format; on loopback without a key, "
        "with a tenant file for operators",
        answers={200: Answer(media_type="text/plain")},
    ),
    Operation(
        method="get",
        path="/load",
        summary="The number of requests in flight",
        answers={200: Answer((operating.Load,))},
    ),
)

OPERATIONS = (*_OPENAI, *DIALECTS, *_TOKENS, *_SESSIONS, *_CACHE, *_STATE, *DASHBOARD)
