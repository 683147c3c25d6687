"""The intermediates of one block in one call, for the running audit."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trace:
    """Of block `block`, for the R rows of a call: float32, row-major, copies that nothing writes to later."""

    block: int
    x: np.ndarray  # (R, D) the block's input
    q: np.ndarray  # (R, H * Hd) after its norm and RoPE
    k: np.ndarray  # (R, KV * Hd) the same
    v: np.ndarray  # (R, KV * Hd)
    o: np.ndarray  # (R, H * Hd) the attention's output, before `attn_output`
    h: np.ndarray  # (R, D) the feed-forward layer's normed input
    a: np.ndarray  # (R, F) what `ffn_down` multiplies
    y: np.ndarray  # (R, D) the block's output
