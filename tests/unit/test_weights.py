"""Tensors from files into memory: exact bits, the known layouts, bounded memory, and files that lie."""

import os
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from pptasks.errors import ModelFileError, Unsupported
from pptasks.modelinfo import TensorRef
from workers.weights import QUANTISED, Weight, load

RNG = np.random.default_rng(7)


def put(
    folder: Path, dtype: str, raw: bytes, shape: tuple[int, ...], *, name: str = "w", offset: int = 0, heads: int = 0
) -> TensorRef:
    path = folder / f"{name}-{dtype}.bin"
    with open(path, "wb") as file:
        file.seek(offset)
        file.write(raw)
    return TensorRef(name, path, offset, len(raw), dtype, shape, heads)


def one(ref: TensorRef) -> Weight:
    [(name, weight)] = load([ref], lambda *_: None)
    assert name == ref.name
    assert weight.data.shape == ref.shape
    return weight


@pytest.mark.parametrize(("dtype", "bits"), [("F32", np.uint32), ("F16", np.uint16), ("BF16", np.uint16)])
def test_floats_keep_every_bit(tmp_path: Path, dtype: str, bits: type):
    stored = RNG.integers(0, np.iinfo(bits).max, (700, 600), bits, endpoint=True)  # NaN too; more than one chunk
    weight = one(put(tmp_path, dtype, stored.tobytes(), stored.shape))
    assert weight.dtype == dtype
    assert np.array_equal(weight.data.view(bits), stored)
    assert weight.data.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_vector_becomes_float32(tmp_path: Path, dtype: str):
    values = np.array([1.0, -0.5, 3.25, 0.0], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    raw = {"F32": values, "F16": values.astype(np.float16), "BF16": halves}[dtype]
    weight = one(put(tmp_path, dtype, raw.tobytes(), (4,)))
    assert weight.dtype == "F32"
    assert weight.data.tolist() == values.tolist()


def quantised_bytes(dtype: str, rows: int, width: int) -> np.ndarray:
    """Any bytes below 0x3c: whatever lies where a block keeps its scales is then a float16 below 1."""
    per_block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return RNG.integers(0, 0x3C, (rows, width // per_block * nbytes), np.uint8)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_types_become_float16_by_chunks_as_by_the_whole(tmp_path: Path, dtype: str):
    raw = quantised_bytes(dtype, 600, 512)
    weight = one(put(tmp_path, dtype, raw.tobytes(), (600, 512)))
    whole = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    assert weight.dtype == "F16"
    assert np.array_equal(weight.data, whole.astype(np.float16))


def test_q4_1_is_scale_times_nibble_plus_minimum(tmp_path: Path):
    nibbles = np.arange(16, dtype=np.uint8)
    scales = np.array([0.5, -2.0], np.float16).tobytes()
    block = scales + bytes(nibbles | (15 - nibbles) << 4)  # the low nibbles are a block's first half
    weight = one(put(tmp_path, "Q4_1", block * 2, (2, 32)))
    row = [0.5 * q - 2.0 for q in (*range(16), *range(15, -1, -1))]
    assert weight.data.tolist() == [row, row]


def test_a_value_too_large_for_float16_makes_the_tensor_bfloat16(tmp_path: Path):
    block = np.array([60000.0], np.float16).tobytes() + np.arange(32, dtype=np.int8).tobytes()  # 31 * 60000 overflows
    small = np.array([1.0], np.float16).tobytes() + np.ones(32, np.int8).tobytes()
    weight = one(put(tmp_path, "Q8_0", small + block, (2, 32)))
    values = weight.data.astype(np.float32)
    exact = np.stack([np.ones(32), np.arange(32) * np.float64(np.float16(60000.0))])
    assert weight.dtype == "BF16"
    np.testing.assert_allclose(values, exact, rtol=2**-8)


def test_interleaved_heads_become_half_split(tmp_path: Path):
    heads, hd, width = 3, 8, 40
    stored = np.arange(heads * hd * width, dtype=np.float32).reshape(heads, hd, width)
    weight = one(put(tmp_path, "F32", stored.tobytes(), (heads * hd, width), heads=heads))
    expected = np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1)  # pairs (2i, 2i + 1) -> (i, i + Hd/2)
    assert np.array_equal(weight.data, expected.reshape(heads * hd, width))


def test_only_the_tensors_own_range_is_read(tmp_path: Path):
    values = RNG.standard_normal((3, 16)).astype(np.float32)
    ref = put(tmp_path, "F32", values.tobytes(), (3, 16), offset=1 << 40)  # a sparse file of a terabyte
    assert np.array_equal(one(ref).data, values)


def test_memory_stays_within_what_is_kept_and_a_chunk(tmp_path: Path):
    raw = quantised_bytes("Q4_1", 8192, 2048)
    ref = put(tmp_path, "Q4_1", raw.tobytes(), (8192, 2048))
    tracemalloc.start()
    try:
        weight = one(ref)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * weight.data.nbytes


def test_progress_counts_bytes_of_all_tensors(tmp_path: Path):
    refs = [put(tmp_path, "F16", bytes(2 * 512 * n), (n, 512), name=f"t{n}") for n in (1000, 1)]
    seen: list[tuple[str, int, int]] = []
    for _ in load(refs, lambda *at: seen.append(at)):
        pass
    total = sum(ref.nbytes for ref in refs)
    assert [phase for phase, _, _ in seen] == ["load"] * len(seen)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("load", total, total)
    assert len(seen) > 2


def test_a_file_that_ends_early_is_named(tmp_path: Path):
    ref = put(tmp_path, "F16", bytes(2000), (10, 100))
    os.truncate(ref.file, 1990)
    with pytest.raises(ModelFileError, match=r"w-F16.bin: ends inside tensor w"):
        one(ref)


def test_a_file_that_went_away_is_named(tmp_path: Path):
    ref = put(tmp_path, "F16", bytes(2000), (10, 100))
    ref.file.unlink()
    with pytest.raises(ModelFileError, match=r"w-F16.bin: cannot be read"):
        one(ref)


def test_an_unknown_type_is_named_with_the_known_ones(tmp_path: Path):
    with pytest.raises(Unsupported, match=r"tensor w .* type IQ2_XS; supported: F32, .*Q6_K"):
        one(put(tmp_path, "IQ2_XS", bytes(100), (1, 100)))
