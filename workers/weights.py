"""A span's tensors, from their place in a file into memory: ranged reads, bounded chunks, nothing that is not kept.

Knows file types, element types and layouts; nothing about devices or what a tensor is for.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from pptasks.errors import ModelFileError, Unsupported
from pptasks.modelinfo import OnProgress, TensorRef

DType = np.dtype[Any]
FLOATS: dict[str, DType] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # the block formats of GGUF
CHUNK_ELEMENTS = 1 << 18  # of float32 at a time: 1 MiB, what a core's second-level cache holds
ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Weight:
    """One tensor in memory, row-major, its first byte aligned to ALIGNMENT."""

    data: np.ndarray  # of `shape` and that float type; of a quantised matrix uint8 (rows, bytes of a row)
    dtype: str  # a key of FLOATS, or one of QUANTISED
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, index: np.ndarray) -> np.ndarray:
        """A matrix's rows at `index` (n,), as float32 (n, in)."""
        return _values(self.data[index], self.dtype)


def load(
    refs: Sequence[TensorRef], on_progress: OnProgress, *, quantized: bool = False
) -> Iterator[tuple[str, Weight]]:
    """Yield (name, weight) for each ref, in order; beyond what the caller keeps, only a chunk is in memory.

    Floats keep their type bit for bit, but a vector (a norm, a bias) becomes F32. A quantised matrix keeps its bytes if
    `quantized`, else it becomes F16, rounded to nearest even, or BF16 if it has a value that F16 cannot hold.
    Whatever the file's layout, a weight is (out, in), its rotary rows in half-split order; a fused tensor comes out
    as its parts. Progress is ("load", bytes read, bytes to read).
    Raises Unsupported for another type, ModelFileError for a file that cannot be read or ends before its tensor does.
    """
    done, total = 0, sum(ref.nbytes for ref in refs)
    for ref in refs:
        if ref.dtype not in FLOATS and ref.dtype not in QUANTISED:
            known = ", ".join((*FLOATS, *QUANTISED))
            raise Unsupported(f"tensor {ref.name} of {ref.file} has type {ref.dtype}; supported: {known}")

        def advance(nbytes: int, before: int = done) -> None:
            on_progress("load", before + nbytes, total)

        yield from _split(ref, _read(ref, _memory_dtype(ref, quantized), advance))
        done += ref.nbytes


def aligned_zeros(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """np.zeros whose first byte is aligned to ALIGNMENT. What is never written costs no memory."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _memory_dtype(ref: TensorRef, quantized: bool) -> str:
    if len(ref.shape) == 1:
        return "F32"
    return ref.dtype if ref.dtype in FLOATS or quantized else "F16"


class _TooLarge(Exception):
    """A value does not fit the type in memory."""


def _read(ref: TensorRef, dtype: str, advance: Callable[[int], None]) -> Weight:
    try:
        return _read_as(ref, dtype, advance)
    except _TooLarge:
        pass  # only here is the first attempt's memory free again
    except OSError as e:
        raise ModelFileError(f"{ref.file}: cannot be read: {e.strerror}") from e
    return _read_as(ref, "BF16", advance)


def _read_as(ref: TensorRef, dtype: str, advance: Callable[[int], None]) -> Weight:
    """The whole tensor as `dtype`, by chunks of stored rows; a vector is a matrix of one column. Raises _TooLarge."""
    matrix = ref.shape if len(ref.shape) > 1 else (*ref.shape, 1)
    rows, width = matrix[::-1] if ref.transposed else matrix  # as stored
    row_bytes = ref.nbytes // rows
    out = aligned_zeros(matrix, FLOATS[dtype]) if dtype in FLOATS else aligned_zeros((rows, row_bytes), np.dtype("u1"))
    by_stored_row = out.T if ref.transposed else out
    to = _half_split_rows(rows, ref.interleaved_heads) if ref.interleaved_heads else None
    step = max(1, CHUNK_ELEMENTS // width)
    with open(ref.file, "rb", buffering=0) as file:
        for first in range(0, rows, step):
            last = min(first + step, rows)
            raw = _pread(file.fileno(), ref, first * row_bytes, (last - first) * row_bytes)
            chunk = _convert(raw.reshape(last - first, row_bytes), ref.dtype, dtype)
            by_stored_row[slice(first, last) if to is None else to[first:last]] = chunk
            advance(last * row_bytes)
    return Weight(out.reshape(ref.shape) if dtype in FLOATS else out, dtype, ref.shape)


def _split(ref: TensorRef, weight: Weight) -> Iterator[tuple[str, Weight]]:
    """The tensors in a fused one, as views of its memory; as copies if that would leave one of them unaligned."""
    if not ref.parts:
        yield ref.name, weight
        return
    row_bytes, first = weight.nbytes // ref.shape[0], 0
    aligned = all(rows * row_bytes % ALIGNMENT == 0 for _, rows in ref.parts)
    for name, rows in ref.parts:
        data = weight.data[first : first + rows]
        if not aligned:
            data = aligned_zeros(data.shape, data.dtype)
            data[:] = weight.data[first : first + rows]
        yield name, Weight(data, weight.dtype, (rows, *ref.shape[1:]))
        first += rows


def _pread(fd: int, ref: TensorRef, offset: int, nbytes: int) -> np.ndarray:
    """`nbytes` from `offset` of the tensor on, as uint8."""
    out, got = np.empty(nbytes, np.uint8), 0
    while got < nbytes:
        n = os.preadv(fd, [out[got:].data], ref.offset + offset + got)
        if n == 0:
            raise ModelFileError(f"{ref.file}: ends inside tensor {ref.name}; copy or download the model again")
        got += n
    return out


def _convert(raw: np.ndarray, stored: str, wanted: str) -> np.ndarray:
    """Rows of stored bytes as rows of `wanted` elements. Raises _TooLarge when F16 overflows."""
    if stored == wanted:
        return raw.view(FLOATS[stored]) if stored in FLOATS else raw
    values = _values(raw if stored in QUANTISED else raw.view(FLOATS[stored]), stored)
    with np.errstate(over="ignore"):
        rounded = values.astype(FLOATS[wanted], copy=False)
    if wanted == "F16" and np.isinf(rounded).any():
        raise _TooLarge
    return rounded


def _values(rows: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of floats (exact), or of rows of quantised bytes."""
    if dtype in FLOATS:
        return rows.astype(np.float32)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype])


def _half_split_rows(rows: int, heads: int) -> np.ndarray:
    """Where each stored row belongs so that a head's rotary pairs become (i, i + Hd/2) instead of (2i, 2i + 1)."""
    per_head = np.arange(rows // heads).reshape(2, -1).T.reshape(-1)  # stored row 2i + p -> p * Hd/2 + i
    return (np.arange(heads)[:, None] * (rows // heads) + per_head).reshape(-1)
