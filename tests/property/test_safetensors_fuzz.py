"""Whatever the bytes, a safetensors header gives tensors inside the file or one of our errors, without much memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks import stfile
from pptasks.errors import ModelError

DATA = bytes(range(96))
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    "c": {"dtype": "F16", "shape": [4, 4], "data_offsets": [64, 96]},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def write(path: Path, header: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + DATA)


def check(path: Path) -> str | None:
    """The message that refuses the file, if one does; otherwise its tensors cover its data without overlap."""
    tracemalloc.start()
    try:
        tensors = stfile.read_header(path)
    except ModelError as error:
        message = str(error)
        assert message.isprintable()
        assert str(path) in message
        return message
    finally:
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    at = stfile.header_end(path, 8)
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.offset == at
        at += tensor.nbytes
    assert at == path.stat().st_size
    return None


def test_the_valid_file_opens(path: Path) -> None:
    write(path, json.dumps(HEADER).encode())
    assert check(path) is None


@settings(max_examples=600, deadline=5000)
@given(
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    cut=st.one_of(st.none(), st.floats(0, 1)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=6)), max_size=4),
)
def test_damaged_files(path: Path, length: int | None, cut: float | None, changes: list[tuple[float, bytes]]) -> None:
    header = bytearray(json.dumps(HEADER).encode())
    for where, new in changes:
        at = int(where * len(header))
        header[at : at + len(new)] = new
    write(path, bytes(header), length)
    if cut is not None:
        data = path.read_bytes()
        path.write_bytes(data[: int(cut * len(data))])
    check(path)


numbers = st.one_of(
    st.integers(-4, 100), st.sampled_from([2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 1.5, True, None, "4", []])
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "", 4, None, "\ud800"]),
        "shape": st.one_of(st.lists(numbers, max_size=10), numbers),
        "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
    },
)


@settings(max_examples=600, deadline=5000)
@given(
    extra=st.dictionaries(
        st.sampled_from(["a", "b", "c", "d", "", "\u202e", "x" * 300]), entries, min_size=1, max_size=3
    )
)
def test_crafted_entries(path: Path, extra: dict[str, object]) -> None:
    write(path, json.dumps({**HEADER, **extra}).encode())
    check(path)
