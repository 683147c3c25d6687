"""Deals fit, are as fast as the best that a search finds, and do not depend on who came first."""

import random
from dataclasses import replace
from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dealing import Deal, deal, read_bytes, room
from pptasks.config import Settings
from pptasks.errors import PlanError
from pptasks.guests import Guest
from pptasks.modelinfo import Model
from pptasks.plan import DEFAULT_SLOTS, Plan, check_tiling, make_plan, stage_bytes
from tests.unit.test_dealing import guest
from tests.unit.test_plan import SMOLLM2, model

TOY = replace(SMOLLM2, dim=64, n_heads=2, n_kv_heads=1, head_dim=32, ffn_dim=128, vocab_size=512, n_blocks=6)
# Room in GB: the toy's blocks are of 2.2 MB with a cache of 4 slots, of 0.7 MB with one slot; its embedding of 0.13 MB.
machines = st.tuples(
    st.sampled_from([0.0005, 0.0025, 0.0047, 0.006, 0.02, 1.0]), st.sampled_from([1.0, 2.0, 3.5, 20.0])
)
some = st.lists(machines, min_size=1, max_size=4)
tied = st.booleans()


def toy(tied: bool, n_blocks: int = 6) -> Model:
    return model(replace(TOY, tied=tied, n_blocks=n_blocks))


def seated(given: list[tuple[float, float]]) -> dict[int, Guest]:
    return {seat: guest(seat, *figures, host="h") for seat, figures in enumerate(given, 1)}


def attempt(model: Model, guests: dict[int, Guest], split: str = "even", slots: int | None = 4) -> Deal | None:
    try:
        return deal(model, Settings(split=split, slots=slots), guests)
    except PlanError:
        return None


def slowest(model: Model, plan: Plan, order: list[Guest]) -> float:
    return max(read_bytes(model, plan, stage) / guest.speed for stage, guest in enumerate(order))


def fits(model: Model, plan: Plan, order: list[Guest]) -> bool:
    return all(stage_bytes(model, plan, stage) <= room(guest) for stage, guest in enumerate(order))


@given(st.lists(machines, min_size=1, max_size=12), tied, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_spans_tile_and_no_machine_holds_more_than_it_can(
    given: list[tuple[float, float]], tied: bool, n_blocks: int
) -> None:
    guests, toy_model = seated(given), toy(tied, n_blocks)
    done = attempt(toy_model, guests)
    if done is not None:
        check_tiling(done.plan.spans, n_blocks)
        assert sorted(done.seats) == sorted(guests)
        order = [guests[seat] for seat in done.seats]
        assert fits(toy_model, done.plan, order)
        assert done.slowest_s == slowest(toy_model, done.plan, order)


@given(some, tied)
@settings(max_examples=60, deadline=None)
def test_no_other_deal_has_a_faster_slowest_stage(given: list[tuple[float, float]], tied: bool) -> None:
    """Against all splits and orders: so it is no worse than an even split, and finds what fits whenever any does."""
    guests, toy_model = seated(given), toy(tied)
    n = len(guests)
    best = None
    for inner in combinations(range(6), n - 1):
        cut = ",".join(str(hi - lo) for lo, hi in zip((0, *inner), (*inner, 6), strict=True))
        plan = make_plan(toy_model, Settings(num_stages=n, split=cut, slots=4))
        for order in permutations(guests.values()):
            if fits(toy_model, plan, list(order)):
                time = slowest(toy_model, plan, list(order))
                best = time if best is None else min(best, time)
    done = attempt(toy_model, guests)
    assert (done is None) == (best is None)
    if done is not None:
        assert done.slowest_s == best


@given(some, tied, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_who_came_first_does_not_matter(given: list[tuple[float, float]], tied: bool, shuffle: random.Random) -> None:
    shuffled = shuffle.sample(given, len(given))
    guests, others = seated(given), seated(shuffled)
    one, two = attempt(toy(tied), guests), attempt(toy(tied), dict(reversed(others.items())))
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        figures = [
            [(group[seat].speed, group[seat].memory_bytes) for seat in done.seats]
            for group, done in ((guests, one), (others, two))
        ]
        assert (one.split, figures[0]) == (two.split, figures[1])
        assert attempt(toy(tied), guests) == one


@given(some, st.sampled_from([(6,), (2, 4), (0, 6), (1, 1, 4), (3, 2, 1), (0, 3, 3), (1, 2, 2, 1)]), tied)
@settings(max_examples=100, deadline=None)
def test_a_given_split_is_dealt_whenever_any_order_fits(
    given: list[tuple[float, float]], cut: tuple[int, ...], tied: bool
) -> None:
    guests, toy_model, split = seated(given), toy(tied), ",".join(map(str, cut))
    if len(cut) != len(guests):
        return
    plan = make_plan(toy_model, Settings(num_stages=len(cut), split=split, slots=4))
    possible = any(fits(toy_model, plan, list(order)) for order in permutations(guests.values()))
    done = attempt(toy_model, guests, split)
    assert (done is not None) == possible
    if done is not None:
        assert done.split == split
        assert fits(toy_model, done.plan, [guests[seat] for seat in done.seats])


@given(some, st.sampled_from(["even", "6", "2,4", "1,1,4", "0,6"]), tied)
@settings(max_examples=100, deadline=None)
def test_the_slots_are_the_most_that_fit(given: list[tuple[float, float]], split: str, tied: bool) -> None:
    guests, toy_model = seated(given), toy(tied)
    deals = [attempt(toy_model, guests, split, slots) for slots in range(DEFAULT_SLOTS, 0, -1)]
    assert attempt(toy_model, guests, split, None) == next((found for found in deals if found is not None), None)
