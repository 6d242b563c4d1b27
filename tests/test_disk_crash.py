"""A writer that is killed at random moments, twenty times, over one folder.

After each death a reader takes the folder over: every block it finds is whole, each key is there
once, nothing half-written stays, and the folder is within its limit. The writer works close to the
limit, in small batches with deletions in between, so that it is killed while it writes, renames,
erases and closes holes alike.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache_store.cipher import Cipher
from tests.disk_kit import (
    CIPHERS,
    file_bytes,
    files_in,
    folder_bytes,
    get,
    max_bytes_for,
    open_store,
    payload,
)

NUM_SLOTS = 24
NUM_KILLS = 20
ROOT_FOLDER = Path(__file__).resolve().parent.parent

WRITER = """
import random, sys
from pathlib import Path
from tests.disk_kit import CIPHERS, chain, open_store, payload

folder, is_sealed, seed = sys.argv[1:]
noise = random.Random(int(seed))
store, slots = open_store(Path(folder), 24, CIPHERS[int(is_sealed)])
prompts = [chain(number, 3, num_last=2) for number in range(30)]
print("ready", flush=True)
while True:
    keys = [key for key in noise.choice(prompts) if key not in slots]
    while len(slots) + len(keys) > 24:
        gone = noise.sample(sorted(slots, key=slots.get), min(len(slots), noise.randint(1, 3)))
        store.delete([slots.pop(key) for key in gone])
    free = iter(sorted(set(range(24)) - set(slots.values())))
    new = {key: next(free) for key in keys}
    store.write([(slot, key, payload(key)) for key, slot in new.items()])
    slots |= new
"""


@pytest.mark.parametrize("cipher", CIPHERS, ids=("plain", "sealed"))
def test_twenty_kills(tmp_path: Path, cipher: Cipher | None) -> None:
    noise = random.Random(11)
    num_read = 0
    for number in range(NUM_KILLS // 2):  # ten for each parameter
        arguments = [str(tmp_path), str(int(cipher is not None)), str(number)]
        command = [sys.executable, "-c", WRITER, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT_FOLDER) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(noise.uniform(0.01, 0.2))
            assert process.poll() is None
            process.kill()
            process.wait(20)
        assert folder_bytes(tmp_path) <= max_bytes_for(NUM_SLOTS)
        store, slots = open_store(tmp_path, NUM_SLOTS, cipher)
        assert all(path.suffix == ".kv" for path in files_in(tmp_path))
        for key, slot in slots.items():
            assert get(store, slot, key) == payload(key)
        num_read += len(slots)
        assert store.usage_bytes == file_bytes(tmp_path)
        assert folder_bytes(tmp_path) <= max_bytes_for(NUM_SLOTS)
        store.close()
    assert num_read > NUM_KILLS
