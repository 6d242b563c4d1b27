"""The comparison with other servers: its arithmetic, its file, its client and its children."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import summary
from benchmarks.peers import process as process_module
from benchmarks.peers import table
from benchmarks.peers.client import Answer, CompletionClient
from benchmarks.peers.goals import GOALS, Goal, evaluate
from benchmarks.peers.limits import DEMO, decode_step_s, limits, prefill_s
from benchmarks.peers.machine import Machine
from benchmarks.peers.peer import all_peers
from benchmarks.peers.plot import plot
from benchmarks.peers.process import ServerProcess
from benchmarks.peers.prompts import question, shared_prompt
from benchmarks.peers.record import Piece, empty, extend, merge, read
from benchmarks.peers.replay import NUM_CHATS, NUM_REQUESTS, chats
from benchmarks.peers.settings import TIGHT, WIDE, Places
from benchmarks.peers.workloads import WORKLOADS, sessions, shared_8

MACHINE = Machine(100.0, 90.0, 20.0, 19.0)


def make_piece(
    samples: dict[str, dict[str, dict[str, list[float]]]],
    skipped: dict[str, str] | None = None,
    runs: int = 1,
) -> Piece:
    names = {name for by_peer in samples.values() for name in by_peer}
    peers = {
        name: {
            "title": name.title(),
            "version": "1",
            "weight_format": name.split("-")[1],
            "note": "",
            "command": name,
            "start_s": 3.0,
            "idle_share": 0.01,
            "resident_bytes": 2**30,
        }
        for name in sorted(names)
    }
    return Piece({"runs": runs}, MACHINE.as_json(), peers, samples, skipped or {})


def one_user(warm: list[float], decode: float = 20.0) -> dict[str, list[float]]:
    return {
        "warm_ttft_s": warm,
        "decode_tokens_per_s": [decode],
        "prompt_tokens": [1300.0],
        "cached_tokens": [],
    }


# -- the machine's limits


def test_a_decode_step_reads_all_weights_and_the_kv_once() -> None:
    weights = 30 * (576 * 64 * 2 * 12 + 3 * 576 * 1536) + 576 * 49_152
    assert weights == 134_479_872 == DEMO.layer_weights + DEMO.head_weights
    assert decode_step_s(MACHINE, "f32", 0) == pytest.approx(4 * weights / 20e9)
    added = decode_step_s(MACHINE, "f32", 1000) - decode_step_s(MACHINE, "f32", 0)
    assert added == pytest.approx(46_080 * 1000 / 20e9)
    q4 = DEMO.layer_weights * 20 / 32 + DEMO.head_weights * 34 / 32
    assert decode_step_s(MACHINE, "q4_1", 0) == pytest.approx(q4 / 20e9)


def test_a_prefill_is_bound_by_arithmetic_or_by_reading_the_weights() -> None:
    attention = 4 * 30 * 9 * 64 * 1000 * 500
    linear = 2 * (DEMO.layer_weights * 1000 + DEMO.head_weights)
    assert prefill_s(MACHINE, "f32", 1000, 0) == pytest.approx((attention + linear) / 100e9)
    assert prefill_s(MACHINE, "f32", 1, 2000) == decode_step_s(MACHINE, "f32", 2000)


def test_limits_are_in_the_units_of_their_metrics() -> None:
    found = limits("shared_1", {"prompt_tokens": [1300.0]}, "f32", MACHINE)
    assert found == {
        "cold_ttft_s": prefill_s(MACHINE, "f32", 1300, 0),
        "warm_ttft_s": prefill_s(MACHINE, "f32", 30, 1270),
        "decode_tokens_per_s": 1 / decode_step_s(MACHINE, "f32", 1300),
    }
    together = limits("shared_8", {"prompt_tokens": [1300.0]}, "f32", MACHINE)
    assert together == {"tokens_per_s": 8 / decode_step_s(MACHINE, "f32", 1270 + 8 * 30)}
    assert limits("tau_replay", {"prompt_tokens": [1300.0]}, "f32", MACHINE) == {}


# -- the file


def test_turns_add_up_and_the_median_is_of_them_all() -> None:
    samples = one_user([0.5, 0.1])
    extend(samples, one_user([0.3], decode=40.0))
    merged = merge(empty(), make_piece({"shared_1": {"vllm-f32": samples}}))
    figures = merged["summary"]["shared_1"]["vllm-f32"]
    assert figures["warm_ttft_s"]["median"] == 0.3
    assert (figures["warm_ttft_s"]["min"], figures["warm_ttft_s"]["max"]) == (0.1, 0.5)
    assert figures["decode_tokens_per_s"]["median"] == 30.0
    assert "cached_tokens" not in figures


def test_distance_to_the_limit_grows_for_times_and_for_rates() -> None:
    merged = merge(empty(), make_piece({"shared_1": {"vllm-f32": one_user([0.6], decode=10.0)}}))
    figures = merged["summary"]["shared_1"]["vllm-f32"]
    warm, step = prefill_s(MACHINE, "f32", 30, 1270), decode_step_s(MACHINE, "f32", 1300)
    assert figures["warm_ttft_s"]["of_limit"] == round(0.6 / warm, 2) > 1
    assert figures["decode_tokens_per_s"]["of_limit"] == round(1 / step / 10.0, 2) > 1


def test_a_later_piece_replaces_what_it_measured_and_leaves_the_rest() -> None:
    first = make_piece(
        {"shared_1": {"vllm-f32": one_user([0.5]), "llama-q4_1": one_user([0.2])}},
        {"transformers-f32": "no --transformers-python given"},
    )
    before = merge(empty(), first)
    kept = json.dumps(before)
    after = merge(before, make_piece({"shared_1": {"vllm-f32": one_user([0.4])}}))
    assert json.dumps(before) == kept  # the earlier one is not changed
    entries = after["samples"]["shared_1"]
    assert (entries["vllm-f32"]["piece"], entries["llama-q4_1"]["piece"]) == (2, 1)
    assert after["summary"]["shared_1"]["vllm-f32"]["warm_ttft_s"]["median"] == 0.4
    assert after["skipped"] == {"transformers-f32": "no --transformers-python given"}
    whole = merge(after, make_piece({"shared_1": {"llama-q4_1": one_user([0.3])}}))
    assert whole["pieces"][0] == {"number": 1, "replaced": True}
    assert [piece["number"] for piece in whole["pieces"]] == [1, 2, 3]


def test_a_peer_that_was_measured_is_not_called_skipped() -> None:
    before = merge(empty(), make_piece({}, {"vllm-f32": "no --vllm-python given"}))
    after = merge(before, make_piece({"shared_1": {"vllm-f32": one_user([0.4])}}))
    assert after["skipped"] == {}


def test_the_file_of_another_benchmark_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read(path) == empty()
    path.write_text(json.dumps({"benchmark": "tree", "results": {}}))
    with pytest.raises(ValueError, match="not a file of this benchmark"):
        read(path)


# -- goals


@pytest.mark.parametrize(
    ("at_least", "ratio", "reached"),
    [(False, 0.6, True), (False, 0.61, False), (True, 0.6, True), (True, 0.59, False)],
)
def test_a_goal_is_reached_at_its_bound(at_least: bool, ratio: float, reached: bool) -> None:
    goal = Goal("x", "shared_1", "warm_ttft_s", "a", "b", 0.6, at_least)
    assert goal.is_reached(ratio) is reached


def test_goals_compare_only_what_took_turns() -> None:
    medians = {
        "shared_1": {
            "headstart-f32": {"warm_ttft_s": 0.15, "decode_tokens_per_s": 15.0},
            "vllm-f32": {"warm_ttft_s": 0.3, "decode_tokens_per_s": 12.6},
        }
    }
    together = {"shared_1": {"headstart-f32": 1, "vllm-f32": 1}}
    rows = {(r["metric"], r["ours"], r["peer"]): r for r in evaluate(medians, together)}
    warm = rows["warm_ttft_s", "headstart-f32", "vllm-f32"]
    assert (warm["ratio"], warm["reached"], warm["bound"]) == (0.5, True, "<= 0.6 x")
    decode = rows["decode_tokens_per_s", "headstart-f32", "vllm-f32"]
    assert (decode["ratio"], decode["reached"], decode["bound"]) == (1.19, False, ">= 1.25 x")
    apart = {"shared_1": {"headstart-f32": 2, "vllm-f32": 1}}
    assert all(row["ratio"] is None for row in evaluate(medians, apart))


def test_every_goal_names_a_workload_a_peer_and_a_metric_that_exist() -> None:
    known = {peer.name for peer in all_peers(Places(Path("model")))}
    for goal in GOALS:
        assert {goal.ours, goal.peer} <= known
        assert goal.workload in {workload.name for workload in WORKLOADS}
        assert goal.metric in table.METRICS


# -- the table and the picture


def test_the_table_says_what_was_measured_reached_and_skipped(tmp_path: Path) -> None:
    both = {
        "headstart-f32": one_user([0.15], decode=10.0),
        "vllm-f32": one_user([0.3], decode=12.5),
    }
    results = merge(empty(), make_piece({"shared_1": both}, {"llama-q4_1": "no --llama-server"}))
    text = table.tables(results)
    assert "100 GFLOP/s" in text
    assert "20.0 GB/s" in text
    lines = text.splitlines()
    assert (
        "| TTFT, prompt stored: Headstart-F32 to Vllm-F32 | 0.15 s | 0.3 s | 0.50 x | <= 0.6 x "
        "| yes |" in lines
    )
    assert (
        "| Decode alone: Headstart-F32 to Vllm-F32 | 10 tokens/s | 12.5 tokens/s | 0.80 x "
        "| >= 1.25 x | **no** |" in lines
    )
    assert "| llama-q4_1 | not measured: no --llama-server | - | - | - |" in lines
    warm = [line for line in lines if line.startswith("| Shared prompt, one user | TTFT")]
    assert [line.split(" | ")[2:4] for line in warm] == [
        ["Headstart-F32", "0.15 s"],
        ["Vllm-F32", "0.3 s"],
    ]
    plot(results, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_without_measurements_the_table_says_so() -> None:
    assert table.tables(empty()) == "Nothing measured yet."


def test_the_document_has_the_figures_of_the_results() -> None:
    document = table.DOCUMENT.read_text(encoding="utf-8")
    fresh = summary.put_into(document, table.tables(read(table.RESULTS / "peers.json")))
    assert document == fresh, "python -m benchmarks.peers.table --write"


# -- peers


def test_a_peer_that_is_not_there_says_why(tmp_path: Path) -> None:
    places = Places(tmp_path, vllm_python=tmp_path / "python3")
    reasons = {peer.name: peer.unavailable for peer in all_peers(places)}
    assert reasons["headstart-f32"] is None
    assert reasons["vllm-f32"] == "--vllm-python: there is no python3"
    assert reasons["llama-q4_1"] == "no --llama-server given"
    assert reasons["transformers-f32"] == "no --transformers-python given"


def test_all_servers_get_the_same_kv_bytes() -> None:
    places = Places(
        Path("model"), Path("q.gguf"), Path("f.gguf"), Path("v"), Path("l"), 4, Path("t")
    )
    commands = {p.name: p.launch(TIGHT, 80).command for p in all_peers(places)}
    size = 2_304 * 46_080
    assert option(commands["headstart-f32"], "--kv-cache-memory") == str(size)
    assert option(commands["headstart-int8"], "--kv-cache-memory") == str(size)
    assert option(commands["vllm-f32"], "--num-gpu-blocks-override") == str(2_304 // 32)
    assert option(commands["transformers-f32"], "--cb-num-blocks") == str(2_304 // 32)
    assert option(commands["llama-f32"], "--ctx-size") == str(2_304)  # K and V in float32
    assert option(commands["llama-q4_1"], "--ctx-size") == str(2 * 2_304)  # in float16
    assert "--host-cache-size" in commands["headstart-f32"]
    assert option(commands["headstart-f32"], "--speculation") == "auto"
    assert option(commands["headstart-int8-nodrafts"], "--speculation") == "off"
    assert "--host-cache-size" not in commands["headstart-f32-nocache"]


def option(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_servers_without_a_cache_are_asked_what_shows_their_price() -> None:
    asked = {
        workload.name
        for workload in WORKLOADS
        if workload.asks("headstart-f32-nocache") or workload.asks("headstart-int8-nocache")
    }
    assert asked == {"zero_reuse"}
    assert [w.name for w in WORKLOADS if not w.asks("vllm-f32")] == ["zero_reuse"]
    assert [w.name for w in WORKLOADS if w.asks("headstart-f32-nodrafts")] == ["shared_1"]


# -- prompts


def test_prompts_are_the_same_for_a_seed_and_different_for_another() -> None:
    assert shared_prompt(1) == shared_prompt(1)
    assert shared_prompt(1)[:20] != shared_prompt(2)[:20]  # nothing is shared, from the start
    assert len({question(number) for number in range(200)}) == 200


def test_the_replay_is_a_slice_of_recorded_chats_that_grow() -> None:
    found = chats(0)
    assert [len(prompts) for prompts in found] == [NUM_REQUESTS] * NUM_CHATS
    for prompts in found:
        for shorter, longer in itertools.pairwise(prompts):
            assert longer.startswith(shorter.removesuffix("assistant:"))
    assert found[0][0] != chats(1)[0][0]


# -- the client and the children, against a server of a few lines


class FakeServer(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` words; keeps what it was asked."""

    bodies: list[dict[str, Any]]
    has_usage = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        chunks: list[dict[str, Any]] = [{"choices": [{"text": ""}]}]
        chunks += [{"choices": [{"text": f"w{n} "}]} for n in range(body["max_tokens"])]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if self.has_usage:
            details = {"cached_tokens": 5}
            chunks.append({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
        self.send_response(200)
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_server(has_usage: bool = True) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (FakeServer,), {"bodies": bodies, "has_usage": has_usage})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_an_answer_has_its_times_text_and_usage() -> None:
    with fake_server() as (url, bodies):
        async with CompletionClient(url, "demo", {"ignore_eos": True}) as client:
            answer = await client.complete("a prompt", 3)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (8, 3, 5)
    assert answer.text == "w0 w1 w2 "
    assert answer.started_s < answer.first_s < answer.last_s
    assert bodies == [
        {
            "model": "demo",
            "prompt": "a prompt",
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_rates_count_the_tokens_after_the_first() -> None:
    answer = Answer(10.0, 10.5, 12.5, 100, 41, None, "")
    assert answer.ttft_s == 0.5
    assert answer.decode_tokens_per_s == 20.0


async def test_a_stream_without_usage_is_no_measurement() -> None:
    with fake_server(has_usage=False) as (url, bodies):
        fields = {"generation_config": str}
        async with CompletionClient(url, "m", fields, has_usage_option=False) as client:
            with pytest.raises(RuntimeError, match="no usage"):
                await client.complete("p", 2)
    assert "stream_options" not in bodies[0]
    assert bodies[0]["generation_config"] == "2"


async def test_workloads_ask_what_they_say() -> None:
    with fake_server() as (url, bodies):
        async with CompletionClient(url, "demo", {}) as client:
            eight = await shared_8(client, 0)
            assert len(eight["ttft_s"]) == len(eight["cold_ttft_s"]) == 8
            assert eight["tokens_per_s"][0] > 0
            prefixes = {body["prompt"].partition("\n\n")[0] for body in bodies}
            assert len(prefixes) == 1
            assert len({body["prompt"] for body in bodies}) == 16
            bodies.clear()
            chats_in_turn = await sessions(client, 0)
    assert len(chats_in_turn["return_ttft_s"]) == 8
    prompts = [body["prompt"] for body in bodies]
    assert len(prompts) == 12
    for first, second in zip(prompts, prompts[4:], strict=False):
        assert second.startswith(first + "w0 w1 ")  # the server's own answer is in its history
    assert WIDE.kv_tokens > TIGHT.kv_tokens


CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_put_to_rest_and_ended_with_its_children(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(process_module, "IDLE_SHARE", -1.0)  # whatever it burns is too much
    url = f"http://127.0.0.1:{free_port}/"
    server = ServerProcess([sys.executable, "-c", CHILD, str(free_port)], {}, url)
    server.start()
    this = psutil.Process()
    family = [p for p in this.children(recursive=True) if p.cmdline()[1:2] == ["-c"]]
    assert len(family) == 2
    assert server.resident_bytes() > 2**20
    server.rest()
    until(lambda: {process.status() for process in family} == {psutil.STATUS_STOPPED})
    server.wake()
    until(lambda: psutil.STATUS_STOPPED not in {process.status() for process in family})
    server.rest()
    server.stop()  # a paused one does not hear that it should end
    psutil.wait_procs(family, timeout=5)
    assert not any(process.is_running() for process in family)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_server_that_ends_at_once_says_what_it_wrote() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = ServerProcess(command, {}, "http://127.0.0.1:9/")
    with pytest.raises(RuntimeError, match="ended with 1: no such model"):
        server.start()
    server.stop()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
