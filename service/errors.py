"""Every way a request can fail, and the JSON body that failures are told in.

Owns the error tree, the HTTP status of each, and the two bodies: OpenAI's, and Anthropic's for
whoever speaks that API. Knows nothing of how a failure came about. Messages are written for the
client: they name the field and the limit, and never carry an exception's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model_worker.protocol import ErrorCode, RequestError

__all__ = [
    "AnthropicErrorBody",
    "AnthropicErrorDetail",
    "AuthenticationFailed",
    "BodyTooLarge",
    "Conflict",
    "ContextLengthExceeded",
    "ErrorBody",
    "ErrorDetail",
    "GatewayError",
    "HeadersTooLarge",
    "InternalError",
    "InvalidRequest",
    "ModelNotFound",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "RateLimited",
    "RequestTimeout",
    "Unavailable",
    "UnsupportedMediaType",
    "WorkerLost",
    "error_from_status",
    "error_from_worker",
    "error_response",
    "note_error",
    "noted_error",
    "speaks_anthropic",
]

_encoder = msgspec.json.Encoder()
# https://docs.anthropic.com/en/api/errors; what is not here is invalid or our own failure.
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        529: "overloaded_error",
    }
)


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    error: AnthropicErrorDetail
    request_id: str


class GatewayError(Exception):
    """A failure a client is told about.

    ``param`` is the path of the field at fault (``messages[0].content``) or None. ``retry_after``
    is in whole seconds and becomes a header.
    """

    status = 500
    type = "internal_error"
    code: str | None = None
    anthropic_status: int | None = None  # where it is another than ``status``

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}`` as UTF-8 JSON."""
        return _encoder.encode(
            ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))
        )

    def anthropic_body(self, request_id: str) -> bytes:
        """``{"type": "error", "error": {"type", "message"}, "request_id"}`` as UTF-8 JSON."""
        status = self.anthropic_status or self.status
        default = "api_error" if status >= 500 else "invalid_request_error"
        detail = AnthropicErrorDetail(_ANTHROPIC_TYPES.get(status, default), self.message)
        return _encoder.encode(AnthropicErrorBody(error=detail, request_id=request_id))

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class InvalidRequest(GatewayError):
    status, type = 400, "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"

    def anthropic_body(self, request_id: str) -> bytes:
        """Clients know this case by its first words: there is no code to know it by."""
        told = InvalidRequest(f"prompt is too long: {self.message}")
        return told.anthropic_body(request_id)


class AuthenticationFailed(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class PermissionDenied(GatewayError):
    status, type = 403, "permission_error"


class NotFound(GatewayError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(GatewayError):
    status, type, code = 409, "invalid_request_error", "conflict"


class BodyTooLarge(GatewayError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(GatewayError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(GatewayError):
    status, type, code = 429, "rate_limit_error", "overloaded"
    anthropic_status: int | None = 529


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"
    anthropic_status = None


class RequestTimeout(GatewayError):
    status, type, code = 408, "invalid_request_error", "request_timeout"

    def headers(self) -> dict[str, str]:
        return {"Connection": "close"}  # what may still come is of this request


class HeadersTooLarge(GatewayError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class InternalError(GatewayError):
    pass


class Unavailable(GatewayError):
    status, type, code = 503, "service_unavailable_error", "unavailable"


class WorkerLost(Unavailable):
    code = "worker_lost"


class _OtherStatus(GatewayError):
    """A status that the HTTP framework chose, such as 405."""

    type = "invalid_request_error"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, code=message.lower().replace(" ", "_"))
        self.status = status


def error_from_status(status: int, detail: str) -> GatewayError:
    if status == 404:
        return NotFound("There is nothing at this path.")
    return _OtherStatus(status, detail)


def error_from_worker(error: RequestError | None) -> GatewayError:
    """The client's view of a request that a worker ended without an answer."""
    if error is None:
        return InternalError("The worker ended the request without a reason.")
    match error.code:
        case ErrorCode.INVALID_REQUEST | ErrorCode.NEVER_FITS:
            return InvalidRequest(error.message, param=error.param, code=error.code.value)
        case ErrorCode.CONTEXT_LENGTH:
            return ContextLengthExceeded(error.message, param=error.param)
        case ErrorCode.OVERLOADED:
            return Overloaded(error.message, retry_after=1)
        case ErrorCode.SHUTTING_DOWN:
            return Unavailable(error.message, code=error.code.value, retry_after=5)
        case ErrorCode.WORKER_LOST:
            # The worker's own sentence names its address, which is no business of a client's.
            return WorkerLost("The worker was lost before the answer was complete.", retry_after=5)
        case ErrorCode.INTERNAL:
            return InternalError(error.message, code=error.code.value)


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request, known by its ASGI scope, is one of Anthropic's API."""
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    is_shared = path == "/v1/models" or path.startswith("/v1/models/")
    return is_shared and "anthropic-version" in Headers(scope=scope)


class _ErrorResponse(Response):
    """Written once it is sent: only then is it known who has asked."""

    def __init__(self, error: GatewayError) -> None:
        super().__init__(
            error.body(),
            status_code=error.status,
            headers=error.headers(),
            media_type="application/json",
        )
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        if speaks_anthropic(scope):
            self.body = self._error.anthropic_body(scope.get("headstart_request_id", ""))
            self.status_code = self._error.anthropic_status or self._error.status
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: GatewayError) -> Response:
    return _ErrorResponse(error)


def note_error(scope: Scope, error: GatewayError) -> None:
    """The request of this ASGI scope is answered with ``error``, or its stream ends with it."""
    scope["headstart_error"] = error


def noted_error(scope: Scope) -> GatewayError | None:
    error: GatewayError | None = scope.get("headstart_error")
    return error
