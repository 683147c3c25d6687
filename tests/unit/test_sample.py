"""A token from logits: greedy, or one reproducible draw from the softmax."""

from collections import Counter

import numpy as np
import pytest

from pptasks.wire import Sampling
from workers.sample import sample

LOGITS = np.array([1.0, 3.0, 2.0, 0.5, -1.0, 2.5, -30.0, 0.0], np.float32)
GREEDY = Sampling()
N_DRAWS = 4000


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def chi_square(drawn: list[int], expected: np.ndarray) -> float:
    """Pearson's statistic over the ids whose expected count is above 5; an id of probability 0 must not come at all."""
    counts = Counter(drawn)
    assert all(expected[token] > 0 for token in counts)
    wanted = expected * len(drawn)
    return sum((counts[i] - n) ** 2 / n for i, n in enumerate(wanted) if n > 5)


def test_greedy_is_the_largest_logit_and_the_lowest_id_on_a_tie() -> None:
    assert sample(LOGITS, GREEDY, 0) == 1
    assert sample(np.array([0, 5, 5, 1, 5], np.float32), GREEDY, 0) == 1
    assert sample(np.zeros(9, np.float32), GREEDY, 0) == 0
    assert sample(np.array([-0.0, 0.0], np.float32), GREEDY, 0) == 0
    assert sample(np.array([-np.inf, -3e38, -np.inf], np.float32), GREEDY, 0) == 1


def test_greedy_heeds_neither_seed_nor_position() -> None:
    assert {sample(LOGITS, Sampling(seed=seed), position) for seed in range(5) for position in range(5)} == {1}


@pytest.mark.parametrize("restricted", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5}])
def test_one_candidate_is_greedy(restricted: dict[str, float]) -> None:
    tied = np.array([0, 5, 5, 1, 5], np.float32)
    for seed in range(20):
        sampling = Sampling(temperature=2.0, seed=seed, **restricted)  # type: ignore[arg-type]
        assert sample(LOGITS, sampling, seed) == 1
        assert sample(tied, sampling, seed) == 1


def test_seed_and_position_decide() -> None:
    flat = np.zeros(1000, np.float32)
    by_position = [sample(flat, Sampling(1.0, seed=3), position) for position in range(50)]
    by_seed = [sample(flat, Sampling(1.0, seed=seed), 3) for seed in range(50)]
    assert by_position == [sample(flat, Sampling(1.0, seed=3), position) for position in range(50)]
    assert by_seed == [sample(flat, Sampling(1.0, seed=seed), 3) for seed in range(50)]
    assert len(set(by_position)) > 40
    assert len(set(by_seed)) > 40
    assert by_position != by_seed


def test_the_extremes_of_seed_and_position_work() -> None:
    for seed in (0, (1 << 63) - 1, (1 << 64) - 1):
        for position in (0, (1 << 32) - 1):
            assert 0 <= sample(LOGITS, Sampling(1.0, seed=seed), position) < len(LOGITS)


def test_a_draw_leaves_the_logits_alone() -> None:
    logits = LOGITS.copy()
    sample(logits, Sampling(0.7, 3, 0.9, 1), 5)
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_softmax(temperature: float, over: str) -> None:
    if over == "positions":
        drawn = [sample(LOGITS, Sampling(temperature, seed=11), position) for position in range(N_DRAWS)]
    else:
        drawn = [sample(LOGITS, Sampling(temperature, seed=seed), 7) for seed in range(N_DRAWS)]
    assert chi_square(drawn, softmax(LOGITS, temperature)) < 30  # 7 degrees of freedom: 1 in 10,000


def test_top_k_then_top_p_renormalise() -> None:
    expected = softmax(LOGITS)
    expected[np.argsort(expected)[:-4]] = 0  # the four likeliest: ids 1, 5, 2, 0
    expected /= expected.sum()
    drawn = [sample(LOGITS, Sampling(1.0, top_k=4, seed=5), position) for position in range(N_DRAWS)]
    assert chi_square(drawn, expected) < 25
    expected[0] = 0  # ids 1, 5 and 2 reach 0.9 of the four
    expected /= expected.sum()
    drawn = [sample(LOGITS, Sampling(1.0, 4, 0.9, seed=5), position) for position in range(N_DRAWS)]
    assert chi_square(drawn, expected) < 25


def test_a_wide_top_k_and_a_full_top_p_leave_all_in() -> None:
    plain, wide = Sampling(1.0, seed=9), Sampling(1.0, top_k=1 << 30, top_p=1.0, seed=9)
    assert [sample(LOGITS, wide, p) for p in range(100)] == [sample(LOGITS, plain, p) for p in range(100)]


def test_neighbouring_draws_are_independent() -> None:
    coin = np.zeros(2, np.float32)
    quarter = np.full(4, 0.25)
    by_position = [sample(coin, Sampling(1.0, seed=2), position) for position in range(2 * N_DRAWS)]
    by_seed = [sample(coin, Sampling(1.0, seed=seed), 4) for seed in range(2 * N_DRAWS)]
    for flips in (by_position, by_seed):
        pairs = [2 * a + b for a, b in zip(flips[::2], flips[1::2], strict=True)]
        assert chi_square(pairs, quarter) < 21.1  # 3 degrees of freedom: 1 in 10,000


def test_extreme_logits_are_drawn_from_without_a_nan() -> None:
    extreme = np.array([-np.inf, 3e38, -3e38, 3e38], np.float32)
    drawn = {sample(extreme, Sampling(1e-3, seed=1), position) for position in range(50)}
    assert drawn == {1, 3}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-308])
def test_the_smallest_temperature_is_greedy(temperature: float) -> None:
    assert sample(np.array([10, 20, 15], np.float32), Sampling(temperature, seed=1), 0) == 1
