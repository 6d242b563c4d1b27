"""deploy/ for Prometheus and Grafana: it loads, names what exists, and works against a gateway.

Checked by Prometheus' own tools, and by a real Prometheus that scrapes a real gateway.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.http_kit import Served, serving
from tests.metrics_kit import exported_metrics
from tests.session_kit import wait_for

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
ALERTS, RULE_TESTS = DEPLOY / "alerts.yml", ROOT / "tests" / "data" / "alerts_test.yml"
KEY = "sk-metrics"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        reason = f"no {name} on PATH"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and in CI it must be there")
        pytest.skip(reason)
    return found


def promtool(*arguments: str) -> str:
    result = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def configuration(folder: Path, target: str) -> Path:
    """deploy/prometheus.yml as it is, but for where the gateway, the key and the rules are."""
    key = folder / "metrics-key"
    key.write_text(KEY + "\n")
    document = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = document["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gateway:8000"]}]
    job["static_configs"] = [{"targets": [target]}]
    job["authorization"]["credentials_file"] = str(key)
    document["rule_files"] = [str(ALERTS)]
    document["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    return path


# ------------------------------------------------------------ as files


def test_the_configuration_and_the_rules_load(tmp_path: Path) -> None:
    promtool("check", "config", str(configuration(tmp_path, "127.0.0.1:1")))
    assert "10 rules found" in promtool("check", "rules", str(ALERTS))
    assert yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["rule_files"] == [ALERTS.name]


def test_each_alert_fires_and_not_where_all_is_well() -> None:
    promtool("test", "rules", str(RULE_TESTS))
    cases = [
        case
        for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", ())
    ]
    for rule in rules():
        expected = [bool(c["exp_alerts"]) for c in cases if c["alertname"] == rule["alert"]]
        assert {True, False} == set(expected), rule["alert"]


def test_each_alert_has_its_section_in_the_runbook() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = text.split("\n## ")[1:]
    anchors = {section.split("\n")[0].lower().replace(" ", "-"): section for section in sections}
    assert len(anchors) == len(rules())
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/runbook.md"
        assert anchors[anchor].split("\n")[2].startswith(f"`{rule['alert']}`: "), rule["alert"]
        for part in ("- **Look**: ", "- **Do**: "):
            assert part in anchors[anchor]


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/headstart.json").read_text())
    return found


def queries_of_the_board() -> list[str]:
    found = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    found += [each["expr"] for each in board()["annotations"]["list"]]
    return found


def queries_of_documents() -> list[str]:
    found = []
    for page in ("metrics.md", "runbook.md"):
        text = (ROOT / "docs" / page).read_text()
        found += re.findall(r"`([^`]*headstart_[^`]*)`", text)
    return found


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    exported = exported_metrics()
    known = {series: each for each in exported for series in each.series}
    queries = [*queries_of_the_board(), *(rule["expr"] for rule in rules())]
    assert len(queries) > 60
    for query in [*queries, *queries_of_documents()]:
        for name in re.findall(r"headstart_\w+", query):
            assert name in known or any(name == each.name for each in exported), (name, query)
    for query in queries:
        used = {known[name] for name in re.findall(r"headstart_\w+", query)}
        assert used or query.startswith("up{"), query
        labels = {"le", "job", "instance"}.union(*(each.labels for each in used))
        for part in re.findall(r"\bby \(([^)]*)\)", query):
            assert {label.strip() for label in part.split(",")} <= labels, query
        for name, matchers in re.findall(r"(headstart_\w+)\{([^}]*)\}", query):
            given = re.findall(r"(\w+)[=!]~?\"", matchers)
            assert set(given) <= set(known[name].labels), query


def test_every_query_of_the_board_parses(tmp_path: Path) -> None:
    text = {"$__rate_interval": "5m", "$__range": "1h", "$tenant": ".*"}
    parsed = []
    for number, query in enumerate(queries_of_the_board()):
        for variable, value in text.items():
            query = query.replace(variable, value)
        parsed.append({"record": f"board:query:{number}", "expr": query})
    file = tmp_path / "board.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": parsed}]}))
    assert f"{len(parsed)} rules found" in promtool("check", "rules", str(file))


def test_the_board_is_provisioned_with_its_source_of_data() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/headstart.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": source["uid"]}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


# ------------------------------------------------------------ at work


@contextlib.contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[str]:
    """A running one's address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(20.0)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/-/ready", verify=False).status_code == 200
    return False


def queried(url: str, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, verify=False).json()
    assert answer["status"] == "success", answer
    return {
        tuple(sorted((k, v) for k, v in found["metric"].items() if k not in ("job", "instance"))):
        float(found["value"][1])
        for found in answer["data"]["result"]
    }  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A gateway, and the Prometheus that watches it."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with serving(api_keys=(KEY,)) as served:
        target = served.base_url.removeprefix("http://")
        with prometheus(configuration(folder, target), folder) as url:
            yield served, url


def test_prometheus_reads_what_a_gateway_counts(watched: tuple[Served, str]) -> None:
    served, url = watched
    told = 0
    with served.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        for number in range(5):
            body = {"model": served.model, "prompt": "A river. " * (1 + number), "max_tokens": 3}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            told += usage["prompt_tokens"]
    wait_for(lambda: queried(url, "headstart_prefix_cache_queries_total") == {series(): told})
    assert queried(url, "sum(headstart_time_to_first_token_seconds_count)") == {(): 5.0}
    assert queried(url, 'headstart_requests_total{outcome="length"}') == {
        series(outcome="length"): 5.0
    }
    assert queried(url, 'up{job="headstart"}') == {(("__name__", "up"),): 1.0}
    quantile = "histogram_quantile(0.5, sum by (le) (headstart_e2e_request_latency_seconds_bucket))"
    assert 0 < queried(url, quantile)[()] < 60
    types = httpx.get(f"{url}/api/v1/metadata", verify=False).json()["data"]
    exported = {each.name: each for each in exported_metrics()}
    for name in ("headstart_requests_total", "headstart_request_queue_time_seconds"):
        assert types[name][0]["type"] == exported[name].kind
        assert types[name][0]["help"] == exported[name].text


def series(**labels: str) -> tuple[tuple[str, str], ...]:
    name = "requests_total" if labels else "prefix_cache_queries_total"
    return tuple(sorted({"__name__": f"headstart_{name}", **labels}.items()))


def test_an_alert_goes_from_a_lost_worker_to_prometheus(watched: tuple[Served, str]) -> None:
    """Pending: that it fires after its time is what the tests of the rules show."""
    served, url = watched
    assert "HeadstartNoWorker" not in alerts(url)
    served.call(served.worker.set_lost)
    wait_for(lambda: "HeadstartNoWorker" in alerts(url))
    rules_known = httpx.get(f"{url}/api/v1/rules", verify=False).json()["data"]["groups"][0][
        "rules"
    ]
    assert {rule["name"] for rule in rules_known} == {rule["alert"] for rule in rules()}
    assert {rule["health"] for rule in rules_known} == {"ok"}


def alerts(url: str) -> set[str]:
    found = httpx.get(f"{url}/api/v1/alerts", verify=False).json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in found}
