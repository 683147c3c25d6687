"""What float32 may lose: values in exact arithmetic, each with a bound of how far a device may be off."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-24  # of float32
STEPS = 16  # roundings that a value may go through besides its sums: exponentials, divisions
STEEPEST = 1.13  # the largest slope of silu (1.10) and of gelu (1.13)


@dataclass(frozen=True)
class Known:
    """Values (n,) as they are in exact arithmetic, and how far a float32 computation may be off."""

    value: Floats
    slack: Floats

    def at(self, index: NDArray[np.int64]) -> "Known":
        return Known(self.value[index], self.slack[index])


def lost(n: int) -> float:
    """How much of the sum of magnitudes a sum of n products may lose in float32.

    The worst order loses n roundoffs; roundings are no conspiracy, and their walk grows as the root of n (Higham 2002,
    section 2.8). Twice that, and what does not grow.
    """
    return UNIT_ROUNDOFF * (2.0 * np.sqrt(n) + STEPS)


def exact(x: np.ndarray) -> Known:
    return Known(x.astype(np.float64), np.zeros(len(x)))


def activated(x: Known, function: Callable[[Floats], Floats]) -> Known:
    """By silu or gelu."""
    return Known(function(x.value), STEEPEST * x.slack + STEPS * UNIT_ROUNDOFF * np.abs(x.value))
