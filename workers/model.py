"""What one stage computes: `Slice`, a span of a model on one device.

A batch is a flat list of rows. A row is one position of one sequence: a prompt's chunk of T tokens is T rows of one
slot, a decode step is one row a lane, and one call may hold both. Which request a slot belongs to, and what its rows
mean to it, is for other modules.

Shapes: R rows, D width of the hidden state, V vocabulary.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from tinygrad import Device

from pptasks.modelinfo import Model, ModelConfig
from pptasks.plan import Span
from workers import kernels as c_kernels
from workers.plain import PlainTinygrad
from workers.weights import OnProgress, Weight, load

log = logging.getLogger(__name__)


class Backend(Protocol):
    """One way to compute. The arrays are checked already, `rows` of them at most; every method returns a new one."""

    name: str

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """int32 (R,) -> float32 (R, D)"""

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D)"""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (R, D) -> float32 (R, V)"""

    def warm(self, on_progress: OnProgress) -> None:
        """Compile and run everything once; it may write position 0 of any slot."""


class Slice:
    """A span of a model, with its weights and its KV cache. One thread makes it and calls it.

    Loads the span's blocks and what `embedding` and `readout` ask for, nothing else; a tied matrix is held once.
    `kernels` is "auto" (the C kernels where they can run, else tinygrad) or "tinygrad". Raises what `weights.load`
    raises, and Unsupported for an architecture that cannot be computed.
    """

    def __init__(
        self,
        model: Model,
        span: Span,
        *,
        embedding: bool,
        readout: bool,
        n_slots: int,
        context: int,
        max_rows: int,
        kernels: str,
        on_progress: OnProgress,
    ):
        config = model.config
        self.dim = config.dim
        self.device: str = Device.DEFAULT
        self.weights_bytes = 0  # in memory
        self._vocab, self._n_slots, self._context, self._max_rows = config.vocab_size, n_slots, context, max_rows
        self._on_progress = on_progress
        refs = model.stage_tensors(span.lo, span.hi, embedding=embedding, readout=readout)
        make = c_kernels.CpuKernels if _use_c(config, kernels) else PlainTinygrad
        self._backend: Backend = make(
            config,
            self._counted(load(refs, on_progress)),
            blocks=range(span.lo, span.hi),
            rope=rope_table(config, context),
            n_slots=n_slots,
            max_rows=max_rows,
        )
        self.kernels_used = self._backend.name  # "c" or "tinygrad"

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """int32 (R,) -> float32 (R, D), 1 <= R <= max_rows. ValueError for an id outside the vocabulary."""
        self._check_rows(len(ids))
        _check_range("token id", ids, self._vocab)
        return self._backend.embed(ids)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D), 1 <= R <= max_rows.

        Each row's keys and values are written at (slot, position); then the row attends over positions 0 to its own of
        that slot, those of this call included. Writing a position again does no harm.
        ValueError for rows, a slot or a position that do not fit.
        """
        self._check_hidden(x)
        if not len(x) == len(slots) == len(positions):
            raise ValueError(f"{len(x)} rows, {len(slots)} slots and {len(positions)} positions")
        _check_range("slot", slots, self._n_slots)
        _check_range("position", positions, self._context)
        return self._backend.forward(x, slots, positions)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (R, D) -> float32 (R, V), 1 <= R <= max_rows: the final norm and the output head."""
        self._check_hidden(x)
        return self._backend.logits(x)

    def warm(self) -> None:
        """Compile and run everything once. Before the first request: position 0 of any slot may be overwritten."""
        self._backend.warm(self._on_progress)

    def _counted(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            self.weights_bytes += weight.data.nbytes
            yield name, weight

    def _check_hidden(self, x: np.ndarray) -> None:
        self._check_rows(len(x))
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"hidden state of shape {x.shape}; expected (rows, {self.dim})")

    def _check_rows(self, rows: int) -> None:
        if not 1 <= rows <= self._max_rows:
            raise ValueError(f"{rows} rows; expected 1 to {self._max_rows}")


def rope_table(config: ModelConfig, context: int) -> np.ndarray:
    """float32 (context, Hd): cos(p * theta^(-2i/Hd)) for i < Hd/2, then the sines; computed in float64."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)  # (Hd/2,)
    angles = np.outer(np.arange(context), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _use_c(config: ModelConfig, kernels: str) -> bool:
    if kernels != "auto":
        return False
    why_not = c_kernels.obstacle(config)
    if why_not is not None:
        level = logging.WARNING if Device.DEFAULT == "CPU" else logging.INFO
        log.log(level, "tinygrad's own kernels are used: %s", why_not)
    return why_not is None


def _check_range(what: str, values: np.ndarray, end: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise ValueError(f"{what} {low if low < 0 else high} is outside 0 to {end - 1}")
