"""When a run is ready, and which records of members are taken. The keys themselves are tested with a real Redis."""

import json
from dataclasses import asdict, replace

import pytest

from pptasks.errors import PlanError, StageFailed
from pptasks.members import Member, check_ready
from pptasks.plan import Plan, Span
from pptasks.probe import expected

PLAN = Plan(
    spans=(Span(0, 2), Span(2, 4), Span(4, 6)),
    n_blocks=6,
    fingerprint="ab",
    wire="bf16",
    readout="last",
    context=64,
    slots=2,
    max_rows=16,
)


def member(stage: int, state: str = "ready", plan: Plan = PLAN, **changes: object) -> Member:
    span = plan.spans[stage]
    described = Member(
        stage=stage,
        node=f"pp-stage-{stage}@here",
        state=state,
        digest=plan.digest.hex(),
        span=(span.lo, span.hi),
        probe=expected(),
    )
    return replace(described, **changes)  # type: ignore[arg-type]


def everyone(**of_the_middle: object) -> dict[int, Member]:
    return {0: member(0), 1: member(1, **of_the_middle), 2: member(2)}  # type: ignore[arg-type]


def test_everyone_ready_with_one_plan_is_ready() -> None:
    assert check_ready(everyone(), PLAN) is True


def test_a_missing_or_loading_stage_is_waited_for() -> None:
    for stage in range(3):
        assert check_ready({i: m for i, m in everyone().items() if i != stage}, PLAN) is False
    assert check_ready(everyone(state="starting"), PLAN) is False
    assert check_ready(everyone(state="starting", digest="", span=None), PLAN) is False
    assert check_ready({}, PLAN) is False


def test_a_failed_stage_is_told_with_its_error() -> None:
    with pytest.raises(StageFailed, match=r"^stage 1 \(pp-stage-1@here\) failed: no such file"):
        check_ready(everyone(state="failed", error="no such file"), PLAN)
    with pytest.raises(StageFailed):
        check_ready({1: member(1, "failed")}, PLAN)  # the others need not be there


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_another_plan_is_refused_as_soon_as_it_is_told(state: str) -> None:
    other = replace(PLAN, context=65)
    with pytest.raises(PlanError, match=rf"^stage 1 .*{other.digest.hex()[:8]}.*{PLAN.digest.hex()[:8]}"):
        check_ready({1: member(1, state, other)}, PLAN)


@pytest.mark.parametrize("span", [(1, 4), (2, 3), (2, 2), (4, 6), (0, 2)])
def test_spans_that_do_not_fit_each_other_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(PlanError):
        check_ready(everyone(span=span), PLAN)


def test_swapped_stages_are_refused() -> None:
    with pytest.raises(PlanError):
        check_ready({0: member(0), 1: member(1, span=(4, 6)), 2: member(2, span=(2, 4))}, PLAN)


def test_a_ready_stage_that_tells_no_span_is_refused() -> None:
    with pytest.raises(PlanError):
        check_ready(everyone(span=None), PLAN)


def test_a_ready_stage_that_tells_no_digest_does_not_hold_the_plan() -> None:
    with pytest.raises(PlanError):
        check_ready(everyone(digest=""), PLAN)


def test_a_head_that_tells_no_span_is_refused() -> None:
    plan = replace(PLAN, spans=(Span(0, 0), Span(0, 3), Span(3, 6)))
    with pytest.raises(PlanError):
        check_ready({0: member(0, plan=plan, span=None), 1: member(1, plan=plan), 2: member(2, plan=plan)}, plan)


@pytest.mark.parametrize("span", [None, (0, 0), (3, 7)])
def test_a_record_round_trips(span: tuple[int, int] | None) -> None:
    there = Member(stage=3, node="n", state="ready", phase="load", done=5, total=9, span=span, digest="ff", error="é")
    assert Member.from_json(json.dumps(asdict(there)).encode()) == there


FIGURES = (
    "at_us", "steps", "rows", "busy_us", "lanes", "slots", "kv_bytes", "compiles", "refused",
    "live", "waiting", "in_flight", "tokens", "prompt_tokens", "cached_tokens", "requests", "cancelled", "failed",
)  # fmt: skip


def test_figures_round_trip_and_are_0_where_nothing_is_told() -> None:
    there = replace(Member(stage=0), hop_us=17.5, **dict(zip(FIGURES, range(1, 99), strict=False)))  # type: ignore[arg-type]
    assert Member.from_json(json.dumps(asdict(there))) == there
    bare = Member.from_json('{"stage": 0}')
    assert {getattr(bare, name) for name in (*FIGURES, "hop_us")} == {0}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", ["-1", "1.5", "1e30", str(10**30), "null", '"1"', "true", "[]", "NaN"])
def test_a_figure_that_is_no_count_is_a_value_error(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="record"):
        Member.from_json(f'{{"stage": 0, "{name}": {value}}}')


@pytest.mark.parametrize("value", ["-1.0", "NaN", "Infinity", "1e30", '"1"', "null"])
def test_a_hop_that_is_no_time_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match="record"):
        Member.from_json(f'{{"stage": 0, "hop_us": {value}}}')


def test_each_start_is_another_incarnation() -> None:
    assert Member(stage=0).incarnation != Member(stage=0).incarnation


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert Member.from_json(b'{"stage": 1, "mood": "good"}').stage == 1


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"stage": ' + b" " * (64 << 10) + b"1}"])
def test_what_is_no_record_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|can't decode|record"):
        Member.from_json(raw)


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"null", b"5", b"{}", b'{"stage": 0, "span": 5}', b"[" * 60_000, b'{"stage": 0, "span": ["a"]}',
     b'{"stage": "x"}', b'{"stage": 0, "digest": 5}', b'{"stage": 0, "done": null}'],
    ids=lambda raw: raw[:30].decode(),
)  # fmt: skip
def test_json_that_is_no_record_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        Member.from_json(raw)


def test_texts_are_cut_and_harmless() -> None:
    texts = dict.fromkeys(("error", "device", "phase", "node", "host"), "a\x1b]0;b\x07\nerror: c\u202e" + "x" * 5000)
    record = asdict(Member.from_json(json.dumps({"stage": 0, **texts})))
    for name in texts:
        assert record[name] == ("a]0;b error: c" + "x" * 5000)[: 2000 if name == "error" else 300]


@pytest.mark.parametrize(
    "field",
    ['"done": -1', '"total": 1e999', '"total": 2000000000000000000', f'"done": {10**400}', '"pid": -5',
     '"rtt_ms": NaN', '"rtt_ms": Infinity', '"rtt_ms": -1.0', '"span": [-1, 2]', f'"span": [0, {10**30}]',
     '"stage": 1024', '"stage": -1'],
)  # fmt: skip
def test_a_figure_out_of_bounds_is_a_value_error(field: str) -> None:
    with pytest.raises(ValueError, match="record"):
        Member.from_json(f'{{"stage": 0, {field}}}')


def test_a_device_that_multiplies_wrongly_is_named() -> None:
    for probe in ("0" * 16, ""):
        with pytest.raises(StageFailed, match=r"^stage 1 \(pp-stage-1@here\): GPU7 multiplies matrices wrongly"):
            check_ready(everyone(probe=probe, device="GPU7"), PLAN)
    with pytest.raises(StageFailed):  # before it has its layers
        check_ready({1: member(1, "starting", probe="0" * 16)}, PLAN)
    assert check_ready({1: member(1, "starting", probe="")}, PLAN) is False
