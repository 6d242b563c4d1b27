"""An operator's look at a running server over HTTP, for commands in a terminal.

Owns how a server is asked and how a failure to be answered is told: one line. Knows nothing of what
the answers mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from service.config import OperatorConfig

__all__ = ["OperatorClient", "ServerError"]

_TIMEOUT = httpx.Timeout(10.0, read=60.0)


class ServerError(Exception):
    """The server cannot be reached or refused; one line."""


class OperatorClient:
    """Belongs to one thread. Raises ServerError for whatever goes wrong on the way."""

    def __init__(self, operator: OperatorConfig, http: httpx.Client) -> None:
        self._url = operator.url
        self._http = http
        self._headers = {"Authorization": f"Bearer {operator.api_key}"} if operator.api_key else {}

    def get(self, path: str) -> httpx.Response:
        """The answer, whole; of a status that says it went well."""
        try:
            response = self._http.get(f"{self._url}{path}", headers=self._headers)
        except httpx.ConnectError:
            raise ServerError(f"nothing answers at {self._url}: is the server running?") from None
        except httpx.HTTPError as error:
            reason = type(error).__name__
            raise ServerError(f"the connection to {self._url} broke: {reason}") from None
        if response.status_code in (401, 403):
            raise ServerError(
                f"{self._url} wants an admin key for {path}: set HEADSTART_API_KEY "
                f"({_message(response)})"
            )
        if not response.is_success:
            raise ServerError(f"{self._url}{path} answered {_message(response)}")
        return response

    def json(self, path: str) -> dict[str, Any]:
        response = self.get(path)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"{self._url} is no headstart server: {path} is no JSON object")
        return found


@contextmanager
def connected(operator: OperatorConfig) -> Iterator[OperatorClient]:
    with httpx.Client(timeout=_TIMEOUT) as http:
        yield OperatorClient(operator, http)


def _message(response: httpx.Response) -> str:
    """The server's own words, if it has any, behind the status."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = ""
    return (
        f"{response.status_code}: {said}"
        if isinstance(said, str) and said
        else str(response.status_code)
    )
