"""POST /tokenize and /detokenize: a text or a conversation as token ids, and back."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.gateway import gateway_of
from service.routes.chat import conversation_of
from service.schemas import bodies
from service.schemas.tokenize import Detokenized, Tokenized, parse_detokenize, parse_tokenize
from service.security import read_body
from service.vocabulary import readable

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """What the same prompt or conversation would be in a request, and how many tokens that is."""
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    given, chat = parse_tokenize(content, gateway.default_model())
    model = gateway.model(given.model or gateway.default_model())
    if chat is not None:
        conversation = conversation_of(chat, is_canonical=gateway.config.canonical_tools)
        ids = await model.encode_chat(conversation, is_bounded=False)
    else:
        assert given.text is not None
        ids = await model.encode_text(
            given.text, add_special_tokens=given.adds_special_tokens, is_bounded=False
        )
    tokens: list[int] = ids.tolist()
    vocabulary = model.tokenizer.vocabulary
    pieces = [readable(vocabulary.token_bytes(token)) for token in tokens]
    body = Tokenized(
        count=len(tokens),
        max_model_len=model.card.max_model_len,
        tokens=tokens,
        token_strs=pieces if given.has_pieces else None,
    )
    return _json(body)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    content = await read_body(request, gateway.config.max_body_size)
    given = parse_detokenize(content)
    model = gateway.model(given.model or gateway.default_model())
    model.check_in_vocabulary(given.tokens, "tokens")
    text = model.tokenizer.decode_exactly(given.tokens)
    return _json(Detokenized(text, text))


def _json(body: msgspec.Struct) -> Response:
    return Response(bodies.encode(body), media_type="application/json")
