"""Spans of requests: of a real gateway with a fake worker, in memory and over OTLP."""

from __future__ import annotations

import ast
import contextlib
import http.server
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from model_worker.protocol import RequestOutput
from service import app as app_module
from service.app import create_app, gateway_in
from service.config import ConfigError, GatewayConfig
from service.diagnostics.trace import RequestTrace, TracedPrompt
from service.sessions.identity import session_digest
from service.tracing import export
from service.tracing.attributes import request_attributes
from service.tracing.export import traces_url
from service.tracing.phases import Phase, phases_of
from service.tracing.spans import RequestSpans
from service.workers.registry import WorkerRegistry
from tests.http_kit import serving
from tests.session_kit import Talk, talking, user, wait_for

DOCS = Path(__file__).resolve().parent.parent / "docs"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
NEEDLE = "xylophone"


class Traced:
    def __init__(self, talk: Talk, exporter: InMemorySpanExporter) -> None:
        self.talk, self.exporter = talk, exporter

    def spans(self, num_servers: int = 1) -> list[ReadableSpan]:
        """All since the last call, once so many requests have ended."""
        wait_for(lambda: sum(map(is_server, self.exporter.get_finished_spans())) >= num_servers)
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found

    def server(self) -> ReadableSpan:
        (found,) = filter(is_server, self.spans())
        return found


def is_server(span: ReadableSpan) -> bool:
    return span.kind is SpanKind.SERVER


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture(scope="module")
def module_traced() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "exported_spans", lambda endpoint: RequestSpans(provider))
            talk = stack.enter_context(talking(otlp_endpoint="http://127.0.0.1:1"))
        yield Traced(talk, exporter)


@pytest.fixture
def traced(module_traced: Traced) -> Traced:
    module_traced.exporter.clear()
    return module_traced


