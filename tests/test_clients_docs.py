"""The examples of docs/clients.md, run as they stand there."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.docs_kit import BASE_URL, curl_commands, example, run_curl
from tests.gateway_kit import make_card
from tests.session_kit import Talk, talking

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking(card=make_card(names=("demo",))) as talk:
        yield talk
    with warnings.catch_warnings():  # LangChain keeps its connections
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_the_command(talk: Talk) -> None:
    talk.answers[:] = ["Lisbon."]
    (command,) = curl_commands(example("clients.md", "sh"))
    answer = run_curl(command, talk.served.base_url).json()
    assert answer["choices"][0]["message"]["content"] == "Lisbon."


@pytest.mark.parametrize("section", ["OpenAI", "Anthropic", "LangChain"])
def test_the_example_of_each_client(
    talk: Talk, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.answers[:] = ["Lisbon."]
    code = example("clients.md", "python", section).replace(BASE_URL, talk.served.base_url)
    exec(compile(code, "docs/clients.md", "exec"), {})
    assert capsys.readouterr().out == "Lisbon."
