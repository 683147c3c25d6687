"""Quantise to GGUF's K types, which the `gguf` package only reads: for tests, simple rather than close.

Format: ggml-common.h, block_q4_K, block_q5_K, block_q6_K. A block is 256 weights of a row; each of its groups has a
small integer scale (and minimum), which the block's float16 multiplies.
"""

import numpy as np

BLOCK = 256


def quantize_k(values: np.ndarray, dtype: str) -> np.ndarray:
    """(rows, columns) float32, columns a multiple of 256, as (rows, bytes) uint8; dtype: Q4_K, Q5_K or Q6_K."""
    blocks = values.astype(np.float32).reshape(-1, BLOCK)
    encoded = _q6_k(blocks) if dtype == "Q6_K" else _q4_or_5_k(blocks, bits={"Q4_K": 4, "Q5_K": 5}[dtype])
    return encoded.reshape(*values.shape[:-1], -1)


def _q4_or_5_k(blocks: np.ndarray, bits: int) -> np.ndarray:
    """weight = d * scale * q - dmin * minimum: 8 groups of 32, scales and minimums of 6 bits, q of `bits`."""
    x = blocks.reshape(-1, 8, 32)
    low = np.maximum(0, -x.min(axis=2))  # (blocks, 8)
    d, scales = _shared((x.max(axis=2) + low) / (2**bits - 1), 63)
    dmin, minimums = _shared(low, 63)
    step, offset = (d * scales)[..., None], (dmin * minimums)[..., None]
    q = _nearest(x + offset, step, 0, 2**bits - 1).astype(np.uint8)
    first, second = scales.astype(np.uint8), minimums.astype(np.uint8)
    packed = [  # 16 numbers of 6 bits: the first four of each kind, with the rest's upper bits on top; the rest's lower
        first[:, :4] | first[:, 4:] >> 4 << 6,
        second[:, :4] | second[:, 4:] >> 4 << 6,
        first[:, 4:] & 15 | (second[:, 4:] & 15) << 4,
    ]
    upper = [np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)] if bits == 5 else []
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), *packed, *upper, nibbles], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """weight = d * scale * (q - 32): 16 groups of 16, signed scales of 8 bits, q from 0 to 63."""
    x = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=2)[..., None], axis=2)[..., 0]  # with its sign
    d, scales = _shared(largest / -32, 127)
    q = (_nearest(x, (d * scales)[..., None], -32, 31) + 32).astype(np.uint8)
    halves = (q & 15).reshape(-1, 2, 2, 64)
    lower = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = np.bitwise_or.reduce((q >> 4).reshape(-1, 2, 4, 32) << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([lower, upper, scales.astype(np.int8).view(np.uint8), _half(d)], axis=1)


def _shared(scales: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """The float16 that the groups share, (blocks, 1), and its whole multiples nearest to `scales` (blocks, groups)."""
    unit = (np.abs(scales).max(axis=1, keepdims=True) / largest).astype(np.float16).astype(np.float32)
    return unit, _nearest(scales, unit, -largest, largest)


def _nearest(x: np.ndarray, step: np.ndarray, low: int, high: int) -> np.ndarray:
    """x as whole steps; 0 where a step is 0."""
    return np.clip(np.rint(np.divide(x, step, out=np.zeros_like(x), where=step != 0)), low, high)


def _half(d: np.ndarray) -> np.ndarray:
    return d.astype("<f2").view(np.uint8)