def test_a_request_is_one_span_of_its_clients_trace(traced: Traced) -> None:
    first = traced.talk.chat([user("a b c d")], session="someone@example.org").json()
    traced.spans()
    answer = traced.talk.chat(
        [user("a b c d")], session=None, headers={"traceparent": PARENT, "tracestate": "v=1"}
    ).json()
    *children, server = traced.spans()
    assert server.context is not None
    assert server.parent is not None
    assert f"{server.context.trace_id:032x}" == TRACE_ID
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert server.context.trace_state.get("v") == "1"
    usage = answer["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == first["usage"]["prompt_tokens"] - 1
    found = attributes_of(server)
    ttft = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < ttft < 10
    assert (server.name, server.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert server.status.status_code is StatusCode.UNSET
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headstart",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": len("fine"),
        "gen_ai.usage.cache_read.input_tokens": num_cached,
        "headstart.cached_tokens.device": num_cached,
        "headstart.cached_tokens.host": 0,
        "headstart.cached_tokens.disk": 0,
        "headstart.outcome": "stop",
        "headstart.request_id": answer["id"].removeprefix("chatcmpl-"),
        "headstart.tenant": "default",
        "headstart.worker.id": "fake",
    }
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert server.start_time is not None
    assert server.end_time is not None
    before = server.start_time
    for child in children:
        assert child.parent == server.context
        assert child.start_time is not None
        assert child.end_time is not None
        # The clock that children are laid out on is read beside the other one, not at once.
        assert before - 5_000_000 <= child.start_time <= child.end_time
        before = child.end_time
    assert before <= server.end_time + 5_000_000


def test_nobodys_trace_is_begun_and_an_unsampled_one_is_left_alone(traced: Traced) -> None:
    for header in (PARENT[:-1] + "0", PARENT[:-1] + "1"):
        traced.talk.chat([user("hello")], session=None, headers={"traceparent": header})
    assert [span.name for span in traced.spans() if is_server(span)] == [
        "POST /v1/chat/completions"
    ]
    trace_ids = {TRACE_ID}
    for headers in (
        [],
        [("traceparent", "nonsense")],
        [("traceparent", PARENT), ("traceparent", PARENT)],
    ):
        body = {"model": "tiny", "messages": [user("hello")]}
        assert traced.talk.client.post("/v1/chat/completions", json=body, headers=headers)
        server = traced.server()
        assert server.context is not None
        assert server.parent is None
        trace_ids.add(f"{server.context.trace_id:032x}")
    assert len(trace_ids) == 4


def test_several_prompts_and_choices_are_sums(traced: Traced) -> None:
    body = {"model": "tiny", "prompt": ["one two", "three"], "n": 2}
    usage = traced.talk.client.post("/v1/completions", json=body).json()["usage"]
    spans = traced.spans()
    found = attributes_of(spans[-1])
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 4 * len("fine")
    assert found["gen_ai.response.finish_reasons"] == ("stop",) * 4
    own = {attributes_of(span)["headstart.request_id"].partition("-")[2] for span in spans[:-1]}
    assert own == {"", "1", "2", "3"}


def test_what_fails_says_how(traced: Traced) -> None:
    client = traced.talk.client
    wrong = {"model": "tiny", "messages": [user("x")], "temperature": NEEDLE}
    assert client.post("/v1/chat/completions", json=wrong).status_code == 400
    refused = traced.server()
    assert attributes_of(refused)["error.type"] == "400"
    assert "gen_ai.usage.input_tokens" not in attributes_of(refused)
    assert refused.status.status_code is StatusCode.UNSET  # it is the client's
    assert client.post(f"/v1/{NEEDLE}").status_code >= 400
    assert traced.server().name == "POST"

    def fail() -> None:
        wait_for(lambda: traced.talk.requests, 5.0)
        request = traced.talk.requests[-1]
        traced.talk.served.call(traced.talk.served.worker.fail_request, request.request_id)

    traced.talk.requests.clear()
    traced.talk.answers.append("x" * 100_000)
    failing = threading.Thread(target=fail)
    failing.start()
    body = {"model": "tiny", "messages": [user("x")], "stream": True, "max_tokens": 1500}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.read()
    failing.join()
    failed = traced.server()
    if answer.status_code == 200:  # it had begun
        assert attributes_of(failed)["error.type"] == "error"
    assert attributes_of(failed)["headstart.outcome"] == "error"
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description is None


def test_who_leaves_is_an_abort(traced: Traced) -> None:
    traced.talk.answers.append("x" * 100_000)
    body = {"model": "tiny", "messages": [user("x")], "stream": True, "max_tokens": 1500}
    with (
        traced.talk.served.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
    found = attributes_of(traced.server())
    assert found["headstart.outcome"] in ("abort", "length")  # if all was computed by then
    assert found["http.response.status_code"] == 200


def test_only_what_is_asked_of_the_api_has_spans(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/"):
        assert traced.talk.client.get(path).status_code == 200
    traced.talk.chat([user("hello")], session=None)
    assert [span.name for span in traced.spans() if is_server(span)] == [
        "POST /v1/chat/completions"
    ]


def test_nothing_of_a_text_is_in_a_span(traced: Traced) -> None:
    label = f"{NEEDLE}@example.org"
    traced.talk.answers.append(f"the {NEEDLE}")
    assert traced.talk.chat([user(f"a {NEEDLE} plays")], session=label).status_code == 200
    client = traced.talk.client
    client.post(f"/v1/sessions/{label}/fork", json={"session_id": f"{NEEDLE}2"})
    client.post("/v1/tokenize", json={"model": "tiny", "prompt": NEEDLE})
    client.post("/v1/chat/completions", json={"model": NEEDLE, "messages": [user(NEEDLE)]})
    client.post("/v1/completions?q=" + NEEDLE, content=f'{{"{NEEDLE}": ')
    spans = traced.spans(5)
    told = "\n".join(span.to_json() for span in spans)
    assert NEEDLE not in told
    chats = [attributes_of(span) for span in spans if is_server(span)]
    assert chats[0]["gen_ai.conversation.id"] == session_digest("default", label)
    assert len(session_digest("default", label)) == 16


# ------------------------------------------------------------------ figures and times


def test_phases_follow_one_another_on_the_gateways_clock() -> None:
    trace = make_trace()
    start = 1_000_000_000_000
    assert phases_of(trace) == (
        Phase("queue", start + 2_000_000_000, start + 2_500_000_000),
        Phase("load", start + 2_500_000_000, start + 2_750_000_000),
        Phase("prefill", start + 2_750_000_000, start + 3_750_000_000),
        Phase("decode", start + 4_000_000_000, start + 6_000_000_000),
    )
    trace.load_s = 0.0
    assert [phase.name for phase in phases_of(trace)] == ["queue", "prefill", "decode"]
    trace.queue_s = trace.prefill_s = trace.decode_s = None
    assert phases_of(trace) == ()


def test_cached_tokens_by_tier() -> None:
    found = request_attributes([make_trace()])
    by_tier = {
        tier: found[f"headstart.cached_tokens.{tier}"] for tier in ("device", "host", "disk")
    }
    assert by_tier == {"device": 96, "host": 64, "disk": 32}
    assert found["gen_ai.usage.cache_read.input_tokens"] == 192
    assert request_attributes([]) == {}


def make_trace() -> RequestTrace:
    """Received at second 10 of a clock, sent at 12, first token at 14, ended at 16."""
    times = iter((12.0, 14.0, 16.0))
    trace = RequestTrace(TracedPrompt(model="m"), 10.0, lambda: next(times), 1000.0)
    trace.number = 1
    trace.sent("w", 1)
    admission = RequestOutput(
        request_id="r", num_cached_tokens=192, num_host_tokens=64, num_disk_tokens=32, load_s=0.25
    )
    trace.admitted(admission, 0.5)
    trace.token(1.0)
    trace.ended("stop")
    return trace


# ------------------------------------------------------------------ on the wire


def test_spans_reach_a_collector_as_protobuf() -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == (
                "/v1/traces",
                "application/x-protobuf",
            )
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with serving(otlp_endpoint=endpoint) as served, served.client() as client:
            body = {"model": "tiny", "prompt": NEEDLE, "max_tokens": 3}
            headers = {"traceparent": PARENT}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    (request,) = received  # sent when the server stopped
    (resource,) = request.resource_spans
    about = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert about["service.name"] == "headstart"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    server = spans["POST /v1/completions"]
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert spans["decode"].parent_span_id == server.span_id
    figures = {item.key: item.value.int_value for item in server.attributes}
    assert figures["gen_ai.usage.output_tokens"] == 3
    assert NEEDLE.encode() not in request.SerializeToString()


def test_a_collector_that_does_not_answer_holds_nobody_up() -> None:
    released = threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self) -> None:
            released.wait(10.0)

    spans = RequestSpans(Stuck(shutdown_on_exit=False))
    started = time.monotonic()
    spans.close(0.05)
    assert time.monotonic() - started < 5.0
    released.set()


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_an_endpoint_is_a_collector_or_the_whole_url(endpoint: str) -> None:
    assert traces_url(endpoint) == "http://c:4318/v1/traces"


def test_without_the_extra_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "service.tracing.export")
    config = GatewayConfig(otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError) as caught:
        create_app(config, WorkerRegistry([]))
    assert str(caught.value) == (
        "--otlp-endpoint needs OpenTelemetry, which is not installed here: "
        "pip install 'headstart[otel]'"
    )


def test_unasked_for_nothing_of_it_is_loaded_or_in_the_way() -> None:
    app = create_app(GatewayConfig(), WorkerRegistry([]))
    assert len(app.user_middleware) == 2
    assert gateway_in(app).diagnostics.num_listeners == 0
    folder = Path(app_module.__file__).parent
    eager = {
        f"{file.name} {name}"
        for file in folder.rglob("*.py")
        if file.parent.name != "tracing"
        if "opentelemetry" in (text := file.read_text()) or "service.tracing" in text
        for statement in ast.parse(text).body
        for name in names_imported(statement)
        if name.startswith(("opentelemetry", "service.tracing"))
    }
    assert eager == set()


def names_imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []


def test_the_page_lists_what_spans_carry(traced: Traced) -> None:
    traced.talk.chat([user("hello")], session="s")
    traced.talk.client.post("/v1/chat/completions", json={"model": "tiny"})
    found = {name for span in traced.spans(2) for name in attributes_of(span)}
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "traces.md").read_text(), re.M)
    assert set(rows) == found


def test_the_frameworks_own_telemetry_is_off(traced: Traced) -> None:
    config = traced.talk.served.app._telemetry
    assert not any(config[name] for name in ("tracing", "metrics", "logs", "auto_configure"))
