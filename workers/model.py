"""What one stage computes: `Slice`, a span of a model on one device.

A batch is a flat list of rows. A row is one position of one sequence: a prompt's chunk of T tokens is T rows of one
slot, a decode step is one row a lane, and one call may hold both. Which request a slot belongs to, and what its rows
mean to it, is for other modules.

Shapes: R rows, D width of the hidden state, Hd width of a head, V vocabulary.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from tinygrad import Device

from pptasks.errors import ProbeFailed
from pptasks.modelinfo import ROPE_FACTORS, Model, ModelConfig, OnProgress, Rope
from pptasks.plan import Span, cache_bytes
from workers import kernels as c_kernels
from workers.audit import Audit
from workers.gates import Gates
from workers.plain import PlainTinygrad
from workers.trace import Trace
from workers.weights import Weight, load

log = logging.getLogger(__name__)

AnyBackend = TypeVar("AnyBackend", c_kernels.CpuKernels, PlainTinygrad)


class Backend(Protocol):
    """One way to compute. The arrays are checked already, `max_rows` rows at most; every method returns a new one."""

    name: str
    trace: Trace | None  # of the last call that asked for one

    def embed(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32 (R,), int32 (R,) -> float32 (R, D); the positions count where they are learned."""

    def forward(
        self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray, *, trace: int | None = None
    ) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D). trace: a block whose steps are kept as `trace`."""

    def run_block(self, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """As `forward`, block `i` of the model alone."""

    def cached(self, i: int, slot: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys (after RoPE) and values that block `i` holds of a slot at the positions `first` to `last`, both
        included: float32 (n, KV * Hd) each, to be read at once: they may be the cache itself."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (R, D) -> float32 (R, V)"""

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first `n` positions of the KV cache of slot `source`, in all blocks, to another slot."""

    def warm(self, on_progress: OnProgress) -> int:
        """Compile and run everything once; it may write position 0 of any slot. How many programs there are."""


class Slice:
    """A span of a model, with its weights and its KV cache. One thread makes it and calls it.

    Loads the span's blocks and what `embedding` and `readout` ask for, nothing else; a tied matrix is held once.
    `kernels` is "auto" (the C kernels where they can run, else tinygrad) or "tinygrad"; `weights` says how quantised
    weights are held, "16bit" or "quantized"; `audit_rate` is the share of calls that are audited (audit.py).

    The kernels have passed their gates (gates.py) when this returns. C kernels that fail are replaced by tinygrad's,
    and `gate_failure` says why. Raises what `weights.load` raises, and ProbeFailed if tinygrad's fail too.
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
        weights: str = "16bit",
        audit_rate: float = 0.0,
        on_progress: OnProgress,
    ):
        self.dim, self.vocab_size = model.config.dim, model.config.vocab_size
        self.device: str = Device.DEFAULT
        self.weights_bytes = 0  # in memory
        self.gate_failure = ""  # what disagreed at the start; `kernels_used` is what stayed in use
        self.n_slots = n_slots
        self.cache_bytes = len(span) * cache_bytes(model, n_slots, context)  # in memory once all of it was written
        self._config, self._context, self._max_rows = model.config, context, max_rows
        self._blocks, self._on_progress = range(span.lo, span.hi), on_progress
        refs = {ref.name: ref for ref in model.stage_tensors(span.lo, span.hi, embedding=embedding, readout=readout)}
        factors = refs.pop(ROPE_FACTORS, None)
        self._factors = None if factors is None else next(load([factors], on_progress))[1].data
        self._rope = rope_table(model.config, context, self._factors)

        self._rng, self._audit_rate, self._names = np.random.default_rng(), audit_rate, refs.keys()
        self._audit: Audit | None = None
        loaded = self._counted(load(list(refs.values()), on_progress, quantized=weights == "quantized"))
        use_c = _use_c(model.config, kernels)
        self._backend: Backend = self._on_c(loaded) if use_c else self._on_tinygrad(loaded)
        self.kernels_used = self._backend.name  # "c" or "tinygrad"
        # Of two stages that have the same: equal bits, however many rows a step has. "": no promise.
        self.arithmetic = c_arithmetic() if self.kernels_used == "c" else ""

    def embed(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32 (R,), int32 (R,) -> float32 (R, D), 1 <= R <= max_rows.

        ValueError for an id outside the vocabulary or a position outside the context.
        """
        self._check_rows(len(ids))
        if len(ids) != len(positions):
            raise ValueError(f"{len(ids)} ids and {len(positions)} positions")
        _check_range("token id", ids, self._config.vocab_size)
        _check_range("position", positions, self._context)
        return self._backend.embed(ids, positions)

    def forward(self, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 (R, D), int32 (R,), int32 (R,) -> float32 (R, D), 1 <= R <= max_rows.

        Each row's keys and values are written at (slot, position); then the row attends over positions 0 to its own of
        that slot, those of this call included. Writing a position again does no harm.
        ValueError for rows, a slot or a position that do not fit; AuditFailed if this call was audited and is wrong.
        """
        self._check_hidden(x)
        if not len(x) == len(slots) == len(positions):
            raise ValueError(f"{len(x)} rows, {len(slots)} slots and {len(positions)} positions")
        _check_range("slot", slots, self.n_slots)
        _check_range("position", positions, self._context)
        block = self._audit.choose() if self._audit is not None and self._audit.due() else None
        y = self._backend.forward(x, slots, positions, trace=block)
        if self._audit is not None:
            self._audit.wrote(slots, positions)
            if block is not None and self._backend.trace is not None:
                self._audit.check_block(self._backend.trace, slots, positions, self._backend.cached)
        return y

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float32 (R, D) -> float32 (R, V), 1 <= R <= max_rows: the final norm and the output head. Raises as `forward`
        does."""
        self._check_hidden(x)
        logits = self._backend.logits(x)
        if self._audit is not None and self._audit.due():
            self._audit.check_logits(x, logits)
        return logits

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first `n` positions of the KV cache of slot `source` to another slot. ValueError for what does not
        fit."""
        _check_range("slot", np.array([source, slot]), self.n_slots)
        _check_range("position", np.array([n - 1]), self._context)
        self._backend.copy(source, slot, n)
        if self._audit is not None:
            self._audit.wrote(np.full(n, slot), np.arange(n))

    def warm(self) -> int:
        """Compile and run everything once; how many programs there are. Before the first request: position 0 of any
        slot may be overwritten."""
        return self._backend.warm(self._on_progress)

    # ---- the way to a backend that has passed its gates ----

    def _on_c(self, weights: Iterable[tuple[str, Weight]]) -> Backend:
        held = dict(weights)
        backend = self._make(c_kernels.CpuKernels, held.items(), self._blocks)
        gates = self._gates(backend.block_kinds())
        for name, weight in held.items():
            gates.see(name, weight)
        self._on_progress("gates", 0, 1)
        wrong = gates.against_numpy(backend)
        if wrong is not None:
            log.error("the C kernels are switched off, tinygrad's own are used instead: %s", wrong)
            self.gate_failure = wrong
            return self._on_tinygrad(held.items())
        wrong = gates.against_plain(backend)
        if wrong is not None:  # two agree against one
            log.error("tinygrad's own kernels are wrong on this machine, the C kernels stay in use: %s", wrong)
            self.gate_failure = wrong
        self._audit = self._audit_of(self._blocks)
        if self._audit is not None:
            for name, weight in held.items():
                self._audit.see(name, weight)
        return backend

    def _on_tinygrad(self, weights: Iterable[tuple[str, Weight]]) -> Backend:
        """One block, if there is any, is compared now and traced later: tinygrad keeps the steps of no more."""
        one = self._blocks[int(self._rng.integers(max(1, len(self._blocks)))) :][:1]
        gates, self._audit = self._gates(one), self._audit_of(one)
        sees = [gates.see] if self._audit is None else [gates.see, self._audit.see]
        backend = self._make(PlainTinygrad, _shown(weights, sees), one)
        wrong = gates.against_numpy(backend)
        if wrong is not None:
            raise ProbeFailed(f"device {self.device} computes wrongly: {wrong}; use another machine, or another device")
        return backend

    def _audit_of(self, traced: range) -> Audit | None:
        if not self._audit_rate:
            return None
        return Audit(self._config, self._audit_rate, self._rng, traced=traced, names=self._names, factors=self._factors)

    def _make(self, backend: type[AnyBackend], weights: Iterable[tuple[str, Weight]], traced: range) -> AnyBackend:
        return backend(
            self._config,
            weights,
            blocks=self._blocks,
            rope=self._rope,
            context=self._context,
            n_slots=self.n_slots,
            max_rows=self._max_rows,
            traced=traced if self._audit_rate else range(0),
        )

    def _gates(self, blocks: Sequence[int]) -> Gates:
        return Gates(
            self._config,
            blocks,
            rope=self._rope,
            factors=self._factors,
            slot=self.n_slots - 1,
            context=self._context,
            max_rows=self._max_rows,
        )

    def _counted(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        for name, weight in weights:
            self.weights_bytes += weight.nbytes
            yield name, weight

    # ---- what comes in ----

    def _check_hidden(self, x: np.ndarray) -> None:
        self._check_rows(len(x))
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"hidden state of shape {x.shape}; expected (rows, {self.dim})")

    def _check_rows(self, rows: int) -> None:
        if not 1 <= rows <= self._max_rows:
            raise ValueError(f"{rows} rows; expected 1 to {self._max_rows}")


def rope_table(config: ModelConfig, context: int, factors: np.ndarray | None = None) -> np.ndarray | None:
    """float32 (context, Hd): the cosines of each position's Hd/2 angles, then their sines; None for learned positions.

    An angle is the position times a frequency, see `modelinfo.Rope`; `factors` (Hd/2,) is the file's
    `rope_freqs.weight`. Computed in float64.
    """
    if config.rope is None:
        return None
    frequencies = _scaled(config.rope.theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim), config.rope)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.outer(np.arange(context), frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def c_arithmetic() -> str:
    """Of the C kernels: their text, and what this compiler makes of a sum for this processor."""
    device = Device["CPU"]
    code = device.compiler.compile_cached(_SUM)
    return f"c {hashlib.sha256(c_kernels.SOURCE.read_bytes() + code).hexdigest()[:16]}"


_SUM = """
typedef float v16 __attribute__((ext_vector_type(16)));
void sum(v16 *out, const v16 *x, const v16 *y, long n) {
  v16 total = (v16)(0.0f);
  for (long i = 0; i < n; i++) total += x[i] * y[i];
  *out = total / (1.0f + *out);
}
"""


def _scaled(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        turns = rope.original_context * frequencies / (2 * math.pi)  # of each pair, within the original context
        kept = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / rope.factor
    return frequencies


def _use_c(config: ModelConfig, kernels: str) -> bool:
    if kernels != "auto":
        return False
    why_not = c_kernels.obstacle(config)
    if why_not is not None:
        level = logging.WARNING if Device.DEFAULT == "CPU" else logging.INFO
        log.log(level, "tinygrad's own kernels are used: %s", why_not)
    return why_not is None


def _shown(
    weights: Iterable[tuple[str, Weight]], sees: Sequence[Callable[[str, Weight], None]]
) -> Iterator[tuple[str, Weight]]:
    for name, weight in weights:
        for see in sees:
            see(name, weight)
        yield name, weight


def _check_range(what: str, values: np.ndarray, end: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= end:
        raise ValueError(f"{what} {low if low < 0 else high} is outside 0 to {end - 1}")
