"""The tensors of a Hugging Face folder, read from the headers of its safetensors files. No weight is read.

Format: https://huggingface.co/docs/safetensors, "Format": a u64 (little-endian) header length, a JSON header, the data;
each entry of the header is {"dtype", "shape", "data_offsets": [begin, end]}, offsets count from the start of the data,
and the tensors cover it without a hole. A sharded model has `model.safetensors.index.json`, whose `weight_map` says
which file holds which tensor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from pptasks.errors import ModelFileError, ModelNotFound, Unsupported

MAX_HEADER = 32_000_000  # bytes; the format's own limit is 100 million
MAX_JSON = 16_000_000  # bytes of an index or a configuration
MAX_SHARDS = 4096
MAX_DIMS = 8
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

ITEM_BYTES: Mapping[str, int] = {  # of the format's types; which of them are weights is for models.py
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    offset: int  # from the start of the file, bytes
    nbytes: int
    dtype: str  # a key of ITEM_BYTES, or GGUF's name
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. ModelFileError: unreadable, too large, not an object, or a key twice."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ModelFileError(f"{path}: {size} bytes; the limit is {MAX_JSON}")
        data = path.read_bytes()
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from e
    return _parse_object(data, path)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its own name.

    ModelNotFound: no safetensors. ModelFileError: truncated, inconsistent, or an index that points elsewhere.
    Unsupported: a tensor type.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    raise ModelNotFound(
        f"{folder}: holds no {SINGLE} and no {INDEX}; only safetensors weights and .gguf files are read"
    )


def header_end(path: Path, available: int) -> int:
    """How much of the beginning of `path` to have before its header can be read, when `available` bytes are there.

    Up to `available`: the header is there, and ends here. ModelFileError: it is none, or too long.
    """
    try:
        if available < 8 <= path.stat().st_size:
            return 8
        with path.open("rb") as f:
            return 8 + _header_length(path, f)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from e


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; their ranges are inside the file and do not overlap."""
    try:
        with path.open("rb") as f:
            length = _header_length(path, f)
            entries = _parse_object(f.read(length), path)
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read: {e.strerror or e}") from e
    entries.pop("__metadata__", None)
    tensors = {name: _locate(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_cover(path, tensors, 8 + length, path.stat().st_size)
    return tensors


def _header_length(path: Path, f: BinaryIO) -> int:
    """Bytes of the JSON header, bounded; `f` stands at its start then."""
    size = f.seek(0, 2)
    f.seek(0)
    length = int.from_bytes(f.read(8), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ModelFileError(f"{path}: truncated, or not a safetensors file ({size} bytes, header of {length})")
    return length


def read_weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor, from `index`. ModelFileError: it has none, or names a file that is no shard."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelFileError(f"{index}: has no weight_map of names to files")
    files = sorted(set(weight_map.values()))
    if len(files) > MAX_SHARDS:
        raise ModelFileError(f"{index}: names {len(files)} files; the limit is {MAX_SHARDS}")
    for file in files:
        plain = file.isprintable() and not set("/\\") & set(file) and not file.startswith(".")
        if not plain or not file.endswith(".safetensors"):
            raise ModelFileError(f"{index}: names {file!r}, which is no .safetensors file of this folder")
    return weight_map


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    weight_map = read_weight_map(index)
    files = sorted(set(weight_map.values()))
    for file in files:
        if not (folder / file).is_file():
            raise ModelFileError(f"{index}: names {file}, which is missing; copy or download the folder again")
    shards = {file: read_header(folder / file) for file in files}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelFileError(f"{index}: places tensor {name!r} in {file}, which does not hold it")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _parse_object(data: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) != len(pairs):
            raise ValueError("a key is there twice")
        return items

    try:
        value = json.loads(data, object_pairs_hook=unique)
        if b"\\u" in data:  # an escaped half of a surrogate pair is JSON, and no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: its JSON cannot be read: {e}") from e
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: its JSON is not an object")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _locate(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    well_formed = (
        isinstance(dtype, str)
        and isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(_is_count, shape))
        and isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
    )  # fmt: skip
    if not well_formed:
        raise ModelFileError(f"{path}: the entry of tensor {name!r} is malformed")
    if dtype not in ITEM_BYTES:
        raise Unsupported(f"{path}: tensor {name!r} has type {dtype}; supported: {', '.join(ITEM_BYTES)}")
    begin, end = offsets
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise ModelFileError(f"{path}: tensor {name!r} of shape {shape} and type {dtype} cannot be {end - begin} bytes")
    return StoredTensor(path, data_start + begin, end - begin, dtype, tuple(shape))


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    at, last = data_start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            problem = "overlap" if tensor.offset < at else "leave a hole"
            raise ModelFileError(f"{path}: {last} and tensor {name!r} {problem}")
        at, last = tensor.offset + tensor.nbytes, f"tensor {name!r}"
    if at != size:
        raise ModelFileError(
            f"{path}: its tensors end at byte {at}, the file at {size}: truncated or damaged; copy or download it again"
        )
