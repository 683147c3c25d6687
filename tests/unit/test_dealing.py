"""Stages for machines of several sizes and speeds, and what is said when they do not suffice."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.dealing import KEEP_FREE, WORKER_BYTES, Deal, deal, room
from pptasks.config import Settings
from pptasks.errors import PlanError
from pptasks.guests import Guest
from pptasks.plan import DEFAULT_SLOTS, Span, cache_bytes, make_plan, stage_bytes
from tests.unit.test_plan import SMOLLM2, model

GB = 10**9
UNTIED = replace(SMOLLM2, tied=False)


def guest(seat: int, memory: float = 16.0, speed: float = 10.0, host: str = "") -> Guest:
    """With `memory` GB of room, and a speed of `speed` GB/s."""
    free = int((memory * GB + WORKER_BYTES) / (1 - KEEP_FREE)) + 1
    return Guest(seat, host or f"host{seat}", "wait", "CPU", free, speed * GB)


def dealt(*guests: Guest, config: Any = SMOLLM2, **settings: Any) -> Deal:
    return deal(model(config), Settings(**settings), {g.seat: g for g in guests})


def sizes(deal: Deal) -> dict[int, int]:
    """Blocks by seat."""
    return dict(zip(deal.seats, map(len, deal.plan.spans), strict=True))


def test_blocks_go_by_speed_where_memory_is_no_matter() -> None:
    done = dealt(guest(1, speed=10), guest(2, speed=30), readout="last", config=UNTIED)
    assert sizes(done)[2] > 2 * sizes(done)[1]
    assert done.split == ",".join(str(len(span)) for span in done.plan.spans)


def test_who_has_little_memory_gets_few_blocks_however_fast_it_is() -> None:
    """A block of this toy is 14 MB and its cache 12.6 MB."""
    done = dealt(guest(1, memory=0.1, speed=1000), guest(2), guest(3), slots=4)
    assert sizes(done)[1] <= 4
    for stage, seat in enumerate(done.seats):
        need = stage_bytes(model(SMOLLM2), done.plan, stage)
        assert need <= room({1: guest(1, 0.1), 2: guest(2), 3: guest(3)}[seat])


def test_in_a_ring_the_head_is_one_that_can_read_out_fast() -> None:
    done = dealt(guest(1, speed=1), guest(2, speed=50), guest(3, speed=1))
    assert done.plan.is_ring
    assert done.seats[0] == 2


def test_in_a_line_the_last_reads_out() -> None:
    done = dealt(guest(1, speed=1), guest(2, speed=50), guest(3, speed=1), config=UNTIED)
    assert not done.plan.is_ring
    assert done.seats[-1] == 2


def test_a_head_that_reads_out_may_keep_no_block() -> None:
    """Its embedding of 28 M floats is eight blocks."""
    done = dealt(guest(1), guest(2, speed=100), guest(3, speed=100), config=replace(SMOLLM2, n_blocks=4))
    assert min(map(len, done.plan.spans)) == 0
    assert len(done.plan.spans[0]) == 0


def test_one_machine_takes_all() -> None:
    for config in (SMOLLM2, UNTIED):
        assert dealt(guest(7), config=config).plan.spans == (Span(0, 30),)


def test_the_plan_is_what_every_machine_makes_of_the_split() -> None:
    done = dealt(guest(1), guest(2, speed=3), guest(3), memory="1G", slots=2)
    settings = Settings(num_stages=3, split=done.split, slots=2)
    assert make_plan(model(SMOLLM2), settings).digest == done.plan.digest


def test_a_split_that_is_given_is_kept_and_goes_to_who_can_hold_it() -> None:
    done = dealt(guest(1, memory=0.3), guest(2, memory=8), guest(3, memory=1), split="5,20,5")
    assert (done.split, done.seats) == ("5,20,5", (3, 2, 1))
    with pytest.raises(PlanError, match="names 2 stages, but 3"):
        dealt(guest(1), guest(2), guest(3), split="15,15")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PlanError) as raised:
        dealt(guest(1, 0.1, host="laptop"), guest(2, 0.2, host="desk"), guest(3, 0.01, host="old"))
    said = str(raised.value)
    assert "needs 0.63 GB for weights and KV cache" in said  # with one slot
    assert "the 3 machines have 0.31 GB" in said
    assert "desk 0.20 GB, laptop 0.10 GB, old 0.01 GB" in said
    assert "let more or larger machines join" in said


def test_slots_that_are_given_are_kept() -> None:
    assert dealt(guest(1), guest(2), slots=40).plan.slots == 40
    with pytest.raises(PlanError, match=r"needs 0\.92 GB for weights and KV cache"):
        dealt(guest(1, 0.3), guest(2, 0.3), slots=4)


@pytest.mark.parametrize("split", ["even", "5,20,5"])
def test_there_are_as_many_slots_as_fit(split: str) -> None:
    """At most the default: weights are 0.54 GB, and a slot takes 0.09 GB."""
    assert dealt(guest(1), guest(2), guest(3), split=split).plan.slots == DEFAULT_SLOTS
    guests = guest(1, 0.3), guest(2, 0.8), guest(3, 0.2)
    done = dealt(*guests, split=split)
    assert 4 < done.plan.slots < DEFAULT_SLOTS
    for stage, seat in enumerate(done.seats):
        assert stage_bytes(model(SMOLLM2), done.plan, stage) <= room(guests[seat - 1])
    with pytest.raises(PlanError):
        dealt(*guests, split=split, slots=done.plan.slots + 1)
    assert dealt(*guests, split=split, slots=done.plan.slots) == done


def test_a_bound_on_the_cache_bounds_the_slots() -> None:
    done = dealt(guest(1, speed=30), guest(2), kv_bytes="100M")
    cache = cache_bytes(model(SMOLLM2), 1, done.plan.context)
    assert len(done.plan.spans[0]) != len(done.plan.spans[1])  # by speed all the same
    largest = max(map(len, done.plan.spans))
    assert largest * done.plan.slots * cache <= 100 << 20 < largest * (done.plan.slots + 1) * cache


@pytest.mark.parametrize("split", ["even", "auto", "10,10,10"])
def test_one_that_cannot_hold_even_a_block_is_an_error(split: str) -> None:
    with pytest.raises(PlanError, match=r"tiny 0\.00 GB"):
        dealt(guest(1), guest(2), guest(3, 0.001, host="tiny"), split=split)


@pytest.mark.parametrize(("n", "told"), [(0, "0 machines"), (65, "65 machines"), (32, "32 stages for 30 blocks")])
def test_too_few_and_too_many_machines(n: int, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        dealt(*map(guest, range(n)))


def test_what_a_machine_keeps_for_itself() -> None:
    assert room(replace(guest(1), memory_bytes=WORKER_BYTES)) == 0
    assert room(replace(guest(1), memory_bytes=10 * GB)) == 9 * GB - WORKER_BYTES
