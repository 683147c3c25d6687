"""The grid and the requests: every byte once, whatever the tensors. And a header is read from as much as is there."""

from itertools import pairwise
from pathlib import Path

import gguf as gguf_writer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks import gguf
from pptasks.remote import ranges

MIB = 1 << 20


@given(
    header=st.integers(1, 20 * MIB), starts=st.lists(st.integers(0, 60 * MIB), max_size=20), rest=st.integers(0, MIB)
)
def test_the_grid_covers_the_file_once(header: int, starts: list[int], rest: int) -> None:
    begins = [header + start for start in starts]
    size = max(begins, default=header) + rest
    units = ranges.grid(header, begins, size)
    assert units[0] == (0, header)
    assert [begin for begin, _ in units[1:]] + [size] == [end for _, end in units]
    assert all(0 < end - begin <= ranges.UNIT for begin, end in units[1:])
    assert set(begins) - {size} <= {begin for begin, _ in units}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30), st.integers(1, 30))
def test_requests_hold_every_unit_once(gaps: list[tuple[int, int]], limit: int) -> None:
    units, at = [], 0
    for gap, length in gaps:
        units.append((at + gap, at + gap + length))
        at += gap + length
    runs = ranges.coalesce(units, limit)
    assert [unit for run in runs for unit in run] == units
    for run in runs:
        assert len(run) == 1 or run[-1][1] - run[0][0] <= limit
        assert all(a[1] == b[0] for a, b in pairwise(run))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    w = gguf_writer.GGUFWriter(path, "llama")
    w.add_token_list([f"word{i}" * (i % 5) for i in range(400)])
    w.add_token_scores([float(i) for i in range(400)])
    w.add_string("general.description", "d" * 3000)
    for i in range(20):
        w.add_tensor(f"blk.{i}.weight", np.ones((4, 32), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_incomplete_header_asks_for_no_more_than_it_needs(whole: Path, data: st.DataObject) -> None:
    complete = gguf.read_header(whole)
    content = whole.read_bytes()
    available = data.draw(st.integers(0, len(content)))
    sparse = whole.with_name("sparse.gguf")
    sparse.write_bytes(content[:available] + bytes(len(content) - available))
    if available >= complete.data_start:
        assert gguf.read_header(sparse, available).tensors == complete.tensors
    elif available <= complete.data_start - 32:  # more than the padding is missing
        with pytest.raises(gguf.Incomplete) as caught:
            gguf.read_header(sparse, available)
        assert available < caught.value.need <= complete.data_start


def test_a_header_is_complete_after_few_steps(whole: Path) -> None:
    end = gguf.read_header(whole).data_start
    have, steps = 0, 0
    content = whole.read_bytes()
    sparse = whole.with_name("sparse.gguf")
    while True:
        sparse.write_bytes(content[:have] + bytes(len(content) - have))
        need = gguf.header_end(sparse, have)
        if need <= have:
            break
        have, steps = need, steps + 1
    assert need == end
    assert have < end + gguf.MIN_STEP
    assert steps < 16


def test_a_long_header_of_a_large_file_takes_few_steps(tmp_path: Path) -> None:
    path, size = tmp_path / "x.gguf", 1 << 30
    w = gguf_writer.GGUFWriter(path, "llama")
    for name in ("tokens", "merges"):
        w.add_array(f"tokenizer.ggml.{name}", [f"{i:020}" for i in range(150_000)])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    end = path.stat().st_size
    with path.open("r+b") as f:
        f.truncate(size)  # sparse: what is read of it is all there, how much that is counts
    have, steps = 0, 0
    while (need := gguf.header_end(path, have)) > have:
        have, steps = need, steps + 1
    assert end <= have < end + size // 400
    assert steps < 12
