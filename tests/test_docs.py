"""What the documents say of settings, routes, request fields and metrics is what the code has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import summary
from service import settings_document
from service.app import create_app
from service.cli import build_app
from service.config import GatewayConfig
from service.dialects.message_fields import MESSAGE_FIELDS
from service.dialects.response_fields import RESPONSE_FIELDS
from service.request_fields import REQUEST_FIELDS, FieldKind, RequestField
from service.settings import SETTINGS
from service.workers.fake import FakeWorker
from service.workers.registry import WorkerRegistry
from tests.gateway_kit import make_card
from tests.http_kit import routes_of
from tests.metrics_kit import exported_metrics

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def table_rows(text: str) -> list[list[str]]:
    """The cells of every table row, headings and rules left out."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    assert rows
    return rows


def test_the_readme_has_the_settings_table() -> None:
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"<!-- settings:begin -->\n(.*)\n<!-- settings:end -->", readme, re.DOTALL)
    assert match
    assert match[1].strip() == settings_document.markdown(), "put in what headstart settings prints"


def test_the_readme_has_the_figures_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    fresh = summary.put_into(readme, summary.table())
    assert readme == fresh, "python -m benchmarks.summary --write"


def options_of(command: Any) -> Iterator[str]:
    """Of it and of all commands below it."""
    for parameter in command.params:
        yield from parameter.opts
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def test_every_option_that_documents_name_exists() -> None:
    known = {setting.flag for setting in SETTINGS}
    known |= {"--help", "--version", "--constraint", "--no-deps", "--strict"}
    known |= set(options_of(typer.main.get_command(build_app())))
    known |= {"--rm", "--entrypoint", "--force-recreate"}  # of docker compose
    known |= {"--build", "--target"}  # of cmake
    known |= {"--vllm-python", "--llama-server", "--transformers-python", "--sglang-python"}
    known |= {"--workloads", "--peers", "--runs", "--write"}  # of benchmarks.peers
    for document in DOCUMENTS:
        text = re.sub(r"mypy --strict", "", document.read_text())
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert named <= known, (document.name, named - known)


def test_every_route_is_documented_and_no_other() -> None:
    card = make_card()
    app = create_app(GatewayConfig(), WorkerRegistry([FakeWorker(card, lambda request: ())]))
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for route in routes_of(app.routes)
        for method in route.methods or ()
    }
    assert "POST /v1/chat/completions" in routes
    text = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^\| `((?:GET|POST|DELETE|PUT) /\S*)` \|", text, re.M))
    assert documented == routes


@pytest.mark.parametrize("kind", list(FieldKind))
def test_every_request_field_is_documented_where_it_belongs(kind: FieldKind) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    title = {
        FieldKind.ACTS: "Fields that act",
        FieldKind.HARMLESS: "Fields without effect",
        FieldKind.REFUSED: "Fields that are refused",
    }[kind]
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    documented = [(row[0].strip("`"), row[1]) for row in table_rows(section)]
    assert documented == [(f.name, endpoints(f)) for f in REQUEST_FIELDS if f.kind is kind]
    if kind is not FieldKind.REFUSED:
        notes = [row[2] for row in table_rows(section)]
        assert notes == [f.note or "-" for f in REQUEST_FIELDS if f.kind is kind]


@pytest.mark.parametrize(
    ("title", "fields"), [("Messages", MESSAGE_FIELDS), ("Responses", RESPONSE_FIELDS)]
)
def test_the_fields_of_other_apis_are_documented(
    title: str, fields: tuple[RequestField, ...]
) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    rows = table_rows(text.split(f"## {title}\n")[1].split("\n## ")[0])
    assert [tuple(row) for row in rows] == [
        (f"`{field.name}`", effect_of(field), field.note or "-") for field in fields
    ]


def effect_of(field: RequestField) -> str:
    if field.kind is FieldKind.REFUSED:
        return f"refused, but `{json.dumps(field.inert[0])}`" if field.inert else "refused"
    return "acts" if field.kind is FieldKind.ACTS else "no effect"


def endpoints(field: RequestField) -> str:
    return "both" if len(field.endpoints) == 2 else next(iter(field.endpoints)).value


def test_every_metric_is_documented_and_no_other() -> None:
    rows = table_rows((ROOT / "docs" / "metrics.md").read_text())
    documented = {(row[0].strip("`"), row[1], row[2], row[3]) for row in rows}
    exported = exported_metrics()
    assert documented == {
        (each.name, each.kind, ", ".join(each.labels) or "-", each.text) for each in exported
    }
    assert len(documented) == len(exported)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target
