"""Tensors from files into memory: exact bits, the known layouts, bounded memory, and files that lie."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from pptasks import stfile
from pptasks.errors import ModelFileError, Unsupported
from pptasks.gguf import read_header
from pptasks.modelinfo import TensorRef
from workers.weights import FLOATS, QUANTISED, Weight, load

RNG = np.random.default_rng(7)


def put(
    folder: Path, dtype: str, raw: bytes, shape: tuple[int, ...], *, name: str = "w", offset: int = 0, **layout: Any
) -> TensorRef:
    path = folder / f"{name}-{dtype}.bin"
    with open(path, "wb") as file:
        file.seek(offset)
        file.write(raw)
    return TensorRef(name, path, offset, len(raw), dtype, shape, **layout)


def one(ref: TensorRef, *, quantized: bool = False) -> Weight:
    [(name, weight)] = load([ref], lambda *_: None, quantized=quantized)
    assert name == ref.name
    assert weight.shape == ref.shape
    assert weight.data.ctypes.data % 64 == 0
    assert weight.nbytes == weight.data.nbytes
    return weight


@pytest.mark.parametrize(("dtype", "bits"), [("F32", np.uint32), ("F16", np.uint16), ("BF16", np.uint16)])
def test_floats_keep_every_bit(tmp_path: Path, dtype: str, bits: type):
    stored = RNG.integers(0, np.iinfo(bits).max, (700, 600), bits, endpoint=True)  # NaN too; more than one chunk
    weight = one(put(tmp_path, dtype, stored.tobytes(), stored.shape))
    assert weight.dtype == dtype
    assert np.array_equal(weight.data.view(bits), stored)


SINGLES = np.array(  # zeros, the least and the greatest subnormal, one, the largest, infinities, NaNs with a payload
    [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F812345,
     0xFFABCDEF], np.uint32
)  # fmt: skip
PATTERNS = {"F32": np.resize(SINGLES, (256, 256)), "F16": np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)}
PATTERNS["BF16"] = PATTERNS["F16"]


def in_safetensors(folder: Path, dtype: str, bits: np.ndarray) -> TensorRef:
    safetensors.numpy.save_file({"w": bits.view(FLOATS[dtype])}, folder / "model.safetensors")
    t = stfile.read_tensors(folder)["w"]
    return TensorRef("w", t.file, t.offset, t.nbytes, t.dtype, t.shape)


def in_gguf(folder: Path, dtype: str, bits: np.ndarray) -> TensorRef:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    raw = bits.view(np.uint8) if dtype == "BF16" else bits.view(FLOATS[dtype])
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[dtype])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    [t] = read_header(folder / "model.gguf").tensors
    return TensorRef("w", folder / "model.gguf", t.offset, t.nbytes, t.dtype, t.shape)


@pytest.mark.parametrize("store", [in_safetensors, in_gguf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_pattern_survives_both_file_types(tmp_path: Path, dtype: str, store: Any):
    ref = store(tmp_path, dtype, PATTERNS[dtype])
    weight = one(ref)
    assert (ref.dtype, weight.dtype) == (dtype, dtype)
    assert weight.data.tobytes() == PATTERNS[dtype].tobytes()


def exact_value(dtype: str, bits: int) -> float:
    """A finite 16-bit pattern's value, by the definition of its type."""
    exponent_bits, fraction_bits, bias = {"F16": (5, 10, 15), "BF16": (8, 7, 127)}[dtype]
    exponent, fraction = bits >> fraction_bits & (1 << exponent_bits) - 1, bits & (1 << fraction_bits) - 1
    whole = fraction + (1 << fraction_bits if exponent else 0)
    return (-1.0) ** (bits >> 15) * whole * 2.0 ** (max(exponent, 1) - bias - fraction_bits)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_vector_of_16_bit_floats_becomes_float32_exactly(tmp_path: Path, dtype: str):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    weight = one(put(tmp_path, dtype, patterns.tobytes(), patterns.shape))
    assert weight.dtype == "F32"
    specials = (patterns & (0x7C00 if dtype == "F16" else 0x7F80)) == (0x7C00 if dtype == "F16" else 0x7F80)
    expected = np.array([exact_value(dtype, int(p)) for p in patterns[~specials]], np.float32)
    assert weight.data[~specials].tobytes() == expected.tobytes()  # the signs of zeros too
    rest, fraction = weight.data[specials], patterns[specials] & (0x3FF if dtype == "F16" else 0x7F)
    assert np.array_equal(np.isnan(rest), fraction != 0)
    assert np.array_equal(np.signbit(rest), patterns[specials] >> 15 == 1)
    assert np.isinf(rest[fraction == 0]).all()


