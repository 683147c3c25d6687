"""The boot gates: before a stage serves, its kernels are compared with a second and a third opinion on its own weights.

At the very shapes of the model, with the real weights of a block, seeded rows go through the backend's kernel, through
workers/reference.py in numpy and, for the C kernels, through the plain tinygrad expression. Compared is what float32
keeps in any order of summation.

The backend computes the rows twice: in calls of 1 to 6, and in calls as long as they may be, which the C kernels must
answer with the same bits. Two sequences alternate, each in a slot of its own, and change places for the second time.

The numpy comparison runs at every start. It takes ROWS positions, which cost it 50 ms; FEW where they would cost more:
in a block of more than LARGE_BLOCK weights, and on tinygrad, whose every call takes 0.1 s here. The tinygrad comparison
costs seconds of compilation the first time; that it agreed is remembered beside tinygrad's own compiled kernels, so
under the same processor and compiler.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import cycle
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad.helpers import diskcache_get, diskcache_put

from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, OUTPUT_NORM_BIAS, ModelConfig
from workers import blocks, plain, reference
from workers.kernels import SOURCE, CpuKernels
from workers.plain import PlainTinygrad
from workers.weights import FLOATS, Weight, aligned_zeros

if TYPE_CHECKING:
    from workers.model import Backend

ROWS = 60  # of a sequence: more than a panel of kernels.c, and several vectors of scores
FEW = 12
LARGE_BLOCK = 30_000_000
CALLS = (1, 2, 3, 4, 5, 6)  # rows: every tile of kernels.c
WINDOW = 5  # positions; tried besides where the model's own is larger than what is compared
PLAIN_ROWS = 3  # for plain tinygrad, which widens a quantised weight again for each
CHANNELS = 512  # of the read-out that are compared, besides those at both ends
TOLERANCE = 1e-4  # of the rms of a row's change. A float32 sum of 16384 products loses about 1e-6; five follow another
LARGE = 1e-5  # of a value: what is far above the rms is rounded coarser
ROUNDING = 2.0**-23  # of a sum whose terms may be large beside it
SMALL_ROW = 0.01  # every other row is so small that the norm's epsilon counts

RunBlock = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # `Backend.run_block` of one block


class Gates:
    """Keeps the weights of `blocks`, and of the read-out some rows, as `see` is shown them; then compares.

    rope: float32 (context, Hd), what a plain backend is given; factors: `rope_freqs.weight`, for the reference.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[int],
        *,
        rope: np.ndarray | None,
        factors: np.ndarray | None,
        slot: int,
        context: int,
        max_rows: int,
    ):
        self._config, self._blocks, self._factors = config, blocks, factors
        self._rope = rope
        self._slots, self._max_rows, self._context = tuple(dict.fromkeys((slot, 0))), max_rows, context
        self._head = EMBEDDING if config.tied else OUTPUT
        self._weights: dict[str, Weight] = {}

    def see(self, name: str, weight: Weight) -> None:
        if name == self._head:
            weight = _some_rows(weight)
        elif name not in (OUTPUT_NORM, OUTPUT_NORM_BIAS) and not name.startswith(self._prefixes):
            return
        self._weights[name] = weight

    def against_numpy(self, backend: "Backend") -> str | None:
        """Where the backend's results are not the reference's, with figures; None if they agree. It writes the first
        positions of the slot and of slot 0."""
        arrays = {name: _array(weight) for name, weight in self._weights.items()}
        for i in self._blocks:
            wrong = self._wrong_block(backend, i, arrays) or self._wrong_window(backend, i, arrays)
            if wrong is not None:
                return f"block {i} of {backend.name} {wrong}"
        if OUTPUT_NORM in self._weights:
            x = _hidden(sum(CALLS), self._config.dim)
            wrong = _difference(self._read_out(backend, x), reference.logits(self._config, arrays, x))
            if wrong is not None:
                return f"the read-out of {backend.name} and the numpy reference differ at {wrong}"
        return None

    def against_plain(self, backend: "Backend") -> str | None:
        """The same against the plain tinygrad expression on the same device. Not repeated for kernels and weights'
        types that have agreed before on this machine."""
        key = self._key()
        if diskcache_get("pptasks_gates", key):
            return None
        x = _hidden(min(PLAIN_ROWS, self._context), self._config.dim)
        other = self._plain()
        where = np.zeros(len(x), np.int32), np.arange(len(x), dtype=np.int32)
        for i in self._blocks:
            [got] = self._block(partial(backend.run_block, i), x[None], (self._max_rows,), self._slots[:1])
            wrong = _difference(got, other.run_block(i, x, *where), x)
            if wrong is not None:
                return f"block {i} of {backend.name} and plain tinygrad differ at {wrong}"
        if OUTPUT_NORM in self._weights:
            wrong = _difference(self._read_out(backend, x), other.logits(x))
            if wrong is not None:
                return f"the read-out of {backend.name} and plain tinygrad differ at {wrong}"
        diskcache_put("pptasks_gates", key, True)
        return None

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple(f"blk.{i}." for i in self._blocks)

    def _wrong_block(self, backend: "Backend", i: int, arrays: reference.Weights) -> str | None:
        x = _hidden(self._rows(backend, i), self._config.dim)
        both = np.stack([x, x[::-1]])[: len(self._slots)]
        run = partial(backend.run_block, i)
        at_once = self._block(run, both, (self._max_rows,), self._slots)
        by_few = self._block(run, both, CALLS, self._slots[::-1])
        expected = reference.block(self._config, i, arrays, x, self._factors)
        for got in (by_few[0], at_once[0]):
            wrong = _difference(got, expected, x)
            if wrong is not None:
                return f"and the numpy reference differ at {wrong}"
        if isinstance(backend, CpuKernels) and at_once.tobytes() != by_few.tobytes():
            values = int((at_once != by_few).sum())
            return f"depends on how many rows it is given: {values} of {by_few.size} values have other bits"
        return None

    def _wrong_window(self, backend: "Backend", i: int, arrays: reference.Weights) -> str | None:
        """A window that no row reaches the end of, tried with a small one: to the C kernels it is but an argument."""
        c = self._config
        if not isinstance(backend, CpuKernels) or c.windows[i] < self._rows(backend, i):
            return None
        x = _hidden(min(FEW, self._context), c.dim)
        run = partial(backend.run_block, i, window=WINDOW)
        [got] = self._block(run, x[None], (self._max_rows,), self._slots[:1])
        narrow = replace(c, windows=tuple(WINDOW for _ in c.windows))
        wrong = _difference(got, reference.block(narrow, i, arrays, x, self._factors), x)
        return wrong and f"and the numpy reference differ, with a window of {WINDOW}, at {wrong}"

    def _rows(self, backend: "Backend", i: int) -> int:
        size = sum(prod(w.shape) for name, w in self._weights.items() if name.startswith(f"blk.{i}."))
        many = size <= LARGE_BLOCK and isinstance(backend, CpuKernels)
        return min(ROWS if many else FEW, self._context)

    def _block(self, run: RunBlock, x: np.ndarray, sizes: Sequence[int], slots: Sequence[int]) -> np.ndarray:
        """A block over sequences (S, T, D), one for each of the slots, whose rows alternate in calls of `sizes`."""
        n_sequences, length, dim = x.shape
        rows = x.swapaxes(0, 1).reshape(-1, dim)
        where = np.tile(np.array(slots, np.int32), length), np.repeat(np.arange(length, dtype=np.int32), n_sequences)
        out = [run(rows[n], where[0][n], where[1][n]) for n in self._calls(len(rows), sizes)]
        return np.concatenate(out).reshape(length, n_sequences, dim).swapaxes(0, 1)

    def _read_out(self, backend: "Backend", x: np.ndarray) -> np.ndarray:
        """The logits of the kept rows of the head."""
        index = _channels(self._config.vocab_size)
        return np.concatenate([backend.logits(x[rows])[:, index] for rows in self._calls(len(x), CALLS)])

    def _calls(self, rows: int, sizes: Sequence[int]) -> Iterator[slice]:
        first = 0
        for size in cycle(sizes):
            if first >= rows:
                return
            last = min(first + min(size, self._max_rows), rows)
            yield slice(first, last)
            first = last

    def _plain(self) -> PlainTinygrad:
        """The kept weights alone; a vocabulary of the kept rows."""
        config, weights = self._config, {n: w for n, w in self._weights.items() if n != self._head}
        if OUTPUT_NORM in weights:
            weights[OUTPUT] = self._weights[self._head]
        lo, hi = (min(self._blocks), max(self._blocks) + 1) if self._blocks else (0, 0)
        return PlainTinygrad(
            replace(config, tied=False, vocab_size=len(_channels(config.vocab_size))),
            weights.items(),
            blocks=range(lo, hi),
            rope=None if self._rope is None else self._rope[:PLAIN_ROWS],
            context=PLAIN_ROWS,
            n_slots=1,
            max_rows=PLAIN_ROWS,
            traced=range(0),
        )

    def _key(self) -> str:
        """What decides whether the comparison comes out as it did: both sides' source, the numbers, the types."""
        types = [(name, weight.dtype, weight.shape) for name, weight in sorted(self._weights.items())]
        text = [Path(file).read_text() for file in (SOURCE, blocks.__file__, plain.__file__)]
        known = text, version("tinygrad"), self._config, self._blocks, types, self._context, self._max_rows
        return hashlib.sha256(repr(known).encode()).hexdigest()


