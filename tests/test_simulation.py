"""`headstart simulate`: traces read, sizes understood, and the figures those of the real cache."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.traces import DATA, source_named
from cache_store.simulation.replay import Capacity, replay
from cache_store.simulation.sweep import device_sizes, ideal
from cache_store.simulation.trace import Trace, TraceError, parse_trace, read_trace
from model_worker.protocol import EXIT_CONFIG
from tests.cli_kit import Command, command_line
from tests.docs_kit import example
from tests.gateway_kit import BLOCK_SIZE, byte_ids_of, ids_of
from tests.http_kit import say, serving

AIRLINE = DATA / source_named("airline").file


def line(**fields: Any) -> str:
    known = {"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [7, 8]}
    return json.dumps(known | fields)


def parsed(*lines: str, block_tokens: int | None = 10) -> Trace:
    return parse_trace(lines, block_tokens)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`headstart simulate` in this process."""
    return command_line(monkeypatch, capsys, "simulate", columns=160)


# ---------------------------------------------------------------- traces


def test_ids_become_small_numbers_whatever_they_are() -> None:
    trace = parsed(
        line(hash_ids=[2**63, -5]),
        "",
        line(timestamp=1500, hash_ids=[2**63, 9], output_hash_ids=[10], input_length=25),
    )
    first, second = trace.requests
    assert first.block_ids.tolist() == [0, 1]
    assert (second.block_ids.tolist(), second.answer_ids.tolist()) == ([0, 2], [3])
    assert (second.arrival_s, second.num_tokens) == (1.5, 25)
    assert (trace.num_unique_blocks, trace.num_longest_blocks, trace.num_blocks) == (4, 3, 4)


def test_the_block_size_is_given_or_said(tmp_path: Path) -> None:
    said = [line(block_size=16), line(block_size=16)]
    assert parsed(*said, block_tokens=None).block_tokens == 16
    file = tmp_path / "plain.jsonl"
    file.write_text("\n".join(said))
    assert read_trace(file).block_tokens == 16
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert len(read_trace(packed).requests) == 2


def test_what_was_found_counts_if_all_lines_say_it() -> None:
    found = line(cached={"device": 3, "host": 2, "disk": 1})
    assert parsed(found, found).num_found_tokens == 12
    assert parsed(found, line()).num_found_tokens is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: no JSON object"),
        (["[]"], "line 1: no JSON object"),
        ([line(), '{"prompt": "x"}'], "line 2: no request of a trace: prompt"),
        ([line(hash_ids=[1, 1])], "line 1: hash_ids has a number twice"),
        ([line(hash_ids=["a"])], "line 1: hash_ids must be a list of whole numbers"),
        ([line(hash_ids=[True])], "line 1: hash_ids must be a list of whole numbers"),
        ([line(input_length=-1)], "line 1: input_length must be a whole number of at least 0"),
        ([line(timestamp="now")], "line 1: timestamp must be a number"),
        ([line(cached=3)], "line 1: cached must be an object"),
        ([line(block_size=8), line(block_size=16)], "line 2: block_size is 16, and 8 before"),
        ([line()], "no line has a block_size, so it has to be given"),
        ([], "there is no request in it"),
    ],
)
def test_what_is_no_trace_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=f"^{message}"):
        parsed(*lines, block_tokens=None)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(line().encode() * 50)[:-9])
    with pytest.raises(TraceError, match=r"torn\.jsonl\.gz is neither text nor whole gzip"):
        read_trace(torn)


# ---------------------------------------------------------------- the replay


def test_what_an_answer_left_is_found_by_the_next_turn() -> None:
    turns = [
        line(hash_ids=[1], input_length=10, output_hash_ids=[2]),
        line(hash_ids=[1, 2, 3], input_length=30),
    ]
    result = replay(parsed(*turns), Capacity(4), "lru")
    assert (result.num_hit_blocks, result.num_hit_tokens, result.num_tokens) == (2, 20, 40)
    without = replay(parsed(line(hash_ids=[1], input_length=10), turns[1]), Capacity(4), "lru")
    assert without.num_hit_blocks == 1


def test_sizes_worth_a_look() -> None:
    trace = parsed(*(line(hash_ids=list(range(n, n + 5))) for n in range(0, 1000, 5)))
    assert device_sizes(trace) == (15, 31, 62, 125, 250, 500)
    assert device_sizes(trace, present=100) == (25, 50, 100, 200, 400)
    assert device_sizes(trace, present=10) == (5, 10, 20, 40)
    assert device_sizes(trace, present=5_000) == (5_000,)
    assert device_sizes(parsed(line())) == (2,)
    assert ideal(trace).result.token_hit_rate == 0.0


# ---------------------------------------------------------------- the command


