"""A batch changes no answer: whatever is served beside it, a request's tokens are its tokens alone.

A real pipeline of golden models, through real frames; requests join, leave and are cancelled at any moment, prompts are
cut anywhere, begin alike, and are sampled in their own ways.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.wire import Sampling, short_id
from tests.pipeline import Pipeline
from workers.scheduler import Sequence, State

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = {"llama-tied": "first", "qwen2-bias": "last", "mistral-window": "auto"}
CONTEXT, SLOTS = 96, 5
BEGINNING = tuple(3 + i * i % 50 for i in range(40))  # what prompts may share


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    comes: int  # in turns of the pipeline
    cancelled: int | None


samplings = st.one_of(
    st.just(Sampling()),
    st.builds(Sampling, st.floats(0.3, 1.5), st.integers(0, 9), st.sampled_from([0.6, 1.0]), st.integers(0, 99)),
    st.builds(Sampling, st.just(0.8), seed=st.integers(0, 99), presence_penalty=st.just(0.7), logprobs=st.just(2)),
    st.builds(Sampling, frequency_penalty=st.just(1.5), logprobs=st.just(0)),
)
prompts = st.builds(
    lambda n, tail: BEGINNING[:n] + tuple(tail),
    st.integers(0, 40),
    st.lists(st.integers(3, 60), min_size=1, max_size=30),
)
asked = st.builds(
    Asked, prompts, st.integers(1, 12), samplings, st.integers(0, 60), st.none() | st.none() | st.integers(0, 90)
)
crowds = st.lists(asked, min_size=2, max_size=8)


@cache
def pipeline(name: str) -> Pipeline:
    return Pipeline(
        GOLDENS / name, stages=2, wire="f32", context=CONTEXT, slots=SLOTS, prefill_chunk=48, readout=MODELS[name]
    )


def serve(pipe: Pipeline, crowd: list[Asked], max_rows: int, max_lanes: int, in_flight: int) -> list[list[int]]:
    """The tokens of each. Between two calls stages keep what is in their caches, as they do between requests."""
    pipe.state = State(
        pipe.plan.slots, max_rows, 30.0,
        next_step=pipe.state.next_step, max_lanes=max_lanes, in_flight=in_flight, held=pipe.state.held,
    )  # fmt: skip
    sequences = [
        Sequence(f"{i}-{pipe.state.next_step}", short_id(f"{i}-{pipe.state.next_step}"), list(one.prompt),
                 len(one.prompt), one.max_tokens, frozenset({2}), one.sampling)
        for i, one in enumerate(crowd)
    ]  # fmt: skip
    turn, coming = 0, list(zip(crowd, sequences, strict=True))
    while coming or any(True for _ in pipe.state.sequences()):
        for one, sequence in [c for c in coming if c[0].comes <= turn or not any(True for _ in pipe.state.sequences())]:
            coming.remove((one, sequence))
            pipe.state.waiting.append(sequence)
        for one, sequence in zip(crowd, sequences, strict=True):
            if one.cancelled is not None and one.cancelled <= turn:
                pipe.state.end(sequence)
        if any(True for _ in pipe.state.sequences()):
            pipe.turn()
        turn += 1
    assert not pipe.state.live
    assert not pipe.state.laps
    return [sequence.generated for sequence in sequences]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None)
@given(crowds, st.integers(1, 48), st.integers(1, 5), st.integers(1, 4))
def test_a_request_gets_the_tokens_that_it_gets_alone(
    name: str, crowd: list[Asked], max_rows: int, max_lanes: int, in_flight: int
) -> None:
    pipe = pipeline(name)
    together = serve(pipe, crowd, max_rows, max_lanes, in_flight)
    for one, got in zip(crowd, together, strict=True):
        pipe.state.held.clear()
        [alone] = serve(pipe, [Asked(one.prompt, one.max_tokens, one.sampling, 0, None)], 48, 1, 1)
        assert got == alone[: len(got)]
        assert one.cancelled is not None or len(got) == len(alone)


def test_tinygrads_own_kernels_do_not_mix_lanes_either() -> None:
    """They round otherwise in another shape, so this is of greedy tokens of one model, and no bits."""
    pipe = Pipeline(GOLDENS / "llama-tied", stages=2, wire="f32", context=CONTEXT, slots=4, kernels="tinygrad")
    crowd = [Asked((*BEGINNING[: 20 + 4 * i], 50 + i), 6, Sampling(), i, None) for i in range(4)]
    together = serve(pipe, crowd, 24, 3, 2)
    assert any(sequence.n_cached for sequence in pipe.state.held.values())
    for one, got in zip(crowd, together, strict=True):
        pipe.state.held.clear()
        assert serve(pipe, [one], 24, 1, 1) == [got]
