"""A token from logits: greedy, or one reproducible draw from the softmax."""

from collections import Counter

import numpy as np
import pytest

from pptasks.errors import MalformedFrame
from pptasks.wire import MAX_LOGPROBS, Sampling
from workers.sample import Token, choose, rows_of, sample

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


# ---- penalties ----

CLOSE = np.array([1.0, 0.9, 0.8, -5.0], np.float32)


@pytest.mark.parametrize(
    ("presence", "frequency", "counts", "chosen"),
    [
        (0.15, 0.0, ((0, 1),), 1),  # 1 - 0.15 < 0.9
        (0.05, 0.0, ((0, 1),), 0),  # 1 - 0.05 > 0.9
        (0.05, 0.0, ((0, 1000),), 0),  # once, however often it was generated
        (0.15, 0.0, ((0, 1), (1, 1)), 0),  # 0.85 > 0.8 > 0.75
        (0.25, 0.0, ((0, 1), (1, 1)), 2),  # 0.75, 0.65 < 0.8
        (0.0, 0.04, ((0, 2),), 0),  # 1 - 0.08 > 0.9
        (0.0, 0.04, ((0, 3),), 1),  # 1 - 0.12 < 0.9
        (0.0, 0.04, ((0, 6), (1, 3)), 2),  # 0.76, 0.78 < 0.8
        (0.05, 0.03, ((0, 2),), 1),  # 1 - 0.05 - 0.06 < 0.9
        (2.0, 2.0, (), 0),
        (0.0, 0.0, ((0, 1000),), 0),
        (-2.0, 0.0, ((2, 1),), 2),  # a negative one is a reward
        (0.0, -2.0, ((3, 4),), 3),  # -5 + 8 > 1
    ],
)
def test_penalties_are_subtracted_from_what_was_generated(
    presence: float, frequency: float, counts: tuple[tuple[int, int], ...], chosen: int
) -> None:
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    logits = CLOSE.copy()
    assert sample(logits, sampling, 0, counts) == chosen
    assert np.array_equal(logits, CLOSE)


def test_draws_follow_the_penalised_softmax() -> None:
    """Before temperature, top_k and top_p."""
    sampling = Sampling(0.8, top_k=5, seed=3, presence_penalty=0.5, frequency_penalty=0.25)
    penalised = LOGITS.copy()
    penalised[1] -= 0.5 + 4 * 0.25
    penalised[5] -= 0.5 + 0.25
    expected = softmax(penalised, 0.8)
    expected[np.argsort(expected)[:-5]] = 0
    expected /= expected.sum()
    drawn = [sample(LOGITS, sampling, position, ((1, 4), (5, 1))) for position in range(N_DRAWS)]
    assert chi_square(drawn, expected) < 26  # 4 degrees of freedom: 1 in 30,000


# ---- log-probabilities ----


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


@pytest.mark.parametrize(
    "logits",
    [LOGITS, np.zeros(49_152, np.float32), np.random.default_rng(0).normal(0, 5, 49_152).astype(np.float32),
     np.array([1e4, -1e4, 0, 1e4], np.float32)],
    ids=["few", "flat", "many", "far apart"],
)  # fmt: skip
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logprobs=5),
        Sampling(1.5, top_k=3, seed=1, logprobs=5),
        Sampling(0.2, top_p=0.5, seed=9, presence_penalty=2, frequency_penalty=-2, logprobs=5),
    ],
)
def test_a_log_probability_is_of_the_logits_as_they_are(logits: np.ndarray, sampling: Sampling) -> None:
    """Whatever temperature, cuts and penalties made of them for the draw."""
    counts = ((0, 3), (1, 1))
    expected = log_softmax(logits)
    for position in range(5):
        token = choose(logits, sampling, position, counts)
        assert token.id == sample(logits, sampling, position, counts)
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-5, rel=1e-6)
        ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:5]
        assert [i for i, _ in token.top] == ranked
        assert [p for _, p in token.top] == pytest.approx(expected[ranked], abs=1e-5, rel=1e-6)


def test_what_nobody_asked_for_is_not_told() -> None:
    assert choose(LOGITS, Sampling(), 0) == Token(1)
    alone = choose(LOGITS, Sampling(logprobs=0), 0)
    assert (alone.id, alone.top) == (1, ())
    assert alone.logprob == pytest.approx(log_softmax(LOGITS)[1])


@pytest.mark.parametrize(
    ("token", "logprobs"),
    [
        (Token(7), None),
        (Token((1 << 31) - 1, -0.5), 0),
        (Token(0, 0.0, ((0, 0.0), (5, -3.4028234663852886e38))), 2),
        (Token(3, -1.5, tuple((i, -i / 4) for i in range(MAX_LOGPROBS))), MAX_LOGPROBS),
    ],
)
@pytest.mark.parametrize("wider", [0, 1, 40])
def test_a_token_survives_its_row(token: Token, logprobs: int | None, wider: int) -> None:
    """Of a frame whose widest lane asks for more."""
    sampling = Sampling(logprobs=logprobs)
    row = token.to_row(sampling.columns + wider)
    assert (row.dtype, row.shape) == (np.int32, (sampling.columns + wider,))
    assert not row[sampling.columns :].any()
    assert Token.from_row(row, sampling, 1 << 31) == token


def test_a_row_is_the_id_then_the_bits_of_float32_values() -> None:
    row = Token(9, -0.25, ((9, -0.25), (4, -2.0))).to_row(7)
    bits = [int(np.float32(p).view(np.int32)) for p in (-0.25, -0.25, -2.0)]
    assert row.tolist() == [9, bits[0], 9, bits[1], 4, bits[2], 0]


def test_rows_of_all_tokens_are_as_wide_as_the_widest() -> None:
    rows = rows_of([Token(1), Token(2, -1.0)], 2)
    assert (rows.shape, rows.dtype, rows[:, 0].tolist()) == ((2, 2), np.int32, [1, 2])
    assert rows_of([], 4).shape == (0, 4)


@pytest.mark.parametrize(
    "row", [[-7, 0, 3, 0], [50, 0, 3, 0], [3, 0, 50, 0], [3, 0x7FC00000, 3, 0], [3, 0, 3, 0x3F800000]]
)
def test_a_row_that_no_stage_of_ours_sends_is_refused(row: list[int]) -> None:
    """Ids outside the vocabulary, a NaN, a probability above one."""
    with pytest.raises(MalformedFrame):
        Token.from_row(np.array(row, np.int32), Sampling(logprobs=1), 50)
