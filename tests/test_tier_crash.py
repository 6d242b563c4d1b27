"""A worker's engine that is killed while it writes to its disk tier, twenty times over one folder.

After each death another engine takes the folder over: its tokens are the reference's, nothing that
it loads is refused, and the folder is within its limit. The victims are forked from one process
that has everything imported, since a start of its own for each would take minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.events import Tier
from tests.disk_kit import files_in, folder_bytes
from tests.rig import EngineRig
from tests.test_token_equality import model_of, references
from tests.tier_victim import OPTIONS, prompts

NUM_KILLS = 20
ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def nursery(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks a victim for each line it reads, and prints its number."""
    command = [sys.executable, "-m", "tests.tier_victim", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # which ends it
            process.wait(30)


def victim(parent: subprocess.Popen[str], seed: int) -> int:
    """The number of a process that has begun to serve, and so to write."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    print(seed, file=parent.stdin, flush=True)
    return int(parent.stdout.readline())


def test_twenty_kills_cost_no_wrong_token(tmp_path: Path) -> None:
    noise = random.Random(5)
    wanted = references("llama", prompts())
    limit = 0
    num_restored = num_promoted = 0
    with nursery(tmp_path) as parent:
        for number in range(NUM_KILLS):
            pid = victim(parent, number)
            time.sleep(noise.uniform(0.0, 0.25))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout is not None
            assert int(parent.stdout.readline()) == signal.SIGKILL  # it died of nothing else
            rig = EngineRig(model_of("llama"), OPTIONS.in_folder(tmp_path))
            assert rig.tiers is not None
            assert rig.tiers.disk is not None
            limit = OPTIONS.max_bytes(rig.spec)
            assert folder_bytes(tmp_path) <= limit
            some = noise.sample(sorted(wanted), 4)
            rig.check({name: wanted[name] for name in some}).assert_passes()
            rig.settle()
            (disk,) = [tier for tier in rig.cache.stats().tiers if tier.tier is Tier.DISK]
            assert disk.failed_total == 0  # what was found is whole
            num_restored += rig.num_restored
            num_promoted += disk.promoted_total
            rig.close()
            assert folder_bytes(tmp_path) <= limit
            assert all(path.suffix == ".kv" for path in files_in(tmp_path))
    assert num_restored > NUM_KILLS
    assert num_promoted > NUM_KILLS
