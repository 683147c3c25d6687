"""The GGUF header parser: agrees with the format's own package, and refuses by name whatever does not hold."""

import struct
import tracemalloc
from pathlib import Path

import gguf as reference
import pytest

from pptasks.errors import ModelFileError, Unsupported
from pptasks.gguf import OTHER_TENSOR_TYPES, TENSOR_TYPES, Array, read_header, split_paths

F32, Q4_1 = 0, 3
U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 62


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


PAIRS = (pair("general.architecture", STRING, text("llama")), pair("x.n", U32, struct.pack("<I", 7)))
WORDS = pair("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("ab") + text("ß"))
TENSORS = (tensor("a", (32, 2), Q4_1, 0), tensor("b", (8,), F32, 64))


def build(
    pairs: tuple[bytes, ...] = PAIRS,
    tensors: tuple[bytes, ...] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: int = 96,
) -> bytes:
    """A GGUF file with `data` bytes of tensors after the padding."""
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    header = magic + version + struct.pack("<QQ", n_tensors, n_pairs) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_reads_pairs_arrays_and_tensors(path: Path) -> None:
    path.write_bytes(build((*PAIRS, WORDS)))
    header = read_header(path)
    words = header.metadata["words"]
    assert dict(header.metadata) == {"general.architecture": "llama", "x.n": 7, "words": words}
    assert isinstance(words, Array)
    assert (len(words), words.decode()) == (2, ("ab", "ß"))
    a, b = header.tensors
    assert (a.name, a.dtype, a.shape, a.nbytes, a.offset) == ("a", "Q4_1", (2, 32), 40, header.data_start)
    assert (b.name, b.dtype, b.shape, b.nbytes, b.offset) == ("b", "F32", (8,), 32, header.data_start + 64)
    assert header.data_start == path.stat().st_size - 96


def test_agrees_with_the_reference_reader(smollm2_gguf: Path) -> None:
    ours, theirs = read_header(smollm2_gguf), reference.GGUFReader(smollm2_gguf)
    assert [(t.name, t.dtype, t.shape[::-1], t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    for key, value in ours.metadata.items():
        contents = theirs.fields[key].contents()
        assert (list(value.decode()) if isinstance(value, Array) else value) == contents, key


def test_tensor_types_are_the_formats() -> None:
    for number, (name, group, nbytes) in TENSOR_TYPES.items():
        kind = reference.GGMLQuantizationType(number)
        assert (kind.name, *reference.GGML_QUANT_SIZES[kind]) == (name, group, nbytes)
    assert not set(TENSOR_TYPES) & set(OTHER_TENSOR_TYPES)
    for number, name in OTHER_TENSOR_TYPES.items():
        assert reference.GGMLQuantizationType(number).name == name


def test_every_truncation_is_refused(path: Path) -> None:
    whole = build((*PAIRS, WORDS))
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ModelFileError, match=r"model\.gguf"):
            read_header(path)


def scalar_pair(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


REFUSED: dict[str, tuple[bytes, type[Exception], str]] = {
    "another format": (build(magic=b"PK\3\4"), ModelFileError, "not a GGUF file"),
    "a short file of another format": (b"hello", ModelFileError, "not a GGUF file"),
    "version 1": (build(version=struct.pack("<I", 1)), Unsupported, "version 1"),
    "big-endian": (build(version=struct.pack(">I", 3)), Unsupported, "big-endian"),
    "too many tensors": (build(counts=(HUGE, 2)), ModelFileError, "number of tensors"),
    "too many pairs": (build(counts=(2, HUGE)), ModelFileError, "number of metadata pairs"),
    "a key over the rest of the file": (build((struct.pack("<Q", HUGE),)), ModelFileError, "key 0"),
    "a string over the rest of the file": (build((pair("k", STRING, struct.pack("<Q", HUGE)),)), ModelFileError, "'k'"),
    "an array over the rest of the file": (
        build((pair("k", ARRAY, struct.pack("<IQ", U32, HUGE)),)),
        ModelFileError,
        "length of metadata 'k'",
    ),
    "an array of strings over the rest of the file": (
        build((pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + struct.pack("<QQ", 0, HUGE)),)),
        ModelFileError,
        "string of metadata 'k'",
    ),
    "an array of arrays": (build((pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)),)), Unsupported, "array of arrays"),
    "an unknown type": (build((pair("k", 13, b""),)), ModelFileError, "unknown type 13"),
    "an unknown element type": (build((pair("k", ARRAY, struct.pack("<IQ", 99, 0)),)), ModelFileError, "type 99"),
    "a key twice": (build((PAIRS[0], PAIRS[0])), ModelFileError, "twice"),
    "a string that is no text": (build((pair("k", STRING, text(b"\xff")),)), ModelFileError, "not UTF-8"),
    "a tensor twice": (build(tensors=(TENSORS[0], TENSORS[0])), ModelFileError, "'a' is there twice"),
    "an alignment that is none": (build((scalar_pair("general.alignment", 24),)), ModelFileError, "alignment is 24"),
    "an alignment of zero": (build((scalar_pair("general.alignment", 0),)), ModelFileError, "alignment is 0"),
    "no dimension": (build(tensors=(tensor("a", (), F32, 0),)), ModelFileError, "0 dimensions"),
    "five dimensions": (build(tensors=(tensor("a", (1,) * 5, F32, 0),)), ModelFileError, "5 dimensions"),
    "an empty dimension": (build(tensors=(tensor("a", (0, 4), F32, 0),)), ModelFileError, "'a'"),
    "an endless tensor": (build(tensors=(tensor("a", (HUGE, HUGE), F32, 0),)), ModelFileError, "'a' ends at"),
    "half a group": (build(tensors=(tensor("a", (48, 2), Q4_1, 0),)), ModelFileError, "multiple of 32"),
    "a tensor off its alignment": (build(tensors=(tensor("a", (1,), F32, 4),)), ModelFileError, "'a' starts at 4"),
    "a tensor after the end": (build(tensors=(tensor("a", (1,), F32, 96),)), ModelFileError, "'a' ends at"),
    "overlap": (
        build(tensors=(tensor("a", (16,), F32, 0), tensor("b", (1,), F32, 32))),
        ModelFileError,
        "'a' and 'b' overlap",
    ),
    "a type we do not read": (build(tensors=(tensor("a", (256,), 10, 0),)), Unsupported, "'a' has type Q2_K"),
    "a type nobody knows": (build(tensors=(tensor("a", (256,), 77, 0),)), Unsupported, "'a' has type number 77"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_name(path: Path, case: str) -> None:
    data, error, message = REFUSED[case]
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # a count is checked before anything is made of it
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_changed_is_noticed(path: Path) -> None:
    path.write_bytes(build((*PAIRS, WORDS)))
    words = read_header(path).metadata["words"]
    path.write_bytes(build((*PAIRS, WORDS))[: words.start + 9])
    with pytest.raises(ModelFileError, match="changed"):
        words.decode()
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        words.decode()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_header(tmp_path)


@pytest.mark.parametrize("count", [2.0, float("nan"), -1, 0, 1, 4097, 1 << 63, True, "2", Array(Path("x"), 4, 2, 0, 8)])
def test_a_count_of_parts_that_is_none(count: object) -> None:
    with pytest.raises(
        ModelFileError, match=r"x-00001-of-00002\.gguf: its split\.count is .* from 2 to 4096"
    ) as caught:
        split_paths(Path("x-00001-of-00002.gguf"), count)
    assert len(str(caught.value)) < 200


def test_the_parts_are_named_after_the_first() -> None:
    assert [p.name for p in split_paths(Path("x-00001-of-00002.gguf"), 2)] == [
        "x-00001-of-00002.gguf",
        "x-00002-of-00002.gguf",
    ]
    for name in ("x.gguf", "x-00002-of-00002.gguf", "x-00001-of-00003.gguf"):
        with pytest.raises(ModelFileError, match="give the first"):
            split_paths(Path(name), 2)
