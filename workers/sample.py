"""Logits to a token id. (seed, position) decides: a frame computed twice, on any stage, yields the same token."""

import numpy as np

from pptasks.wire import Sampling


def sample(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """The id of the token after `position`.

    logits: float32 (V,). Greedy (temperature 0) is the largest logit, the lowest id on a tie. Otherwise one draw from
    the softmax of logits / temperature over the `top_k` largest, cut to the smallest set whose probability reaches
    `top_p` (nucleus sampling, Holtzman et al. 2020), with a counter-based generator (Philox) keyed by the seed and set
    to the position.
    """
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    order = _likeliest(logits, sampling.top_k)
    with np.errstate(over="ignore"):  # the smallest temperatures send all but the largest to -inf
        weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / sampling.temperature)
    cumulative = np.cumsum(weights)
    if sampling.top_p < 1:
        keep = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        order, cumulative = order[:keep], cumulative[:keep]
    generator = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position))
    drawn = generator.random() * cumulative[-1]
    return int(order[np.searchsorted(cumulative, drawn, side="right")])


def _likeliest(logits: np.ndarray, top_k: int) -> np.ndarray:
    """Ids by descending logit, the lowest id first on a tie; the first `top_k` of them unless that is 0."""
    if not 0 < top_k < len(logits):
        return np.argsort(-logits, kind="stable")
    at_least = np.partition(logits, -top_k)[-top_k]
    candidates = np.flatnonzero(logits >= at_least)  # rising ids; more than top_k on a tie
    return candidates[np.argsort(-logits[candidates], kind="stable")][:top_k]
