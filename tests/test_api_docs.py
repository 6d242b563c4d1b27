"""The examples of docs/api.md, run as they stand there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs_kit import BASE_URL, curl_commands, example, run_curl
from tests.gateway_kit import make_card
from tests.session_kit import talking


@pytest.mark.parametrize(
    ("section", "printed"), [("Messages", "Lisbon.\nPorto."), ("Responses", "Lisbon.\nThe Tagus.")]
)
def test_the_examples_of_each_api(
    section: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = printed.split("\n")
    with talking("Nice.", first, second, card=make_card(names=("demo",))) as talk:
        (command,) = curl_commands(example("api.md", "sh", section))
        response = run_curl(command, talk.served.base_url)
        assert response.status_code == 200, response.text
        code = example("api.md", "python", section).replace(BASE_URL, talk.served.base_url)
        names: dict[str, Any] = {}
        exec(compile(code, "docs/api.md", "exec"), names)
        names["client"].close()
        assert capsys.readouterr().out == printed
