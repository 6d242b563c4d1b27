"""Fetching from a hub: a small one on the loopback, spoken to by huggingface_hub itself."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from model_worker.loader import ModelLoadError
from model_worker.loader.hub import download_model

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 3000,
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"code",
    "consolidated.safetensors": b"again",
    "onnx/model.safetensors": b"other",
    "README.md": b"text",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


@dataclass
class Hub:
    endpoint: str
    fetched: list[str] = field(default_factory=list)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/tiny/revision/"):
                siblings = [{"rfilename": name} for name in FILES]
                self.answer(200, {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings})
            elif path.startswith("/api/models/owner/tiny/tree/"):
                self.answer(200, [self.entry(name) for name in FILES])
            elif path.startswith("/owner/tiny/resolve/"):
                self.file(path)
            elif path.startswith("/api/models/owner/gated"):
                self.answer(403, {"error": "gated"}, "GatedRepo")
            else:
                self.answer(404, {"error": "no such repository"}, "RepoNotFound")

        do_HEAD = do_GET

        def entry(self, name: str) -> dict[str, Any]:
            oid = hashlib.sha1(FILES[name]).hexdigest()
            return {"type": "file", "path": name, "size": len(FILES[name]), "oid": oid}

        def file(self, path: str) -> None:
            name = path.split("/resolve/")[1].partition("/")[2]
            if self.command == "GET":
                hub.fetched.append(name)
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(FILES[name]).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(FILES[name])

        def answer(self, status: int, value: Any, code: str | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
                self.send_header("X-Error-Message", str(value["error"]))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            pass

    return Handler


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the environment says of the real hub: this one is on the loopback."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    close_session()
    yield
    close_session()


@pytest.fixture
def hub() -> Iterator[Hub]:
    started = Hub(endpoint="")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(started))
    started.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield started
    server.shutdown()
    thread.join()
    server.server_close()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_the_files_we_read_are_fetched(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []

    folder = download_model("owner/tiny", tmp_path, lines.append, hub.endpoint)

    assert names(folder) == WANTED
    assert sorted(hub.fetched) == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert lines == ["Downloading owner/tiny: 4 files, 3.0 kB"]


def test_advance_is_reported(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.loader.hub._REPORT_INTERVAL_S", 0.0)
    lines: list[str] = []

    download_model("owner/tiny", tmp_path, lines.append, hub.endpoint)

    assert lines[-1] == "Downloading owner/tiny: 3.0 kB of 3.0 kB"


def test_nothing_is_fetched_twice(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    first = download_model("owner/tiny", tmp_path, lines.append, hub.endpoint)
    hub.fetched.clear()
    lines.clear()

    assert download_model("owner/tiny", tmp_path, lines.append, hub.endpoint) == first
    assert hub.fetched == []
    assert lines == []


def test_without_a_connection_the_earlier_download_serves(hub: Hub, tmp_path: Path) -> None:
    folder = download_model("owner/tiny", tmp_path, lambda _line: None, hub.endpoint)

    again = download_model("owner/tiny", tmp_path, lambda _line: None, "http://127.0.0.1:1")

    assert again == folder


@pytest.mark.parametrize(
    ("hub_id", "reason"),
    [
        ("owner/unknown", "Unknown model 'owner/unknown'"),
        ("owner/gated", "Model owner/gated is gated"),
    ],
)
def test_refused_by_the_hub(hub_id: str, reason: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        download_model(hub_id, tmp_path, lambda _line: None, hub.endpoint)


def test_no_connection_and_no_earlier_download(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Cannot fetch model owner/tiny") as caught:
        download_model("owner/tiny", tmp_path, lambda _line: None, "http://127.0.0.1:1")
    assert "\n" not in str(caught.value)
