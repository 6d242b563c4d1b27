"""Every failure has OpenAI's body and the right status."""

from __future__ import annotations

import json

import pytest

from model_worker.protocol import ErrorCode, RequestError
from service import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("m"), 400, "invalid_request_error", None),
        (
            errors.ContextLengthExceeded("m"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (errors.AuthenticationFailed("m"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("m", code="c"), 403, "permission_error", "c"),
        (errors.ModelNotFound("m"), 404, "invalid_request_error", "model_not_found"),
        (errors.BodyTooLarge("m"), 413, "invalid_request_error", "request_too_large"),
        (errors.Overloaded("m"), 429, "rate_limit_error", "overloaded"),
        (errors.InternalError("m"), 500, "internal_error", None),
        (errors.WorkerLost("m"), 503, "service_unavailable_error", "worker_lost"),
        (
            errors.error_from_status(405, "Method Not Allowed"),
            405,
            "invalid_request_error",
            "method_not_allowed",
        ),
    ],
)
def test_body_and_status(
    error: errors.GatewayError, status: int, kind: str, code: str | None
) -> None:
    response = errors.error_response(error)
    assert response.status_code == status
    body = json.loads(response.body)
    assert body == {"error": {"message": error.message, "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_REQUEST, 400),
        (ErrorCode.CONTEXT_LENGTH, 400),
        (ErrorCode.NEVER_FITS, 400),
        (ErrorCode.OVERLOADED, 429),
        (ErrorCode.SHUTTING_DOWN, 503),
        (ErrorCode.WORKER_LOST, 503),
        (ErrorCode.INTERNAL, 500),
    ],
)
def test_every_error_of_a_worker_has_a_status(code: ErrorCode, status: int) -> None:
    error = errors.error_from_worker(RequestError(code=code, message="m", param="p"))
    assert error.status == status
    assert error.code == code.value


def test_an_ending_without_a_reason_is_internal() -> None:
    assert errors.error_from_worker(None).status == 500


def test_a_lost_workers_address_stays_here() -> None:
    lost = RequestError(code=ErrorCode.WORKER_LOST, message="worker ipc:///run/x: lost")
    assert "ipc" not in errors.error_from_worker(lost).message
