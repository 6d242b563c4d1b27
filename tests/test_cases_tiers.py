"""What users have run into with lower tiers and restarts, asked of real servers on the demo model.

Two servers record answers and send prompts down and up again: one with host memory, one with a
little of it and a disk. Then one starts on the second one's folder, with another hash seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_store.events import Tier
from tests.disk_kit import files_in, folder_bytes
from tests.http_kit import metric
from tests.models import DEMO_CACHE_DIR, demo_source
from tests.rig import EngineRig, RigOptions, disk_cache_size
from tests.server_kit import RealServer
from tests.target import Target, cached_tokens, target_at, text_of
from tests.test_token_equality import model_of, references, token_ids

MODEL = "demo"
BLOCK_BYTES = 32 * 46_080  # of the demo model in float32
NUM_BLOCKS = 11
DISK_BYTES = 120 * 2**20
SHIPS = ("Adder", "Bittern", "Curlew", "Dunlin", "Egret", "Fulmar")
# Forward as users come round, and once back, when the last one's prompt is still near.
ROUNDS = (range(6), range(6), range(6), range(5, -1, -1))


def log_of(number: int) -> str:
    """Some 190 to 260 tokens; two such prompts do not fit on the device together."""
    lines = [f"Shelf {i} holds {i * 7} jars of plum jam." for i in range(1, 11 + number)]
    question = "Which ship is this? Reply with its name."
    return "\n".join([f"You keep the log of ship {SHIPS[number]}.", *lines, question])


def ask(target: Target, number: int) -> dict[str, Any]:
    response = target.chat(log_of(number), max_tokens=4)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def start(*arguments: str, hash_seed: str | None) -> RealServer:
    """Begin to start; None leaves PYTHONHASHSEED unset."""
    with pytest.MonkeyPatch.context() as patch:
        if hash_seed is None:
            patch.delenv("PYTHONHASHSEED", raising=False)
        else:
            patch.setenv("PYTHONHASHSEED", hash_seed)
        return RealServer(
            *("--model", MODEL, "--model-cache-dir", str(DEMO_CACHE_DIR), "--num-threads", "1"),
            *("--max-model-len", "320", "--kv-cache-memory", str(NUM_BLOCKS * BLOCK_BYTES)),
            *arguments,
        )


@contextmanager
def running(servers: Sequence[RealServer]) -> Iterator[list[Target]]:
    """Clients of servers that were started; all are stopped at the end."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        targets = []
        for server in servers:
            server.wait_ready()
            targets.append(stack.enter_context(target_at(server.url, MODEL)))
        yield targets
    for server in servers:
        assert "Traceback" not in server.stderr


def wait_saved(target: Target) -> None:
    """Until the disk has taken what went idle: nothing is on its way, and nothing follows."""
    deadline = time.monotonic() + 60
    seen, since = -1.0, time.monotonic()
    while time.monotonic() - since < 1.5 or not seen:
        assert time.monotonic() < deadline, "what is idle is not written to disk"
        stored = metric(target.http, "tier_stored_blocks_total", tier="disk")
        if stored != seen or metric(target.http, "num_transfers"):
            seen, since = stored, time.monotonic()
        time.sleep(0.1)


# ---------------------------------------------------------------- up and down


@dataclass(frozen=True)
class Voyage:
    """What one server answered: ``bodies`` by round, each in the order of the ships."""

    bodies: list[list[dict[str, Any]]]
    cached: dict[str, float]  # tokens by source
    promoted: dict[str, float]  # blocks by tier
    failed: float

    @property
    def texts(self) -> list[list[str]]:
        return [[text_of(body) for body in bodies] for bodies in self.bodies]


def sail(target: Target, *, has_disk: bool) -> Voyage:
    bodies = []
    for order in ROUNDS:
        answers = {number: ask(target, number) for number in order}
        bodies.append([answers[number] for number in range(6)])
    if has_disk:
        wait_saved(target)
    sources = ("device", "host", "disk")
    return Voyage(
        bodies,
        {s: metric(target.http, "prompt_tokens_cached_total", source=s) for s in sources},
        {t: metric(target.http, "tier_promoted_blocks_total", tier=t) for t in sources[1:]},
        metric(target.http, "tier_failed_blocks_total"),
    )


@dataclass(frozen=True)
class Voyages:
    with_host: Voyage
    with_disk: Voyage
    folder: Path  # what the one with a disk left behind


@pytest.fixture(scope="module")
def voyages(tmp_path_factory: pytest.TempPathFactory) -> Voyages:
    demo_source()  # converted once, into a folder that all starts share
    folder = tmp_path_factory.mktemp("disk-tier")
    host = start("--host-cache-size", "300MiB", hash_seed="1")
    disk = start(
        *("--host-cache-size", str(NUM_BLOCKS * BLOCK_BYTES), "--disk-cache-dir", str(folder)),
        *("--disk-cache-size", str(DISK_BYTES)),
        hash_seed="2",
    )
    with running([host, disk]) as targets, ThreadPoolExecutor(2) as threads:
        first = threads.submit(sail, targets[0], has_disk=False)
        second = threads.submit(sail, targets[1], has_disk=True)
        return Voyages(first.result(), second.result(), folder)


