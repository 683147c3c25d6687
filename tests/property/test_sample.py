"""A drawn token is always one that top_k and top_p leave in."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pptasks.wire import MAX_LOGPROBS, Sampling
from workers.sample import choose, sample

logit = st.floats(-1e4, 1e4, width=32) | st.integers(-3, 3).map(float)  # the integers make ties
vocabularies = st.lists(logit, min_size=1, max_size=40).map(lambda values: np.array(values, np.float32))
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.01, 100),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-6, 1),
    seed=st.integers(0, (1 << 64) - 1),
)
positions = st.integers(0, (1 << 32) - 1)


def candidates(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Ids that may be drawn, the plain way. A rounding error (weights are float32) may let one more in at the edge of
    top_p."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: sampling.top_k or len(logits)]
    largest = float(logits[ranked[0]])
    weights = [math.exp((float(logits[i]) - largest) / sampling.temperature) for i in ranked]
    goal = sampling.top_p * math.fsum(weights) * (1 + 1e-5)
    return {i for rank, i in enumerate(ranked) if math.fsum(weights[:rank]) <= goal and weights[rank] > 0}


@pytest.mark.filterwarnings("error")
@given(vocabularies, samplings, positions)
@settings(max_examples=300, deadline=None)
def test_a_draw_is_a_candidate_and_repeats(logits: np.ndarray, sampling: Sampling, position: int) -> None:
    token = sample(logits, sampling, position)
    assert type(token) is int
    assert token in candidates(logits, sampling)
    assert sample(logits.copy(), sampling, position) == token


@given(vocabularies, st.integers(0, (1 << 64) - 1), positions)
@settings(max_examples=100, deadline=None)
@example(np.array([0, 1e-6], np.float32), 0, 0)  # the same weight in float32
def test_one_candidate_is_greedy(logits: np.ndarray, seed: int, position: int) -> None:
    greedy = sample(logits, Sampling(seed=seed), position)
    assert greedy == min(i for i, value in enumerate(logits) if value == logits.max())
    assert sample(logits, Sampling(1.0, 1, 1.0, seed), position) == greedy
    assert sample(logits, Sampling(100.0, 0, 1e-6, seed), position) == greedy


# ---- against sorting the whole vocabulary ----


SLACK = (1 - 1e-6, 1.0, 1 + 1e-6)  # sums are added up in another order, and of float32 values


def plainly(logits: np.ndarray, sampling: Sampling, position: int, counts: dict[int, int]) -> set[int]:
    """The token as `sample` defines it, by sorting all and adding up all; more than one where rounding decides."""
    at = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position)).random()
    return {_drawn(logits, sampling, counts, at, cut, draw) for cut in SLACK for draw in SLACK}


def _drawn(logits: np.ndarray, sampling: Sampling, counts: dict[int, int], at: float, cut: float, draw: float) -> int:
    logits = logits.copy()
    for token, times in counts.items():
        logits[token] -= np.float32(sampling.frequency_penalty * times + sampling.presence_penalty)
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    weights = np.exp((logits[order] - logits.max()) * np.float32(1 / sampling.temperature))
    if sampling.top_p < 1:
        sums = np.cumsum(weights, dtype=np.float64)
        n = int(np.searchsorted(sums, sampling.top_p * sums[-1] * cut)) + 1
        order, weights = order[:n], weights[:n]
    elif not 0 < sampling.top_k < len(logits):  # nothing is cut: by id
        order, weights = np.arange(len(logits)), weights[np.argsort(order)]
    sums = np.cumsum(weights, dtype=np.float64)
    i = int(np.searchsorted(sums, at * sums[-1] * draw, side="right"))
    return int(order[min(i, len(order) - 1)])


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 2, 255, 256, 257, 600, 3000, 20_000]),
    st.sampled_from([0.0, 0.02, 0.5, 3.0, 20.0]),
    st.booleans(),
    st.sampled_from([0, 1, 7, 256, 300, 5000]),
    st.sampled_from([1e-6, 0.05, 0.5, 0.9, 0.99, 0.999999, 1.0]),
    st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    st.sampled_from([(0.0, 0.0), (1.5, 0.0), (0.0, 0.3), (-0.7, 0.2)]),
)
@settings(max_examples=300, deadline=None)
def test_a_draw_is_that_from_the_whole_sorted_vocabulary(
    seed: int, vocab: int, spread: float, is_tied: bool, top_k: int, top_p: float, temperature: float,
    penalties: tuple[float, float],
) -> None:  # fmt: skip
    """From flat to steep, with ties, and with a nucleus that is wider than what is looked at first."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, vocab)
    logits = (np.round(logits, 1) if is_tied else logits).astype(np.float32)
    counts = {int(i): int(rng.integers(1, 9)) for i in rng.integers(0, vocab, 20)}
    for position in range(3):
        sampling = Sampling(temperature, top_k, top_p, seed, *penalties)
        assert sample(logits, sampling, position, counts.items()) in plainly(logits, sampling, position, counts)


@given(vocabularies, samplings, positions, st.integers(0, MAX_LOGPROBS))
@settings(max_examples=150, deadline=None)
def test_what_is_told_of_a_token_changes_no_draw(
    logits: np.ndarray, sampling: Sampling, position: int, told: int
) -> None:
    asked = replace(sampling, logprobs=told)
    token = choose(logits, asked, position)
    assert token.id == sample(logits, sampling, position)
    assert token.logprob is not None
    assert token.logprob <= 1e-6
    assert len(token.top) == min(told, len(logits))
    assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)
    if told:
        assert token.logprob <= token.top[0][1]
        assert token.top[0][0] == int(logits.argmax())
