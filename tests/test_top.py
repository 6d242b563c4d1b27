"""`headstart top`: one frame of a real gateway, and what it does when the server goes away."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from model_worker.protocol import EXIT_CONFIG
from service.operator_client import OperatorClient, ServerError
from service.top import command as top_command
from service.top.data import Look, Rates, look, rates_between
from service.top.frame import frame
from tests.cli_kit import Command, command_line
from tests.http_kit import Served, repeat, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        repeat("one two "), api_keys=("user",), admin_keys=("root",), token_interval=0.001
    ) as found:
        body = {"model": found.model, "prompt": "The Danube, the Loire. " * 30, "max_tokens": 5}
        with found.client(headers={"Authorization": "Bearer user"}) as client:
            for _ in range(3):
                assert client.post("/v1/completions", json=body).status_code == 200
        yield found


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capsys, "top", columns=140)


def seen_at(served: Served) -> Look:
    operator = top_command.config.operator_config({"api_key": "root"}, served.base_url)
    with served.client() as http:
        return look(OperatorClient(operator, http), 10)


def drawn(seen: Look, rates: Rates | None = None, problem: str = "") -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(frame("http://here", seen, rates, problem))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_one_frame_shows_what_the_server_measured(served: Served, command: Command) -> None:
    code, out, err = command(served.base_url, "--once", HEADSTART_API_KEY="root")
    assert (code, err) == (0, "")
    with served.client(headers={"Authorization": "Bearer root"}) as client:
        data = client.get("/dashboard/data").json()
    shown = rows(out)
    assert shown[0].startswith(f"{served.model} at {served.base_url} up ")
    assert shown[1].startswith("ready: 1 worker takes requests, for ")
    assert shown[4].startswith(f"1m {data['windows']['1m']['hit_rate']['rate']:.1%} ")
    totals = data["totals"]
    assert f"{totals['prompt_tokens']:,} prompt, {totals['cached_tokens']:,} of them cached" in out
    assert "requests 0 running, 0 waiting, 0 queued; ended: 3 length; 0 sessions" in shown
    memory = data["memory"][0]
    (device,) = [line for line in shown if line.startswith("device ")]
    assert device.endswith(f"0 {memory['evictable']:,} {memory['free']:,} 0.02 GiB")
    assert any(line.startswith("fake ready cpu 0 0 ") for line in shown)
    latest = shown[-3:]
    assert all(" length" in line for line in latest)
    assert [line.split()[3] for line in latest][-1] == "0"  # the first of all found nothing
    assert "now" not in [line.split(" ")[0] for line in shown]


def test_speeds_are_of_the_time_between_two_looks(served: Served) -> None:
    first = seen_at(served)
    data = first.data
    totals = msgspec.structs.replace(
        data.totals,
        prompt_tokens=data.totals.prompt_tokens + 600,
        cached_tokens=data.totals.cached_tokens + 400,
        generated_tokens=data.totals.generated_tokens + 20,
    )
    later = replace(
        first,
        data=msgspec.structs.replace(
            data, at=data.at + 4.0, uptime_s=data.uptime_s + 4.0, totals=totals
        ),
    )
    rates = rates_between(first, later)
    assert rates == Rates(50.0, 100.0, 5.0)
    shown = rows(drawn(later, rates))
    assert "now 50 prefilled, 100 saved, 5 generated tokens a second" in shown
    assert rates_between(None, later) is None
    assert rates_between(later, first) is None  # the server was started anew


def test_names_are_text_and_no_markup(served: Served) -> None:
    first = seen_at(served)
    row = msgspec.structs.replace(first.requests[0], tenant="[red]x[/red]", outcome="error")
    assert "[red]x[/red]" in drawn(replace(first, requests=[row]))


def test_a_key_that_may_not_gets_one_line(served: Served, command: Command) -> None:
    code, out, err = command(served.base_url, "--once", HEADSTART_API_KEY="user")
    assert (code, out) == (1, "")
    assert "wants an admin key for /dashboard/data: set HEADSTART_API_KEY (403: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["http://127.0.0.1:9"], 1, "nothing answers at http://127.0.0.1:9: is the server "
         "running?"),
        (["ftp://x"], EXIT_CONFIG, "URL: expected an address such as http://127.0.0.1:8000, "
         "got 'ftp://x'"),
        (["--interval", "0"], EXIT_CONFIG, "--interval: must be at least 0.1, got 0"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(
    command: Command, arguments: list[str], code: int, line: str
) -> None:
    assert command(*arguments) == (code, "", f"headstart: {line}\n")


def test_a_server_of_another_form_is_said_by_field(served: Served) -> None:
    class Other(OperatorClient):
        def json(self, path: str) -> dict[str, object]:
            return {"at": "noon"}

    operator = top_command.config.operator_config({"api_key": None}, served.base_url)
    with served.client() as http, pytest.raises(ServerError, match=r"another version.*\$\.at"):
        look(Other(operator, http), 1)


def test_a_server_that_goes_away_is_said_and_asked_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    answers = [seen_at(served), ServerError("nothing answers"), seen_at(served)]

    def looked(*_: object) -> Look:
        found = answers.pop(0)
        if isinstance(found, ServerError):
            raise found
        return found

    def paused(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("service.top.data.look", looked)
    monkeypatch.setattr(top_command.time, "sleep", paused)
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    operator = top_command.config.operator_config({"api_key": None}, served.base_url)
    with served.client() as http, pytest.raises(KeyboardInterrupt):
        top_command._watch(console, served.base_url, OperatorClient(operator, http), 0.5)
    assert pauses == [0.5, 0.5, 0.5]
    assert isinstance(console.file, io.StringIO)
    assert "nothing answers" in console.file.getvalue()
    assert "tokens a second" in console.file.getvalue()
