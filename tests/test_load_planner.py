import pytest

from cache_store.events import Tier
from cache_store.load_planner import FORGET_S, SMOOTHING, LoadPlan, LoadPlanner

BLOCK_SIZE = 10


class Planning:
    """A planner, the clock it reads and the prefill speed it is told."""

    def __init__(self, token_s: float | None = 0.01) -> None:
        self.token_s = token_s
        self.now_s = 0.0
        self.planner = LoadPlanner(BLOCK_SIZE, lambda: self.token_s, lambda: self.now_s)

    def lowest(self, num_host: int, num_disk: int) -> Tier:
        return self.planner.plan(num_host, num_disk).lowest


def with_speeds(host_s: float | None, disk_s: float | None) -> Planning:
    """Computing a block takes 0.1 s, loading one what is given."""
    planning = Planning()
    for tier, seconds in ((Tier.HOST, host_s), (Tier.DISK, disk_s)):
        if seconds is not None:
            planning.planner.record(tier, 1, seconds)
    return planning


@pytest.mark.parametrize(
    ("host_s", "disk_s", "num_host", "num_disk", "lowest"),
    [
        (0.01, 0.02, 3, 4, Tier.DISK),
        (0.01, 0.5, 3, 4, Tier.HOST),  # cut where the disk begins
        (0.5, 0.5, 3, 4, Tier.DEVICE),
        (0.5, 0.01, 1, 9, Tier.DISK),  # the host's part is the price of the disk's
        (0.5, 0.01, 9, 1, Tier.DEVICE),
        (0.01, 0.5, 0, 4, Tier.DEVICE),
        (0.01, 0.02, 0, 4, Tier.DISK),
        (0.01, 0.02, 3, 0, Tier.HOST),
        (0.5, 0.02, 3, 0, Tier.DEVICE),
        (0.1, 0.1, 3, 4, Tier.DISK),  # as quick as computing: the device has other things to do
        (None, None, 3, 4, Tier.DISK),
        (None, 0.5, 3, 4, Tier.HOST),
        (0.01, None, 3, 4, Tier.DISK),
    ],
)
def test_of_all_cuts_the_quickest_is_taken(
    host_s: float | None, disk_s: float | None, num_host: int, num_disk: int, lowest: Tier
) -> None:
    assert with_speeds(host_s, disk_s).lowest(num_host, num_disk) is lowest


def test_a_plan_tells_what_it_was_made_of() -> None:
    plan = with_speeds(0.25, 2.0).planner.plan(4, 4)
    assert plan == LoadPlan(Tier.DEVICE, Tier.DISK, load_s=9.0, recompute_s=8 * 10 * 0.01)


@pytest.mark.parametrize(("num_host", "num_disk"), [(3, 0), (0, 4), (3, 4)])
def test_while_prefill_is_unmeasured_everything_is_loaded(num_host: int, num_disk: int) -> None:
    planning = Planning(token_s=None)
    planning.planner.record(Tier.HOST, 1, 100.0)
    planning.planner.record(Tier.DISK, 1, 100.0)
    plan = planning.planner.plan(num_host, num_disk)
    assert plan.lowest is plan.slowest is (Tier.DISK if num_disk else Tier.HOST)
    assert plan.recompute_s == 0.0
    assert plan.load_s == 100.0 * (num_host + num_disk)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("num_before", [0, 1, 50])
def test_a_promotion_slower_than_computing_never_happens_twice_in_a_row(
    tier: Tier, num_before: int
) -> None:
    planning = Planning()
    hit = (5, 0) if tier is Tier.HOST else (0, 5)
    for _ in range(num_before):
        planning.planner.record(tier, 5, 0.001)  # however well known as quick
    assert planning.lowest(*hit) is tier
    planning.planner.record(tier, 5, 0.51)
    assert planning.lowest(*hit) is Tier.DEVICE
    assert planning.lowest(*(100 * count for count in hit)) is Tier.DEVICE


def test_a_quicker_measurement_is_smoothed_in() -> None:
    planning = with_speeds(0.05, None)
    planning.planner.record(Tier.HOST, 10, 0.1)
    assert planning.planner.block_s(Tier.HOST) == pytest.approx(0.05 + SMOOTHING * (0.01 - 0.05))
    assert planning.planner.block_s(Tier.DISK) is None


def test_nothing_is_learned_from_nothing() -> None:
    planning = Planning()
    planning.planner.record(Tier.HOST, 0, 5.0)
    assert planning.planner.block_s(Tier.HOST) is None


def test_what_is_known_fades_by_half() -> None:
    planning = with_speeds(0.4, None)
    planning.now_s = FORGET_S
    assert planning.planner.block_s(Tier.HOST) == pytest.approx(0.2)
    assert planning.lowest(3, 0) is Tier.DEVICE
    planning.now_s = 2.1 * FORGET_S
    assert planning.lowest(3, 0) is Tier.HOST  # once again
    planning.planner.record(Tier.HOST, 3, 1.2)
    assert planning.lowest(3, 0) is Tier.DEVICE
    assert planning.planner.block_s(Tier.HOST) == pytest.approx(0.4)


def test_a_clock_that_goes_back_makes_nothing_slower() -> None:
    planning = with_speeds(0.05, None)
    planning.now_s = -FORGET_S
    assert planning.planner.block_s(Tier.HOST) == 0.05


def test_a_slower_device_makes_loading_pay() -> None:
    planning = with_speeds(0.5, None)
    assert planning.lowest(3, 0) is Tier.DEVICE
    planning.token_s = 0.06
    assert planning.lowest(3, 0) is Tier.HOST
