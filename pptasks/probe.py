"""The kernel probe: one matrix product that is the same, digit by digit, on every device that works.

The integer product's partial sums all stay below 2^24, so float32 holds each of them in whatever order they are added:
a device that gives anything else is broken. The float product has digits to lose, and a tolerance that no order of
summation exceeds; it tells a device that quietly computes in less than float32. Pure; numpy only.
"""

import hashlib

import numpy as np

ROWS, INNER, COLUMNS = 61, 127, 67  # primes: every kernel has a remainder to deal with
LARGEST = 127  # of an integer's magnitude; exact in bf16 and TF32 too. 127 * 127 * 127 < 2^24
GRAIN = 0.0123456789  # of the float matrices: no power of two
UNIT_ROUNDOFF = 2.0**-24  # of float32


def integers() -> tuple[np.ndarray, np.ndarray]:
    """int64 (ROWS, INNER) and (INNER, COLUMNS)."""
    n = ROWS * INNER
    values = _hashed(n + INNER * COLUMNS)
    return values[:n].reshape(ROWS, INNER), values[n:].reshape(INNER, COLUMNS)


def floats() -> tuple[np.ndarray, np.ndarray]:
    """float32, of the same shapes and signs as `integers`, with all 24 bits in use."""
    a, b = integers()
    return (a * GRAIN).astype(np.float32), (b * GRAIN).astype(np.float32)


def expected() -> str:
    """The digest of the integer product."""
    a, b = integers()
    return digest(a @ b)


def digest(product: np.ndarray) -> str:
    """16 hex digits of an integer product (ROWS, COLUMNS); of a float one, as it rounds to integers."""
    rounded = np.clip(np.nan_to_num(np.rint(product)), -(2**31), 2**31)
    return hashlib.sha256(np.ascontiguousarray(rounded, "<i8").tobytes()).hexdigest()[:16]


def check(product_int: np.ndarray, product_float: np.ndarray) -> str | None:
    """What is wrong with a device's two products (ROWS, COLUMNS), one index of it; None when they hold."""
    a, b = integers()
    fa, fb = (m.astype(np.float64) for m in floats())
    slack = INNER * UNIT_ROUNDOFF * (np.abs(fa) @ np.abs(fb))  # Higham 2002, (3.5): whatever the order
    cases = (("integer", product_int, a @ b, np.zeros(1)), ("float", product_float, fa @ fb, slack))
    for kind, got, wanted, allowed in cases:
        if got.shape != wanted.shape:
            return f"the {kind} product has shape {got.shape}, not {wanted.shape}"
        wrong = np.argwhere(~(np.abs(got - wanted) <= allowed))  # so that a NaN is wrong
        if len(wrong):
            i, j = (int(n) for n in wrong[0])
            return (
                f"the {kind} product [{i}, {j}] is {got[i, j]:.9g}, expected {wanted[i, j]:.9g} "
                f"({len(wrong)} of {wanted.size} are wrong)"
            )
    return None


def _hashed(n: int) -> np.ndarray:
    """int64 (n,) of -LARGEST to LARGEST: a fixed mix of each index's bits, the same in every numpy and on every
    machine."""
    h = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Steele et al. 2014: SplitMix64
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return (h % np.uint64(2 * LARGEST + 1)).astype(np.int64) - LARGEST
