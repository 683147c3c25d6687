"""The header of a GGUF file: metadata, and where each tensor lies. No weight is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian:

    "GGUF" | version u32 | tensors u64 | pairs u64
    pairs x (key string, type u32, value)
    tensors x (name string, n u32, n x u64, type u32, offset u64)
    padding | tensor data

A string is a u64 length and its UTF-8 bytes; an array is a u32 element type, a u64 count and its elements. Offsets
count from the first multiple of `general.alignment` after the header.

A header comes from outside, so every count and length is checked against the bytes that the file still has before
anything is made of it, and the loops have ceilings of their own. Arrays (a vocabulary is most of a header) are walked
over and decoded on demand: a stage without the head never makes one string of the vocabulary.

How long a header is shows only when it is read. While a file is downloaded, only a beginning of it is there: a reader
that comes to the end of that says how much it needs at least.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from pptasks.errors import ModelFileError, Unsupported
from pptasks.ggufarray import SCALARS, STRING
from pptasks.ggufarray import Array as Array

MAGIC = b"GGUF"

# Tensor types by number: name, weights per group, bytes per group (ggml.h, enum ggml_type and type_traits).
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType({
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
})  # fmt: skip
# Types that exist and that we do not read: only so that an error can name them.
OTHER_TENSOR_TYPES: Mapping[int, str] = MappingProxyType({
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
})  # fmt: skip

MAX_PAIRS, MAX_TENSORS = 1 << 14, 1 << 16
MAX_ELEMENTS = 1 << 23  # of one array
MAX_KEY = 1 << 12  # bytes; ggml allows 2^16 - 1, files use under 100
MAX_TENSOR_NAME = 1 << 8  # bytes; ggml allows 63
MAXSTRING = 1 << 24  # bytes
MAX_DIMS = 4
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
MIN_PAIR = 8 + 4 + 1  # bytes: an empty key, a type, one byte of value
MIN_TENSOR = 8 + 4 + 8 + 4 + 8
MAX_HEADER = 1 << 26  # bytes, of a file that is downloaded
MIN_STEP, FIRST_STEP = 1 << 10, 1 << 18  # bytes of one
MAX_PARTS = 4096  # files of a split model
_ARRAY = 9  # the type of a value


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str  # a name in TENSOR_TYPES
    shape: tuple[int, ...]  # row-major: the file's own order reversed
    offset: int  # from the start of the file, bytes
    nbytes: int


@dataclass(frozen=True)
class Header:
    version: int
    metadata: Mapping[str, Any]  # int, float, bool, str or Array
    tensors: tuple[TensorInfo, ...]  # in the file's order
    data_start: int  # bytes


@dataclass(eq=False)
class Incomplete(Exception):
    """The header goes on beyond the bytes that are there: at least the first `need` of the file are needed."""

    need: int


def read_header(path: Path, available: int | None = None) -> Header:
    """Read and check the header of `path`, of which only the first `available` bytes are there (None: all).

    Incomplete: more of them are needed. ModelFileError: not GGUF, truncated, or not consistent in itself (names the
    file and the thing). Unsupported: version, byte order, or tensor type that we do not read.
    """
    try:
        with path.open("rb") as f:
            return _Reader(path, f, available).header()
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from e


def header_end(path: Path, available: int) -> int:
    """How much of the beginning of `path` to have before the header can be read, when `available` bytes are there.

    Up to `available`: the header is there, and ends here. Else a guess: half as much again, as each try reads from the
    start, but too much by at most 1/400 of the file, 1/50 of the header or `MIN_STEP`. Errors as of `read_header`.
    """
    size = path.stat().st_size
    try:
        need = read_header(path, available).data_start
    except Incomplete as e:
        if e.need > MAX_HEADER:
            raise ModelFileError(f"{path}: its header goes on beyond byte {MAX_HEADER}, which is the limit") from None
        step = max(MIN_STEP, available // 50, min(size // 400, max(FIRST_STEP, available // 2)))
        need = max(e.need, min(available + step, MAX_HEADER))
    return min(size, need)


def split_paths(path: Path, count: object) -> tuple[Path, ...]:
    """The files of a model that was split into `count`, of which `path` is the first: x-00001-of-0000N.gguf.

    ModelFileError: it is not named so, or `count` (the header's split.count) is no number of parts.
    """
    if type(count) is not int or not 2 <= count <= MAX_PARTS:
        what = count if isinstance(count, int | float) else f"a {type(count).__name__}"
        raise ModelFileError(f"{path}: its split.count is {what}; it must be a whole number from 2 to {MAX_PARTS}")
    match = re.fullmatch(r"(.+)-00001-of-([0-9]{5})\.gguf", path.name)
    if match is None or int(match[2]) != count:
        raise ModelFileError(f"{path}: is one of {count} parts; give the first, named like x-00001-of-{count:05}.gguf")
    return tuple(path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))


class _Reader:
    """A cursor over the mapped file. Each method moves it past what it returns, and never past the end of the file."""

    def __init__(self, path: Path, f: BinaryIO, available: int | None):
        self.path = path
        self.size = f.seek(0, 2)
        self.available = self.size if available is None else available
        if self.size < 24:
            if self.available >= 4:
                f.seek(0)
                self.check_magic(f.read(4))
            raise self.bad(f"is {self.size} bytes long: truncated; copy or download it again")
        self.data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0

    def header(self) -> Header:
        with self.data:
            version = self.start()
            n_tensors, n_pairs = self.scalar("Q", "number of tensors"), self.scalar("Q", "number of pairs")
            self.bound(n_tensors, MIN_TENSOR, MAX_TENSORS, "number of tensors")
            self.bound(n_pairs, MIN_PAIR, MAX_PAIRS, "number of metadata pairs")
            metadata = self.pairs(n_pairs)
            raw = self.tensor_infos(n_tensors)
            alignment = self.alignment(metadata)
            data_start = -(-self.at // alignment) * alignment
            tensors = tuple(self.locate(*info, data_start, alignment) for info in raw)
            self.check_overlap(tensors)
            return Header(version, MappingProxyType(metadata), tensors, data_start)

    def bad(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def check_magic(self, magic: bytes) -> None:
        if magic != MAGIC:
            raise self.bad(f"is not a GGUF file (it begins with {magic!r})")

    def start(self) -> int:
        self.need(24, "the start of the header")
        self.check_magic(self.data[:4])
        self.at = 4
        version = int(self.scalar("I", "version"))
        if version & 0xFFFF == 0 and version:
            raise Unsupported(f"{self.path}: big-endian GGUF; supported: little-endian")
        if version not in (2, 3):
            raise Unsupported(f"{self.path}: GGUF version {version}; supported: 2, 3")
        return version

    def need(self, n: int, what: str) -> None:
        if n > self.size - self.at:
            left = self.size - self.at
            raise self.bad(f"truncated or damaged: {what} needs {n} bytes at {self.at}, and {left} are left")
        if self.at + n > self.available:
            raise Incomplete(self.at + n)

    def bound(self, count: int, least: int, limit: int, what: str) -> None:
        """Refuse a count whose items, `least` bytes each, do not fit into the rest of the file, or above our limit."""
        self.need(count * least, f"{what} ({count})")
        if count > limit:
            raise self.bad(f"{what} is {count}; the limit is {limit}")

    def scalar(self, code: str, what: str) -> Any:
        n = struct.calcsize("<" + code)
        self.need(n, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += n
        return value

    def string(self, limit: int, what: str) -> str:
        n = self.scalar("Q", what)
        self.bound(n, 1, limit, f"length of {what}")
        self.at += n
        try:
            return self.data[self.at - n : self.at].decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None

    def pairs(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(count):
            key = self.string(MAX_KEY, f"key {i} of the metadata")
            if key in metadata:
                raise self.bad(f"metadata key {key!r} is there twice")
            metadata[key] = self.value(f"metadata {key!r}")
        return metadata

    def value(self, what: str) -> Any:
        kind = self.scalar("I", what)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], what)
        if kind == STRING:
            return self.string(MAXSTRING, what)
        if kind == _ARRAY:
            return self.array(what)
        raise self.bad(f"{what} has the unknown type {kind}")

    def array(self, what: str) -> Array:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind == _ARRAY:
            raise Unsupported(f"{self.path}: {what} is an array of arrays")
        if kind != STRING and kind not in SCALARS:
            raise self.bad(f"{what} has the unknown element type {kind}")
        least = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind])
        self.bound(count, least, MAX_ELEMENTS, f"length of {what}")
        start = self.at
        self.at = self.skip_strings(count, what) if kind == STRING else start + count * least
        return Array(self.path, kind, count, start, self.at)

    def skip_strings(self, count: int, what: str) -> int:
        """The end of `count` strings that start here. Most of a header's time goes here: the loop checks the least."""
        at, end, data = self.at, self.available, self.data
        length = struct.Struct("<Q").unpack_from
        for i in range(count):
            if at + 8 > end:
                at += 8 * (count - i)  # at least
                break
            at += 8 + length(data, at)[0]
        if at <= end:
            return at
        if at <= self.size:
            raise Incomplete(at)
        raise self.bad(f"truncated or damaged: a string of {what} ends at byte {at} of {self.size}")

    def tensor_infos(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(name, row-major shape, type number, offset from the data's start) of each tensor; names are unique."""
        infos, names = [], set()
        for i in range(count):
            name = self.string(MAX_TENSOR_NAME, f"name of tensor {i}")
            if name in names:
                raise self.bad(f"tensor {name!r} is there twice")
            names.add(name)
            n_dims = self.scalar("I", f"dimensions of {name!r}")
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.bad(f"tensor {name!r} has {n_dims} dimensions")
            dims = [self.scalar("Q", f"dimensions of {name!r}") for _ in range(n_dims)]
            kind, offset = self.scalar("I", f"type of {name!r}"), self.scalar("Q", f"offset of {name!r}")
            infos.append((name, tuple(reversed(dims)), kind, offset))
        return infos

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value: Any = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self.bad(f"general.alignment is {value!r}, not a power of two from 8 to {MAX_ALIGNMENT}")
        return int(value)

    def locate(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int, alignment: int
    ) -> TensorInfo:
        if kind not in TENSOR_TYPES:
            type_name = OTHER_TENSOR_TYPES.get(kind, f"number {kind}")
            supported = ", ".join(sorted(t[0] for t in TENSOR_TYPES.values()))
            raise Unsupported(f"{self.path}: tensor {name!r} has type {type_name}; supported: {supported}")
        dtype, group, group_bytes = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % group:
            must = f"rows must be a positive multiple of {group}"
            raise self.bad(f"tensor {name!r} of type {dtype} has shape {shape}: {must}")
        nbytes = prod(shape) // group * group_bytes
        if offset % alignment:
            raise self.bad(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        if (end := data_start + offset + nbytes) > self.size:
            raise self.bad(f"truncated or damaged: tensor {name!r} ends at byte {end} of {self.size}")
        return TensorInfo(name, dtype, shape, data_start + offset, nbytes)

    def check_overlap(self, tensors: tuple[TensorInfo, ...]) -> None:
        by_offset = sorted(tensors, key=lambda t: t.offset)
        for a, b in pairwise(by_offset):
            if a.offset + a.nbytes > b.offset:
                raise self.bad(f"tensors {a.name!r} and {b.name!r} overlap")
