"""The command as a person starts it: what it says when something is wrong, and a short chat."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from model_worker.protocol import EXIT_CONFIG
from service import __version__
from tests.cli_kit import Command, command_line
from tests.http_kit import say, serving

ROOT = Path(__file__).resolve().parent.parent


def headstart(
    *arguments: str, stdin: str = "", timeout: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADSTART_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        cwd=ROOT,
        env={**environ, "COLUMNS": "200", **variables},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line a failed command has said."""
    assert result.returncode != 0
    assert result.stdout == ""
    return only_line(result.stderr)


def only_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process."""
    return command_line(monkeypatch, capsys, columns=200)


def test_the_version() -> None:
    result = headstart("--version")
    assert (result.returncode, result.stdout) == (0, f"headstart {__version__}\n")


@pytest.mark.parametrize(
    ("command", "flag", "other"),
    [
        ("serve", "--max-model-len", "--link-endpoint"),
        ("gateway", "--worker", "--max-model-len"),
        ("worker", "--link-endpoint", "--port"),
        ("chat", "--url", "--api-key"),
    ],
)
def test_each_command_has_its_own_options(
    here: Command, command: str, flag: str, other: str
) -> None:
    code, out, _ = here(command, "--help")
    assert code == 0
    flags = set(re.findall(r"--[a-z-]+", out))
    assert flag in flags
    assert other not in flags


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--modle", "x"], "headstart: No such option: --modle"),
        (["sreve"], "headstart: No such command 'sreve'."),
        (["serve", "--port", "http"], "headstart: --port: expected a whole number, got 'http'"),
        (["serve", "--block-size", "12"], "headstart: --block-size: expected one of 8, 16"),
        (["serve", "--host", "0.0.0.0"], "headstart: --host 0.0.0.0 can be reached from other"),
        (
            ["serve", "--api-key-file", "/nowhere"],
            "headstart: --api-key-file: cannot read /nowhere",
        ),
        (["gateway"], "headstart: headstart gateway needs at least one --worker endpoint"),
        (["worker"], "headstart: headstart worker needs a --link-endpoint"),
        (["chat", "--url", "ftp://x"], "headstart: --url: expected an address such as http://"),
    ],
)
def test_mistakes_get_one_line(here: Command, arguments: list[str], line: str) -> None:
    code, out, err = here(*arguments)
    assert code in (2, EXIT_CONFIG)
    assert out == ""
    assert only_line(err).startswith(line)


def test_an_unknown_variable_gets_one_line() -> None:
    assert refusal(headstart("serve", HEADSTART_MAX_QUEU="3")) == (
        "headstart: unknown environment variable HEADSTART_MAX_QUEU; "
        "did you mean HEADSTART_MAX_QUEUE?"
    )


def test_a_variable_is_read_and_checked(here: Command) -> None:
    code, _, err = here("serve", HEADSTART_DTYPE="int3")
    assert code == EXIT_CONFIG
    assert only_line(err) == (
        "headstart: HEADSTART_DTYPE: expected one of auto, float32, bfloat16, float16, got 'int3'"
    )


def test_without_a_command_it_shows_its_help(here: Command) -> None:
    code, out, _ = here()
    assert code == 2
    assert "serve" in out


def test_a_port_that_is_taken_gets_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(headstart("serve", "--port", str(port)))
    assert line == f"headstart: --port {port}: another program already listens there on 127.0.0.1"


def test_a_model_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    result = headstart("serve", "--port", "0", "--model", str(missing), timeout=120)
    assert result.returncode == EXIT_CONFIG
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if str(missing) in line]
    assert line.startswith(("error: ", "headstart: "))


def test_settings_are_printed_as_markdown(here: Command) -> None:
    code, out, _ = here("settings")
    assert code == 0
    assert "| `--port` | `HEADSTART_PORT` | 8000 | serve, gateway |" in out


def test_a_chat_shows_what_was_cached() -> None:
    with serving(say("Danube, Loire, Vistula."), token_interval=0.002) as served:
        lines = "Name three rivers.\n\nName three more.\n/what\n/reset\nName three rivers.\n/exit\n"
        result = headstart("chat", "--url", served.base_url, stdin=lines)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{served.model} at {served.base_url}\n")
    assert result.stdout.count("Danube, Loire, Vistula.") == 3
    counts = [
        (int(cached), int(prompt))
        for cached, prompt in re.findall(r"(\d+) of (\d+) prompt tokens cached", result.stdout)
    ]
    (first_cached, first_prompt), (second_cached, second_prompt), third = counts
    assert first_cached == 0
    assert second_prompt > first_prompt
    assert second_cached > first_prompt / 2
    assert third == (first_prompt - 1, first_prompt)
    assert len(re.findall(r"first token after \d+\.\d\d s · \d+\.\d tokens/s", result.stdout)) == 3
    assert "forgotten" in result.stdout


def test_a_chat_sends_its_key() -> None:
    with serving(say("Hello."), api_keys=("sesame",)) as served:
        refused = headstart("chat", "--url", served.base_url, stdin="Hi\n")
        let_in = headstart(
            "chat", "--url", served.base_url, stdin="Hi\n", HEADSTART_API_KEY="sesame"
        )
    assert "API key" in refusal(refused)
    assert let_in.returncode == 0
    assert "Hello." in let_in.stdout


def test_a_chat_with_an_unknown_model_goes_on() -> None:
    with serving(say("Hello.")) as served:
        result = headstart(
            "chat", "--url", served.base_url, "--model", "other", stdin="Hi\n/exit\n"
        )
    assert result.returncode == 0
    assert "The model 'other' is not served here" in result.stdout


def test_a_chat_without_a_server_gets_one_line(here: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    code, _, err = here("chat", "--url", url)
    assert code == 1
    assert only_line(err) == f"headstart: nothing answers at {url}/v1: is the server running?"