def assert_all_equal_the_cold_ones(voyage: Voyage, cold: list[str]) -> None:
    assert len(set(cold)) > 1  # an answer tells which prompt was read
    assert voyage.texts == [cold] * len(ROUNDS)
    for body in voyage.bodies[0]:
        assert cached_tokens(body) < 64  # the words before the ship's name
    for body in (body for bodies in voyage.bodies[1:] for body in bodies):
        assert cached_tokens(body) == body["usage"]["prompt_tokens"] - 1
    told = sum(cached_tokens(body) for bodies in voyage.bodies for body in bodies)
    assert sum(voyage.cached.values()) == told
    assert voyage.failed == 0


def test_what_comes_back_from_host_memory_answers_as_before(voyages: Voyages) -> None:
    voyage = voyages.with_host
    assert_all_equal_the_cold_ones(voyage, voyage.texts[0])
    assert voyage.cached["host"] > 6 * 150
    assert voyage.promoted["host"] > 6 * 5
    assert voyage.cached["disk"] == voyage.promoted["disk"] == 0


def test_what_comes_back_from_the_disk_answers_as_before(voyages: Voyages) -> None:
    voyage = voyages.with_disk
    assert_all_equal_the_cold_ones(voyage, voyages.with_host.texts[0])
    assert voyage.cached["disk"] > 6 * 150
    assert voyage.cached["host"] > 0
    assert min(voyage.promoted.values()) > 0
    assert folder_bytes(voyages.folder) <= DISK_BYTES


# ---------------------------------------------------------------- restarts


def plant_strangers(folder: Path) -> list[Path]:
    """Beside the segments: one of an older format, and files that are not ours."""
    segment = files_in(folder)[0]
    older = segment.with_name("0" * 24 + ".kv")
    content = bytearray(segment.read_bytes())
    content[8:10] = bytes(2)  # the version, after the magic
    older.write_bytes(content)
    strangers = [segment.with_name("f" * 24 + ".kv"), segment.with_name("README")]
    for path in strangers:
        path.write_text("not a segment")
    return strangers


def test_a_restart_without_a_hash_seed_hits_from_the_first_request(voyages: Voyages) -> None:
    strangers = plant_strangers(voyages.folder)
    arguments = ("--disk-cache-dir", str(voyages.folder), "--disk-cache-size", str(DISK_BYTES))
    with running([start(*arguments, hash_seed=None)]) as (target,):
        for number in (1, 4):
            body = ask(target, number)
            assert text_of(body) == voyages.with_host.texts[0][number]
            assert cached_tokens(body) == body["usage"]["prompt_tokens"] - 1
        assert metric(target.http, "prompt_tokens_cached_total", source="disk") > 2 * 150
        assert metric(target.http, "tier_failed_blocks_total") == 0
        assert metric(target.http, "tier_stored_blocks_total", tier="disk") == 0
    assert [path.read_text() for path in strangers] == ["not a segment"] * 2


@pytest.mark.parametrize("num_disk", [200, 40], ids=["all fit", "a third fits"])
def test_five_restarts_write_nothing_twice(tmp_path: Path, num_disk: int) -> None:
    """Twenty prompts; each restart finds what the last one wrote, and the folder does not grow."""
    prompts = {f"p{i}": token_ids(40 + i, seed=300 + i) for i in range(20)}
    wanted = references("llama", prompts)
    # Four at once, so that no request is a block short and does without the rows of its last,
    # partly matched one: how many are found is exact.
    options = RigOptions(
        block_size=8, num_blocks=64, max_num_seqs=4, disk_folder=tmp_path, num_disk=num_disk
    )
    sizes = []
    for restart in range(6):
        rig = EngineRig(model_of("llama"), options)
        rig.check(wanted).assert_passes()
        rig.settle()
        (disk,) = [tier for tier in rig.cache.stats().tiers if tier.tier is Tier.DISK]
        if restart and num_disk == 200:
            assert rig.num_restored == disk.num_cached
            assert disk.stored_total == 0
            assert [rig.num_cached(name) for name in prompts] == [39 + i for i in range(20)]
        elif restart:
            assert 0 < rig.num_restored <= disk.num_blocks
        rig.close()
        sizes.append(folder_bytes(tmp_path))
        assert sizes[-1] <= disk_cache_size(num_disk, rig.spec.bytes_per_block)
    if num_disk == 200:
        assert len(set(sizes)) == 1


# ---------------------------------------------------------------- messages in the middle


def test_system_messages_anywhere_keep_their_place(tiny_target: Target) -> None:
    first = [
        {"role": "system", "content": "Answer in one word, whoever asks and whatever it is."},
        {"role": "user", "content": "Hi"},
    ]
    middle = [
        *first,
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "From now on answer in French."},
        {"role": "user", "content": "Colour of grass?"},
    ]
    turn = tiny_target.chat(messages=first)
    assert turn.status_code == 200
    body = tiny_target.chat(messages=middle)
    assert body.status_code == 200
    # The whole of the first turn's prompt, whose last message opens the answer.
    assert cached_tokens(body.json()) >= turn.json()["usage"]["prompt_tokens"] - 1
    developer = [{**message, "role": message["role"].replace("system", "developer")}
                 for message in middle]  # fmt: skip
    again = tiny_target.chat(messages=developer)
    assert again.status_code == 200
    assert again.json()["usage"]["prompt_tokens"] == body.json()["usage"]["prompt_tokens"]
    assert text_of(again.json()) == text_of(body.json())
    leading = [{"role": "system", "content": "Be kind."}, *first]
    assert tiny_target.chat(messages=leading).status_code == 200
