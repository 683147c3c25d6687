"""A span's tensors, from their place in a file into memory: ranged reads, bounded chunks, nothing that is not kept.

Knows file types and element types; nothing about devices or what a tensor is for.
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
from pptasks.modelinfo import TensorRef

DType = np.dtype[Any]
FLOATS: dict[str, DType] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # the block formats of GGUF
CHUNK_ELEMENTS = 1 << 18  # of float32 at a time: 1 MiB, what a core's second-level cache holds
ALIGNMENT = 64  # bytes: a cache line, and the widest vector

OnProgress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True)
class Weight:
    """One tensor in memory, row-major and aligned to 64 bytes."""

    data: np.ndarray
    dtype: str  # a key of FLOATS


def load(refs: Sequence[TensorRef], on_progress: OnProgress) -> Iterator[tuple[str, Weight]]:
    """Yield (name, weight) for each ref, in order; beyond what the caller keeps, only a chunk is in memory.

    Floats keep their type bit for bit, but a vector (a norm's weight) becomes F32. Quantised types become F16, or BF16
    for a tensor with a value that F16 cannot hold. Rows that `interleaved_heads` marks come in half-split order.
    Progress is ("load", bytes read, bytes to read).
    Raises Unsupported for another type, ModelFileError for a file that cannot be read or ends before its tensor does.
    """
    done, total = 0, sum(ref.nbytes for ref in refs)
    for ref in refs:
        if ref.dtype not in FLOATS and ref.dtype not in QUANTISED:
            known = ", ".join((*FLOATS, *QUANTISED))
            raise Unsupported(f"tensor {ref.name} of {ref.file} has type {ref.dtype}; supported: {known}")

        def advance(nbytes: int, before: int = done) -> None:
            on_progress("load", before + nbytes, total)

        yield ref.name, _read(ref, _memory_dtype(ref), advance)
        done += ref.nbytes


def aligned_zeros(shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """np.zeros whose first byte is aligned to ALIGNMENT. What is never written costs no memory."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _memory_dtype(ref: TensorRef) -> str:
    if len(ref.shape) == 1:
        return "F32"
    return ref.dtype if ref.dtype in FLOATS else "F16"


class _TooLarge(Exception):
    """A value does not fit the type in memory."""


def _read(ref: TensorRef, dtype: str, advance: Callable[[int], None]) -> Weight:
    rows = ref.shape[0] if len(ref.shape) > 1 else 1
    width, row_bytes = prod(ref.shape) // rows, ref.nbytes // rows
    out = aligned_zeros((rows, width), FLOATS[dtype])
    to = _half_split_rows(rows, ref.interleaved_heads) if ref.interleaved_heads else None
    step = max(1, CHUNK_ELEMENTS // width)
    try:
        with open(ref.file, "rb", buffering=0) as file:
            for first in range(0, rows, step):
                last = min(first + step, rows)
                raw = _pread(file.fileno(), ref, first * row_bytes, (last - first) * row_bytes)
                chunk = _convert(raw.reshape(last - first, row_bytes), ref.dtype, dtype)
                out[slice(first, last) if to is None else to[first:last]] = chunk
                advance(last * row_bytes)
    except _TooLarge:
        return _read(ref, "BF16", advance)
    except OSError as e:
        raise ModelFileError(f"{ref.file}: cannot be read: {e.strerror}") from e
    return Weight(out.reshape(ref.shape), dtype)


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
    if stored in FLOATS:
        return raw.view(FLOATS[stored]).astype(FLOATS[wanted], copy=False)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored])  # float32
    with np.errstate(over="ignore"):
        rounded = values.astype(FLOATS[wanted])
    if wanted == "F16" and np.isinf(rounded).any():
        raise _TooLarge
    return rounded


def _half_split_rows(rows: int, heads: int) -> np.ndarray:
    """Where each stored row belongs so that a head's rotary pairs become (i, i + Hd/2) instead of (2i, 2i + 1)."""
    per_head = np.arange(rows // heads).reshape(2, -1).T.reshape(-1)  # stored row 2i + p -> p * Hd/2 + i
    return (np.arange(heads)[:, None] * (rows // heads) + per_head).reshape(-1)
