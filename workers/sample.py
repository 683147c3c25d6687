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
    order = np.argsort(-logits, kind="stable")  # descending, lowest id first on a tie
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    cumulative = np.cumsum(weights)
    if sampling.top_p < 1:
        keep = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        order, cumulative = order[:keep], cumulative[:keep]
    generator = np.random.Generator(np.random.Philox(key=sampling.seed, counter=position))
    drawn = generator.random() * cumulative[-1]
    return int(order[np.searchsorted(cumulative, drawn, side="right")])
