"""The examples of docs/sessions.md, run as they stand there."""

from __future__ import annotations

from typing import Any

from tests.docs_kit import BASE_URL, curl_commands, example, run_curl
from tests.gateway_kit import make_card
from tests.session_kit import talking


def test_the_lines_for_curl() -> None:
    answers = ("Lisbon.", "The Tagus.", "A thousand kilometres.", "The Douro.")
    with talking(*answers, card=make_card(names=("demo",))) as talk:
        commands = curl_commands(example("sessions.md", "sh"))
        responses = [run_curl(command, talk.served.base_url) for command in commands]
        statuses = [response.status_code for response in responses]
        assert statuses == [200, 200, 201, 200, 200, 200, 200]
        histories = [response.json().get("history") for response in responses]
        assert histories == ["exact", "exact", None, "exact", "retokenized", None, None]
        assert responses[5].json()["id"] == "trip"
        assert responses[6].json()["deleted"] is True


def test_the_lines_of_python() -> None:
    with talking("Lisbon.", "The Tagus.", card=make_card(names=("demo",))) as talk:
        code = example("sessions.md", "python").replace(BASE_URL, talk.served.base_url)
        names: dict[str, Any] = {}
        exec(compile(code, "docs/sessions.md", "exec"), names)
        names["client"].close()
        assert names["histories"] == ["exact"] * 5 + ["retokenized"]
        assert {request.retention_s for request in talk.requests} == {600.0, 0.0}
        shown = talk.client.get("/v1/sessions").json()
        assert {entry["id"] for entry in shown["data"]} == {"walk", "walk-2"}
