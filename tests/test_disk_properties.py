"""Random lives of a disk store against a dictionary: what is in which slot.

The store is small, so that it is full and its files have holes most of the time. It is restarted,
now and then with another process's store on the same folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache_store.tiers import disk_io
from cache_store.tiers.disk_format import BlockKey
from tests.disk_kit import (
    CIPHERS,
    file_bytes,
    first_block,
    folder_bytes,
    get,
    max_bytes_for,
    num_descriptors,
    open_store,
    payload,
    raw_content,
)

NUM_SLOTS = 7
KEYS = [first_block(seed) for seed in range(20)]
SLOT_SETS = st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1)


class DiskMachine(RuleBasedStateMachine):
    @initialize(is_sealed=st.booleans(), can_punch=st.booleans())
    def start(self, is_sealed: bool, can_punch: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda _: None)  # a busy disk takes long over each
        if not can_punch:
            self.patch.setattr(disk_io, "punch_hole", lambda *_: False)
        self.cipher = CIPHERS[is_sealed]
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.num_descriptors = num_descriptors()
        self.slots: dict[int, BlockKey] = {}
        self.store, _ = open_store(self.folder, NUM_SLOTS, self.cipher)

    @rule(slots=SLOT_SETS, shift=st.integers(0, len(KEYS) - 1))
    def write(self, slots: set[int], shift: int) -> None:
        stay = {key for slot, key in self.slots.items() if slot not in slots}
        free = [key for key in KEYS[shift:] + KEYS[:shift] if key not in stay]
        batch = dict(zip(sorted(slots), free, strict=False))
        self.store.write([(slot, key, payload(key)) for slot, key in batch.items()])
        self.slots |= batch

    @rule(slots=SLOT_SETS)
    def delete(self, slots: set[int]) -> None:
        self.store.delete(slots)
        gone = [self.slots.pop(slot) for slot in slots if slot in self.slots]
        raw = raw_content(self.folder)
        assert not any(key.tokens in raw or payload(key)[:64] in raw for key in gone)

    @rule()
    def read(self) -> None:
        for slot, key in self.slots.items():
            assert get(self.store, slot, key) == payload(key)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store, found = open_store(self.folder, NUM_SLOTS, self.cipher)
        assert set(found) == set(self.slots.values())
        self.slots = {slot: key for key, slot in found.items()}

    @rule(slots=SLOT_SETS)
    def another_process(self, slots: set[int]) -> None:
        """It reads what is here and stores the like; afterwards no key is there twice."""
        other, found = open_store(self.folder, NUM_SLOTS, self.cipher)
        assert set(found) == set(self.slots.values())
        for key, slot in found.items():
            assert get(other, slot, key) == payload(key)
        other.write([(slot, KEYS[slot], payload(KEYS[slot])) for slot in slots])
        other.delete(list(slots)[1:])
        other.close()
        self.store.close()
        self.store, found = open_store(self.folder, NUM_SLOTS, self.cipher)
        # of what is beyond the limit the blocks stored last stay
        expected = {*self.slots.values(), KEYS[next(iter(slots))]}
        assert set(found) <= expected
        assert len(found) == min(NUM_SLOTS, len(expected))
        self.slots = {slot: key for key, slot in found.items()}

    @invariant()
    def is_within_its_limit(self) -> None:
        if not hasattr(self, "store"):
            return
        assert folder_bytes(self.folder) <= max_bytes_for(NUM_SLOTS)
        assert self.store.usage_bytes == file_bytes(self.folder)
        assert num_descriptors() == self.num_descriptors + 1  # the lock

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.read()
            self.store.close()
            self.temporary.cleanup()
            self.patch.undo()


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