class _Dequantized:
    """A quantised matrix as the reference takes it: by slices of rows, float32."""

    def __init__(self, weight: Weight):
        self._weight, self.shape = weight, weight.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._weight.rows(np.arange(self.shape[0])[rows])


def _array(weight: Weight) -> np.ndarray:
    return weight.data if weight.dtype in FLOATS else _Dequantized(weight)  # type: ignore[return-value]


def _channels(vocab_size: int) -> np.ndarray:
    """Of the read-out: the first and the last, where a kernel's remainder is, and some between, int64 (n,)."""
    ends = np.concatenate([np.arange(min(16, vocab_size)), np.arange(max(0, vocab_size - 16), vocab_size)])
    return np.unique(np.concatenate([ends, np.linspace(0, vocab_size - 1, CHANNELS, dtype=np.int64)]))


def _some_rows(head: Weight) -> Weight:
    index = _channels(head.shape[0])
    rows = aligned_zeros((len(index), head.data.shape[1]), head.data.dtype)
    rows[:] = head.data[index]
    return Weight(rows, head.dtype, (len(rows), head.shape[1]))


def _hidden(rows: int, dim: int) -> np.ndarray:
    x = np.random.default_rng(20170612).standard_normal((rows, dim)).astype(np.float32)
    x[1::2] *= SMALL_ROW
    return x


def _difference(got: np.ndarray, expected: np.ndarray, x: np.ndarray | None = None) -> str | None:
    """Where `got` (rows, n) is too far off, with figures. x: what a block was given and has added its own to."""
    own = expected if x is None else expected - x
    allowed = TOLERANCE * np.sqrt((own * own).mean(1, keepdims=True)) + LARGE * np.abs(own)
    allowed += ROUNDING * (np.abs(expected) + np.abs(own))
    wrong = np.argwhere(~(np.abs(got - expected) <= allowed))  # a NaN is wrong
    if not len(wrong):
        return None
    at = tuple(wrong[0])
    return (
        f"position {at[0]}, channel {at[1]}: {got[at]:.9g} and {expected[at]:.9g} (allowed: {allowed[at]:.2g}; "
        f"{len(wrong)} of {got.size} values)"
    )
