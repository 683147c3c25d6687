"""How many sequences a stage's memory holds."""

from dataclasses import replace
from pathlib import Path

import pytest

from pptasks.config import Settings
from pptasks.models import open_model
from pptasks.plan import CACHE_SHARE, DEFAULT_SLOTS, cache_bytes, make_plan, slots_that_fit, stage_bytes

TIED = Path(__file__).parents[1] / "goldens" / "llama-tied"


@pytest.mark.parametrize("slots", [1, 3, DEFAULT_SLOTS])
def test_a_stage_holds_as_many_slots_as_fit_beside_its_weights(slots: int) -> None:
    model = open_model(TIED, cache=Path("/nonexistent"))
    plan = make_plan(model, Settings(context=64))
    weights = stage_bytes(model, replace(plan, slots=0), 1)
    each = len(plan.spans[1]) * cache_bytes(model, 1, 64)
    needed = (weights + slots * each) / CACHE_SHARE
    assert slots_that_fit(model, plan, 1, int(needed) + 1) == slots
    assert slots_that_fit(model, plan, 1, int(needed) - 1) == max(1, slots - 1)


def test_no_stage_holds_more_than_the_plan_says_or_less_than_one() -> None:
    model = open_model(TIED, cache=Path("/nonexistent"))
    plan = make_plan(model, Settings(context=64, slots=2))
    assert slots_that_fit(model, plan, 0, 1 << 50) == 2
    assert slots_that_fit(model, plan, 0, 0) == 1


def test_a_stage_without_blocks_has_no_cache_to_fit() -> None:
    model = open_model(TIED, cache=Path("/nonexistent"))
    plan = make_plan(model, Settings(context=64, split=f"0,{model.config.n_blocks}"))
    assert slots_that_fit(model, plan, 0, 0) == DEFAULT_SLOTS
