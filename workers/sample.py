"""Logits to a token. (seed, position) decides: a frame computed twice, on any stage, yields the same token.

A row of a TOKENS frame is one token: its id and, where they were asked for, its log-probability, then the ids and
log-probabilities of the likeliest; float32 values stand there as their bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pptasks.errors import MalformedFrame
from pptasks.wire import Sampling

Counts = Iterable[tuple[int, int]]  # of ids: how often each was generated
_LEAST = float(np.finfo(np.float32).min)
_SHARPEST = 1e30  # 1 / temperature; float32 holds it
_BLOCK = 256
_FIRST_TRY = 256  # of the likeliest ids, for a nucleus


@dataclass(frozen=True)
class Token:
    """A sampled id. `logprob`: the natural logarithm of its probability among the raw logits; `top`: those of the
    likeliest ids. Without, where nobody asked."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    def to_row(self, width: int) -> np.ndarray:
        """int32 (width,), zeros at the end."""
        row = np.zeros(width, np.int32)
        row[0] = self.id
        if self.logprob is not None:
            row[1] = np.float32(self.logprob).view(np.int32)
            for i, (token, logprob) in enumerate(self.top):
                row[2 + 2 * i : 4 + 2 * i] = token, np.float32(logprob).view(np.int32)
        return row

    @classmethod
    def from_row(cls, row: np.ndarray, sampling: Sampling, vocabulary: int) -> "Token":
        """Raises MalformedFrame for an id outside the vocabulary, or a log-probability that is none."""
        values, floats = row.tolist(), row.view(np.float32).tolist()
        at = () if sampling.logprobs is None else range(2, 2 + 2 * sampling.logprobs, 2)
        told = [floats[i] for i in (() if sampling.logprobs is None else (1, *(i + 1 for i in at)))]
        if not all(0 <= values[i] < vocabulary for i in (0, *at)) or not all(_LEAST <= p <= 1e-3 for p in told):
            raise MalformedFrame("a token that is not in the vocabulary, or whose log-probability is none")
        if sampling.logprobs is None:
            return cls(values[0])
        return cls(values[0], floats[1], tuple((values[i], floats[i + 1]) for i in at))


def choose(logits: np.ndarray, sampling: Sampling, position: int, counts: Counts = ()) -> Token:
    """`sample`, with what the sampling asks to be told."""
    token = sample(logits, sampling, position, counts)
    if sampling.logprobs is None:
        return Token(token)
    all_log = float(logits.max()) + np.log(np.exp((logits - logits.max()).astype(np.float64)).sum())
    top = _likeliest(logits, sampling.logprobs).tolist() if sampling.logprobs else []

    def logprob(i: int) -> float:
        return max(float(logits[i]) - all_log, _LEAST)  # of -inf too

    return Token(token, logprob(token), tuple((i, logprob(i)) for i in top))


def sample(logits: np.ndarray, sampling: Sampling, position: int, counts: Counts = ()) -> int:
    """The id of the token after `position`.

    logits: float32 (V,). First the penalties. Greedy (temperature 0) is then the largest logit, the lowest id on a tie.
    Otherwise one draw from the softmax of logits / temperature over the `top_k` largest, cut to the smallest set whose
    probability reaches `top_p` (nucleus sampling, Holtzman et al. 2020), with a counter-based generator (Philox) keyed
    by the seed and set to the position.
    """
    logits = penalised(logits, sampling, counts)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    ids = _likeliest(logits, sampling.top_k) if 0 < sampling.top_k < len(logits) else None
    left = logits if ids is None else logits[ids]
    weights = _weights(left, float(logits.max()), sampling.temperature)
    if sampling.top_p < 1:
        kept = _nucleus(left, weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    generator = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position))
    drawn = _draw(weights, generator.random())
    return drawn if ids is None else int(ids[drawn])


def penalised(logits: np.ndarray, sampling: Sampling, counts: Counts) -> np.ndarray:
    """OpenAI's definition: of an id that was generated `times`, less frequency_penalty * times + presence_penalty."""
    pairs = list(counts) if sampling.is_penalised else []
    if not pairs:
        return logits
    ids, times = np.array(pairs, np.int64).T
    logits = logits.copy()
    logits[ids] -= (sampling.frequency_penalty * times + sampling.presence_penalty).astype(np.float32)
    return logits


def _weights(logits: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """float32, 1 for the largest."""
    with np.errstate(over="ignore"):  # the smallest temperatures send all but the largest to -inf
        weights = logits - np.float32(top)
        weights *= np.float32(min(1 / temperature, _SHARPEST))
        return np.exp(weights, out=weights)


def _draw(weights: np.ndarray, at: float) -> int:
    """The index whose share of the sum of all weights covers `at`, 0 <= at < 1. By sums of blocks first: the running
    sum of a whole vocabulary takes 0.4 ms."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    at *= ends[-1]
    block = int(np.searchsorted(ends, at, side="right"))
    sums = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    rest = at - (ends[block - 1] if block else 0.0)
    i = np.searchsorted(sums, rest, side="right") if rest < sums[-1] else np.searchsorted(sums, sums[-1])
    return block * _BLOCK + int(i)


def _nucleus(logits: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the largest weights that reach `top_p` of their sum, in descending order: by the logits, which tell
    apart what has the same weight in float32."""
    enough, n = top_p * float(weights.sum(dtype=np.float64)), _FIRST_TRY
    while True:  # sorting all of a vocabulary takes milliseconds
        order = _likeliest(logits, n)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= enough or len(order) == len(weights):
            return order[: int(np.searchsorted(cumulative, enough)) + 1]
        n *= 8


def _likeliest(values: np.ndarray, n: int) -> np.ndarray:
    """Indices of the `n` largest, or of all if there are no more, by descending value; the lowest first on a tie."""
    if n >= len(values):
        return np.argsort(-values, kind="stable")
    at_least = np.partition(values, -n)[-n]
    candidates = np.flatnonzero(values >= at_least)  # rising; more than n on a tie
    return candidates[np.argsort(-values[candidates], kind="stable")][:n]


def rows_of(tokens: Sequence[Token], width: int) -> np.ndarray:
    """int32 (tokens, width): the payload of a TOKENS frame."""
    return np.stack([token.to_row(width) for token in tokens]) if tokens else np.zeros((0, width), np.int32)
