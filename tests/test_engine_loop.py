"""The loop between engine and links: when it waits, when it copies, how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from model_worker.engine_loop import IDLE_CHECK_S, SAVE_POLL_S, EngineLoop
from model_worker.gateway_links import LinkCommand, LinkLost
from model_worker.protocol import AddRequest, TenantPolicies, TenantPolicy
from model_worker.server import WorkerServer
from tests.rig import EngineRig, RigOptions, TeacherSampler, greedy
from tests.scheduler_kit import World
from tests.scheduler_kit import prompt as scripted_prompt
from tests.test_token_equality import model_of, reference_of, token_ids

PROMPT = token_ids(70, seed=2)


@dataclass
class ScriptedStop:
    is_draining: bool = False
    is_immediate: bool = False


@dataclass
class ScriptedServer:
    """Hands over ``commands`` first; then a wait is for the next transfer, and the second wait for
    nothing at all ends the loop. Notes how long each wait could have been."""

    rig: EngineRig
    stop: ScriptedStop
    commands: list[LinkCommand]
    ending: str  # "idle": once nothing is left; "drain", "immediate": as soon as it has begun
    waits: list[float] = field(default_factory=list)
    saving: list[bool] = field(default_factory=list)

    def poll_commands(self, timeout_s: float) -> list[LinkCommand]:
        self.waits.append(timeout_s)
        self.saving.append(self.rig.cache.has_transfers)
        if self.commands:
            commands, self.commands = self.commands, []
            self.stop.is_draining = self.ending == "drain"
            return commands
        if self.ending == "immediate" and self.rig.cache.is_saving:
            self.stop.is_immediate = True
        if timeout_s == IDLE_CHECK_S and not self.rig.cache.has_transfers:
            self.stop.is_draining = True
        elif timeout_s:
            self.rig.arrived.wait(10)
            self.rig.arrived.clear()
        return []

    def publish(self, *arguments: object) -> None:
        pass

    def set_status(self, *arguments: object) -> None:
        pass


def command() -> LinkCommand:
    ids = np.asarray(PROMPT, dtype="<i4").tobytes()
    message = AddRequest(request_id="r", prompt_token_ids=ids, sampling_params=greedy(6))
    return LinkCommand("link", message)


def run(rig: EngineRig, ending: str = "idle") -> ScriptedServer:
    stop = ScriptedStop()
    server = ScriptedServer(rig, stop, [command()], ending)
    assert isinstance(rig.sampler, TeacherSampler)
    rig.sampler.references["r"] = reference_of("llama", tuple(PROMPT))
    with rig.paged():
        EngineLoop(rig.engine, cast(WorkerServer, server), stop, 30.0).run()
    return server


def test_what_goes_idle_is_saved_at_once(tmp_path: Path) -> None:
    rig = EngineRig(model_of("llama"), RigOptions(disk_folder=tmp_path, num_disk=32))
    server = run(rig)
    # The first long wait with nothing to do is one in which a copy is under way already.
    first_idle = server.waits.index(IDLE_CHECK_S, 1)
    assert server.saving[first_idle]
    assert not rig.engine.is_saving
    rig.close()
    again = EngineRig(model_of("llama"), RigOptions(disk_folder=tmp_path, num_disk=32))
    assert again.num_restored == 5
    again.close()


def test_a_worker_that_is_told_to_stop_saves_first(tmp_path: Path) -> None:
    rig = EngineRig(model_of("llama"), RigOptions(disk_folder=tmp_path, num_disk=32))
    server = run(rig, "drain")
    assert server.waits[-1] == SAVE_POLL_S
    assert not rig.engine.is_saving
    rig.close()
    again = EngineRig(model_of("llama"), RigOptions(disk_folder=tmp_path, num_disk=32))
    assert again.num_restored == 5
    again.close()


def test_one_that_is_told_to_stop_at_once_does_not(tmp_path: Path) -> None:
    rig = EngineRig(model_of("llama"), RigOptions(disk_folder=tmp_path, num_disk=32))
    server = run(rig, "immediate")
    assert SAVE_POLL_S not in server.waits
    rig.close()


class PolicyServer:
    """Hands over the policies, and then nothing more comes."""

    def __init__(self, stop: ScriptedStop, policies: TenantPolicies) -> None:
        self._stop = stop
        self._commands = [LinkCommand("link", policies)]

    def poll_commands(self, timeout_s: float) -> list[LinkCommand]:
        self._stop.is_draining = not self._commands
        commands, self._commands = self._commands, []
        return commands

    def publish(self, *arguments: object) -> None:
        pass

    def set_status(self, *arguments: object) -> None:
        pass


def test_policies_of_tenants_reach_the_cache() -> None:
    world = World(num_blocks=60, block_bytes=1000)
    stop = ScriptedStop()
    policy = TenantPolicy(tenant="a", weight=2.0, max_device_bytes=3000)
    server = PolicyServer(stop, TenantPolicies(policies=(policy,)))
    EngineLoop(world.engine, cast(WorkerServer, server), stop, 30.0).run()
    world.add("r", scripted_prompt(40), 1, tenant="a")
    world.run()
    (usage,) = world.cache.tenant_usage()
    assert sum(usage.num_blocks.values()) == 3


@pytest.mark.parametrize(
    ("lost", "level", "event"),
    [
        (LinkLost("closed", is_goodbye=True), "INFO", "link closed"),
        (LinkLost("nothing was heard for 5 s"), "WARNING", "link lost"),
    ],
)
def test_a_goodbye_is_no_loss(
    lost: LinkLost, level: str, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = World()
    loop = EngineLoop(world.engine, cast(WorkerServer, None), ScriptedStop(), 1.0)
    loop._handle(LinkCommand("gw/1", lost))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, event)]