def test_a_vector_of_float32_keeps_every_bit(tmp_path: Path):
    weight = one(put(tmp_path, "F32", SINGLES.tobytes(), SINGLES.shape))
    assert weight.data.view(np.uint32).tolist() == SINGLES.tolist()


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


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_types_may_stay_as_they_are(tmp_path: Path, dtype: str):
    raw = quantised_bytes(dtype, 600, 512)
    weight = one(put(tmp_path, dtype, raw.tobytes(), (600, 512)), quantized=True)
    assert weight.dtype == dtype
    assert np.array_equal(weight.data, raw)
    index = np.array([599, 0, 599])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])[index]
    assert np.array_equal(weight.rows(index), expected)


def test_quantized_leaves_floats_and_vectors_as_without(tmp_path: Path):
    matrix = one(put(tmp_path, "BF16", bytes(range(24)), (3, 4)), quantized=True)
    assert matrix.dtype == "BF16"
    assert matrix.rows(np.array([2])).tobytes() == matrix.data[2:].astype(np.float32).tobytes()
    assert one(put(tmp_path, "F16", bytes(8), (4,)), quantized=True).dtype == "F32"


def test_float16_is_the_nearest_and_between_two_the_even_one(tmp_path: Path):
    scale = np.array([33 * 2.0**-10], np.float16)  # 33 q has up to 12 bits, float16 holds 11
    block = scale.tobytes() + np.arange(96, 128, dtype=np.int8).tobytes()
    weight = one(put(tmp_path, "Q8_0", block, (1, 32)))
    products = [33 * q for q in range(96, 128)]  # 3168 to 4191: float16 has every 2nd up to 4096, then every 4th
    steps = [2 if p < 4096 else 4 for p in products]
    nearest = [round(p / step) * step * 2.0**-10 for p, step in zip(products, steps, strict=True)]  # ties to even
    assert weight.data.tolist() == [nearest]


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
    weight = one(put(tmp_path, "F32", stored.tobytes(), (heads * hd, width), interleaved_heads=heads))
    expected = np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1)  # pairs (2i, 2i + 1) -> (i, i + Hd/2)
    assert np.array_equal(weight.data, expected.reshape(heads * hd, width))
    bias = one(put(tmp_path, "F32", stored[:, :, 0].tobytes(), (heads * hd,), name="b", interleaved_heads=heads))
    assert np.array_equal(bias.data, expected[:, :, 0].reshape(-1))


@pytest.mark.parametrize("quantized", [False, True])
def test_interleaved_rows_of_quantised_bytes_become_half_split(tmp_path: Path, quantized: bool):
    heads, hd = 5, 400  # several chunks
    raw = quantised_bytes("Q5_K", heads * hd, 512)
    ref = put(tmp_path, "Q5_K", raw.tobytes(), (heads * hd, 512), interleaved_heads=heads)
    per_head = raw.reshape(heads, hd, -1)
    expected = np.concatenate([per_head[:, 0::2], per_head[:, 1::2]], axis=1).reshape(heads * hd, -1)
    values = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType.Q5_K)
    weight = one(ref, quantized=quantized)
    assert np.array_equal(weight.data, expected if quantized else values.astype(np.float16))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_transposed_matrix_comes_out_as_out_in(tmp_path: Path, dtype: str):
    stored = RNG.integers(0, 1 << 15, (700, 600), PATTERNS[dtype].dtype)  # (in, out), more than one chunk
    weight = one(put(tmp_path, dtype, stored.tobytes(), (600, 700), transposed=True))
    assert weight.data.flags.c_contiguous
    assert np.array_equal(weight.data.view(stored.dtype), stored.T)


