"""Spans tile whatever the numbers; the automatic split is optimal against every other."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.plan import Span, check_tiling, partition, split_sizes

costs = st.integers(0, 50).map(float)


def cuts(n_blocks: int, stages: int) -> list[list[int]]:
    """Every way to deal the blocks to the stages with only the first stage empty at most."""
    return [
        [hi - lo for lo, hi in zip((0, *inner), (*inner, n_blocks), strict=True)]
        for inner in combinations(range(n_blocks), stages - 1)
    ]


def stage_costs(sizes: list[int], blocks: list[float], extra: list[float]) -> list[float]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [sum(blocks[end - size : end]) + e for size, end, e in zip(sizes, ends, extra, strict=True)]


def goodness(loads: list[float]) -> tuple[float, float]:
    """Less is better: the largest stage, then the sum of squares."""
    return max(loads), sum(load * load for load in loads)


@given(st.integers(1, 200), st.data(), st.sampled_from(["even", "auto"]))
@settings(max_examples=60, deadline=None)
def test_spans_tile_the_blocks(n_blocks: int, data: st.DataObject, split: str) -> None:
    stages = data.draw(st.integers(1, min(n_blocks + 1, 24)))
    blocks = data.draw(st.lists(costs, min_size=n_blocks, max_size=n_blocks))
    extra = data.draw(st.lists(costs, min_size=stages, max_size=stages))
    spans = partition(n_blocks, stages, split, blocks, extra)
    check_tiling(spans, n_blocks)
    assert [block for span in spans for block in range(span.lo, span.hi)] == list(range(n_blocks))
    assert len(spans) == stages
    assert all(len(span) > 0 for span in spans[1:])


@given(st.integers(1, 200), st.data())
@settings(max_examples=60, deadline=None)
def test_an_even_split_differs_only_on_the_last_stage(n_blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, n_blocks))
    sizes = [len(s) for s in partition(n_blocks, stages, "even", [], [])]
    assert set(sizes[:-1]) <= {n_blocks // stages}
    assert sizes[-1] == n_blocks - (stages - 1) * (n_blocks // stages)


@given(st.integers(1, 9), st.data())
@settings(max_examples=200, deadline=None)
def test_the_automatic_split_is_optimal(n_blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, n_blocks))
    blocks = data.draw(st.lists(costs, min_size=n_blocks, max_size=n_blocks))
    extra = data.draw(st.lists(costs, min_size=stages, max_size=stages))
    chosen = [len(s) for s in partition(n_blocks, stages, "auto", blocks, extra)]
    best = min(goodness(stage_costs(sizes, blocks, extra)) for sizes in cuts(n_blocks, stages))
    assert goodness(stage_costs(chosen, blocks, extra)) == best


@given(st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_the_automatic_split_fills_capacities_evenly(n_blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, n_blocks))
    blocks = data.draw(st.lists(costs, min_size=n_blocks, max_size=n_blocks))
    extra = data.draw(st.lists(costs, min_size=stages, max_size=stages))
    capacities = data.draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=stages, max_size=stages))

    def loads(sizes: list[int]) -> list[float]:
        return [cost / c for cost, c in zip(stage_costs(sizes, blocks, extra), capacities, strict=True)]

    chosen = [len(s) for s in partition(n_blocks, stages, "auto", blocks, extra, capacities)]
    assert goodness(loads(chosen)) == min(goodness(loads(sizes)) for sizes in cuts(n_blocks, stages))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_explicit_split_round_trips(sizes: list[int], empty_head: bool) -> None:
    sizes = [0, *sizes] if empty_head else sizes
    split = ",".join(map(str, sizes))
    spans = partition(sum(sizes), len(sizes), split, [], [])
    assert split_sizes(split) == [len(s) for s in spans] == sizes
    assert spans[0].lo == 0
    assert spans[-1] == Span(sum(sizes[:-1]), sum(sizes))
