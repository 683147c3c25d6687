"""Every frame has exactly one next hop; a lap visits each stage once and ends on the head."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.errors import RoutingError
from pptasks.plan import Plan, partition
from pptasks.routing import HEAD, produces, route
from pptasks.wire import Kind


def plan_of(stages: int, n_blocks: int, readout: str) -> Plan:
    return Plan(
        spans=partition(n_blocks, stages, "even", [], []),
        n_blocks=n_blocks,
        fingerprint="",
        wire="f32",
        readout=readout,
        context=16,
        slots=1,
        max_rows=16,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stages = draw(st.integers(1, 20))
    return plan_of(stages, draw(st.integers(max(1, stages - 1), 60)), draw(st.sampled_from(["first", "last"])))


@given(plans())
@settings(max_examples=100, deadline=None)
def test_a_lap_visits_each_stage_once_and_ends_on_the_head(plan: Plan) -> None:
    stage, visited = HEAD, [HEAD]
    kinds: list[Kind] = []
    while not kinds or kinds[-1] is Kind.ACTIVATION:
        kinds.append(produces(plan, stage))
        stage = route(plan, stage, kinds[-1])
        visited.append(stage)
        assert len(visited) <= plan.n_stages + 1
    assert visited == [*range(plan.n_stages), HEAD]
    assert kinds[-1] is (Kind.RETURN if plan.readout == "first" and plan.n_stages > 1 else Kind.TOKENS)


@given(plans(), st.data())
@settings(max_examples=100, deadline=None)
def test_each_stage_sends_one_kind_and_errors(plan: Plan, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, plan.n_stages - 1))
    for kind in set(Kind) - {Kind.ERROR, Kind.TRACE, produces(plan, stage)}:
        with pytest.raises(RoutingError, match=rf"^stage {stage} of {plan.n_stages} cannot send {kind.name.lower()}"):
            route(plan, stage, kind)
    assert route(plan, stage, Kind.ERROR) == route(plan, stage, Kind.TRACE) == HEAD


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("stage", [-1, 3, 1000])
def test_a_stage_outside_the_plan_has_no_next_hop(stage: int, kind: Kind) -> None:
    with pytest.raises(RoutingError, match=f"^stage {stage} is not in a plan of 3 stages"):
        route(plan_of(3, 6, "last"), stage, kind)


def test_the_way_back_has_its_own_kinds() -> None:
    line, ring = plan_of(3, 6, "last"), plan_of(3, 6, "first")
    assert [produces(line, stage) for stage in range(3)] == [Kind.ACTIVATION, Kind.ACTIVATION, Kind.TOKENS]
    assert [produces(ring, stage) for stage in range(3)] == [Kind.ACTIVATION, Kind.ACTIVATION, Kind.RETURN]
    assert produces(plan_of(1, 6, "first"), HEAD) is Kind.TOKENS  # one stage reads out what it computed