FUSED = (("q", 32), ("k", 16), ("v", 16))


@pytest.mark.parametrize(("width", "views"), [(32, True), (7, False)])
def test_a_fused_matrix_comes_out_as_its_parts(tmp_path: Path, width: int, views: bool):
    stored = RNG.standard_normal((width, 64)).astype(np.float16)
    ref = put(tmp_path, "F16", stored.tobytes(), (64, width), transposed=True, parts=FUSED)
    found = dict(load([ref], lambda *_: None))
    assert list(found) == ["q", "k", "v"]
    for name, (first, last) in {"q": (0, 32), "k": (32, 48), "v": (48, 64)}.items():
        assert found[name].shape == (last - first, width)
        assert np.array_equal(found[name].data, stored.T[first:last])
        assert found[name].data.flags.c_contiguous
        assert found[name].data.ctypes.data % 64 == 0
    gap = found["k"].data.ctypes.data - found["q"].data.ctypes.data
    assert (gap == found["q"].nbytes) == views


def test_a_fused_bias_and_fused_quantised_rows_come_out_as_their_parts(tmp_path: Path):
    bias = RNG.standard_normal(64).astype(ml_dtypes.bfloat16)
    raw = quantised_bytes("Q8_0", 64, 96)
    refs = [
        put(tmp_path, "BF16", bias.tobytes(), (64,), name="bias", parts=(("a", 16), ("b", 48))),
        put(tmp_path, "Q8_0", raw.tobytes(), (64, 96), name="matrix", parts=(("c", 16), ("d", 48))),
    ]
    found = dict(load(refs, lambda *_: None, quantized=True))
    assert {name: (w.dtype, w.shape) for name, w in found.items()} == {
        "a": ("F32", (16,)), "b": ("F32", (48,)), "c": ("Q8_0", (16, 96)), "d": ("Q8_0", (48, 96))
    }  # fmt: skip
    assert np.concatenate([found["a"].data, found["b"].data]).tolist() == bias.astype(np.float32).tolist()
    assert np.array_equal(np.concatenate([found["c"].data, found["d"].data]), raw)


def test_only_the_tensors_own_range_is_read(tmp_path: Path):
    values = RNG.standard_normal((3, 16)).astype(np.float32)
    ref = put(tmp_path, "F32", values.tobytes(), (3, 16), offset=1 << 40)  # a sparse file of a terabyte
    assert np.array_equal(one(ref).data, values)


@pytest.mark.parametrize(
    ("dtype", "quantized", "layout"),
    [
        ("Q4_1", False, {}),
        ("Q4_1", True, {}),
        ("BF16", False, {"transposed": True}),
        ("BF16", False, {"parts": (("q", 32), ("k", 8160))}),
    ],
)
def test_memory_stays_within_what_is_kept_and_a_chunk(
    tmp_path: Path, dtype: str, quantized: bool, layout: dict[str, Any]
):
    raw = quantised_bytes("Q4_1", 8192, 2048) if dtype == "Q4_1" else RNG.integers(0, 255, (8192, 4096), np.uint8)
    ref = put(tmp_path, dtype, raw.tobytes(), (8192, 2048), **layout)
    tracemalloc.start()
    try:
        held = list(load([ref], lambda *_: None, quantized=quantized))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * sum(weight.nbytes for _, weight in held)


def test_the_first_attempt_is_freed_before_the_second(tmp_path: Path):
    """A tensor whose last value is too large for float16."""
    raw = quantised_bytes("Q8_0", 4096, 2048)
    raw[-1, -34:-32], raw[-1, -1] = np.array([60000.0], np.float16).view(np.uint8), 100
    ref = put(tmp_path, "Q8_0", raw.tobytes(), (4096, 2048))
    tracemalloc.start()
    try:
        weight = one(ref)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weight.dtype == "BF16"
    assert peak < 1.3 * weight.nbytes


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
