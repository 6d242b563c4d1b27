"""Engines that are made to be killed: each line of standard input forks one, which serves prompts
and writes them to disk until it dies."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from cache_store.block import KVCacheSpec
from tests.rig import EngineRig, RigOptions, disk_cache_size
from tests.test_token_equality import model_of, references, token_ids


@dataclass(frozen=True)
class VictimOptions:
    """A disk for a third of the prompts, so that it is written to and erased from all the time."""

    num_disk: int = 40
    num_host: int = 12

    def in_folder(self, folder: Path) -> RigOptions:
        return RigOptions(
            block_size=8, num_blocks=40, num_host=self.num_host, disk_folder=folder,
            num_disk=self.num_disk,
        )  # fmt: skip

    def max_bytes(self, spec: KVCacheSpec) -> int:
        return disk_cache_size(self.num_disk, spec.bytes_per_block)


OPTIONS = VictimOptions()


def prompts() -> dict[str, list[int]]:
    """Three prefixes and four prompts on each."""
    prefixes = [token_ids(43, seed=50 + number) for number in range(3)]
    return {
        f"{number}.{tail}": prefix + token_ids(13 + 3 * tail, seed=60 + 10 * number + tail)
        for number, prefix in enumerate(prefixes)
        for tail in range(4)
    }


def serve(folder: Path, seed: int) -> None:
    noise = random.Random(seed)
    wanted = references("llama", prompts())
    rig = EngineRig(model_of("llama"), OPTIONS.in_folder(folder))
    print(os.getpid(), flush=True)
    while True:
        some = noise.sample(sorted(wanted), 3)
        number = noise.random()
        rig.check({f"{name} {number}": wanted[name] for name in some}).assert_passes()
        if noise.random() < 0.5:
            rig.settle()


def main() -> None:
    folder = Path(sys.argv[1])
    references("llama", prompts())
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                serve(folder, int(line))
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status) * -1, flush=True)


if __name__ == "__main__":
    main()
