"""A drawn token is always one that top_k and top_p leave in."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.wire import Sampling
from workers.sample import sample

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
    """Ids that may be drawn, the plain way. A rounding error may let one more in at the edge of top_p."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: sampling.top_k or len(logits)]
    largest = float(logits[ranked[0]])
    weights = [math.exp((float(logits[i]) - largest) / sampling.temperature) for i in ranked]
    goal = sampling.top_p * math.fsum(weights) * (1 + 1e-9)
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
def test_one_candidate_is_greedy(logits: np.ndarray, seed: int, position: int) -> None:
    greedy = sample(logits, Sampling(seed=seed), position)
    assert greedy == min(i for i, value in enumerate(logits) if value == logits.max())
    assert sample(logits, Sampling(1.0, 1, 1.0, seed), position) == greedy