def test_it_prints_what_the_real_cache_finds(command: Command, tmp_path: Path) -> None:
    picture, file = tmp_path / "curve.png", tmp_path / "beginning.jsonl"
    with gzip.open(AIRLINE, "rt") as lines:
        file.write_text("".join(itertools.islice(lines, 300)))
    code, out, _ = command(
        file, "--block-size", 64, "--device", "200,1MB", "--bytes-per-token", 64,
        "--policy", "lru", "--prefill-speed", 1000, "--json", "--plot", picture,
    )  # fmt: skip
    assert code == 0
    report = json.loads(out)
    trace = read_trace(file, 64)
    assert [row["device"] for row in report["rows"]] == [200, 1_000_000 // (64 * 64)]
    for row in report["rows"]:
        exact = replay(trace, Capacity(row["device"]), "lru")
        assert (row["hit_rate"], row["num_saved_tokens"]) == (
            exact.token_hit_rate,
            exact.num_hit_tokens,
        )
        assert row["saved_s"] == exact.num_hit_tokens / 1000
    unbounded = replay(trace, Capacity(trace.num_unique_blocks), "lru")
    assert report["ideal"]["hit_rate"] == unbounded.token_hit_rate > 0.9
    assert (report["num_requests"], report["served_hit_rate"]) == (300, None)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tiers_are_told_apart_in_the_table(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    turns = [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    file.write_text("\n".join(line(hash_ids=ids, input_length=30) for ids in turns))
    code, out, _ = command(
        file, "--block-size", 10, "--device", 3, "--host", "0,9", "--policy", "lru"
    )
    assert code == 0
    rows = [text.split() for text in out.splitlines() if text.startswith(("lru", "any"))]
    assert rows == [
        ["lru", "3", "-", "-", "0.0%", "-", "-", "0", "0%"],
        ["lru", "3", "9", "-", "33.3%", "33.3%", "-", "30", "100%"],
        ["any", "6", "-", "-", "33.3%", "-", "-", "30", "100%"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a TRACE file or --url, one of the two"),
        (["{}", "--url", "http://x"], "give a TRACE file or --url, one of the two"),
        (["/nowhere"], "TRACE: cannot read /nowhere: No such file or directory"),
        (["{}"], "TRACE: {}: no line has a block_size, so it has to be given; give --block-size"),
        (["{}", "--block-size", "0"], "--block-size: must be at least 1, got 0"),
        (
            ["{}", "--block-size", "9", "--device", "2"],
            "--device: 2 blocks cannot hold the longest request, which has 3",
        ),
        (
            ["{}", "--block-size", "9", "--host", "4GB"],
            "--host: 4GB is in bytes, and a trace does not say what a block takes: give "
            "--bytes-per-token, or a number of blocks",
        ),
        (
            ["{}", "--block-size", "9", "--disk", "much"],
            "--disk: expected a size such as 512MB or 4GiB, got 'much', or a number of blocks",
        ),
        (
            ["{}", "--block-size", "9", "--policy", "mru"],
            "--policy: expected one of lru, adaptive, lfu, fifo, got 'mru'",
        ),
        (
            ["{}", "--block-size", "9", "--device", ",".join(map(str, range(10, 75)))],
            "--device, --host, --disk and --policy: 130 combinations, and at most 64 are run",
        ),
        (["{}", "--plot", "a.jpg"], "--plot: the file's name must end in .png, got 'a.jpg'"),
        (["{}", "--plot", "/nowhere/a.png"], "--plot: there is no folder /nowhere"),
    ],
)
def test_mistakes_get_one_line(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(line(hash_ids=[1, 2, 3]))
    code, out, err = command(*(text.replace("{}", str(file)) for text in arguments))
    assert (code, out) == (EXIT_CONFIG, "")
    assert err == f"headstart: {message.replace('{}', str(file))}\n"


def test_without_matplotlib_it_says_which_extra(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    code, _, err = command(AIRLINE, "--plot", "a.png")
    assert code == EXIT_CONFIG
    assert err == (
        "headstart: --plot: needs matplotlib, which is not installed here: "
        "pip install 'headstart[plot]'\n"
    )


# ---------------------------------------------------------------- of a running server


def test_a_servers_own_history(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = list(ids_of("The Danube, the Loire and the Vistula flow to three seas. " * 4))
    answer = "Indeed they do, all of them."
    with serving(say(answer), api_keys=("user",), admin_keys=("root",)) as served:
        with served.client(headers={"Authorization": "Bearer user"}) as client:
            cached = total = 0
            for prompt in (words, [*words, *byte_ids_of(answer), *words]):
                body = {"model": served.model, "prompt": prompt, "max_tokens": 64}
                usage = client.post("/v1/completions", json=body).json()["usage"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
        assert command("--url", served.base_url)[0] == 1
        monkeypatch.setenv("HEADSTART_API_KEY", "user")
        code, out, err = command("--url", served.base_url)
        assert (code, out) == (1, "")
        assert "wants an admin key for /v1/cache/history: set HEADSTART_API_KEY (403: " in err
        monkeypatch.setenv("HEADSTART_API_KEY", "root")
        code, out, _ = command("--url", served.base_url, "--json", "--policy", "lru")
        table = command("--url", served.base_url)[1]
    assert code == 0
    report = json.loads(out)
    num_blocks = served.worker.stats.num_blocks
    assert report["served_hit_rate"] == pytest.approx(cached / total)
    assert report["block_bytes"] == BLOCK_SIZE * 1024
    (row,) = report["rows"]
    assert (row["device"], row["is_present"]) == (num_blocks, True)
    whole = (len(words) + len(answer)) // BLOCK_SIZE * BLOCK_SIZE
    assert row["num_saved_tokens"] == report["ideal"]["num_saved_tokens"] == whole
    assert f"The server itself found {cached / total:.1%} of them." in table
    assert f"lru * {num_blocks:,} 34.6%" in " ".join(table.split())


def test_nobody_there_gets_one_line(command: Command) -> None:
    code, out, err = command("--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err == "headstart: nothing answers at http://127.0.0.1:9: is the server running?\n"


def test_a_server_without_requests_says_so(command: Command) -> None:
    with serving(say("x")) as served:
        _, _, err = command("--url", served.base_url)
        assert err.endswith("has served no request yet, so there is nothing to simulate\n")


def test_the_guides_example_is_what_it_prints(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(example("simulate.md", "sh", "The simulation").replace("\\\n", " "))
    monkeypatch.chdir(DATA.parent.parent)
    code, out, _ = command(*words[2:])
    assert (code, words[:2]) == (0, ["headstart", "simulate"])
    printed = example("simulate.md", "text", "The simulation")
    assert [line.rstrip() for line in out.splitlines()] == printed.splitlines()
