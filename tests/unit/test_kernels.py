"""The C kernels against plain tinygrad at the very shapes, and their one order of summation: bytes are compared."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from tinygrad import Device
from tinygrad.device import TinyELF

from pptasks.modelinfo import ModelConfig
from workers.kernels import SOURCE, CpuKernels, obstacle
from workers.model import rope_table
from workers.plain import PlainTinygrad
from workers.weights import FLOATS, Weight, aligned_zeros

TINY = ModelConfig("llama", 2, 64, 4, 2, 16, 176, 514, 64, 1e-5, 10000.0, tied=False)  # 514 rows: no multiple of four
SMOLLM2 = ModelConfig("llama", 1, 576, 9, 3, 64, 1536, 49152, 64, 1e-5, 100000.0, tied=True)
SHAPES = {
    "attn_norm": ("D",), "attn_q": ("Q", "D"), "attn_k": ("K", "D"), "attn_v": ("K", "D"), "attn_output": ("D", "Q"),
    "ffn_norm": ("D",), "ffn_gate": ("F", "D"), "ffn_up": ("F", "D"), "ffn_down": ("D", "F"),
}  # fmt: skip
MIXED = {"attn_q": "F32", "attn_k": "BF16", "ffn_up": "BF16", "ffn_down": "F32"}  # the others: F16
AnyBackend = TypeVar("AnyBackend", CpuKernels, PlainTinygrad)


def weight(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Weight:
    values = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]) * (3.0 if len(shape) > 1 else 1.0)
    if len(shape) == 1:
        values, dtype = 1.0 + values, "F32"
    data = aligned_zeros(shape, FLOATS[dtype])
    data[...] = values.astype(FLOATS[dtype])
    return Weight(data, dtype)


def weights(c: ModelConfig, types: dict[str, str], other: str = "F16") -> Iterator[tuple[str, Weight]]:
    rng = np.random.default_rng(11)
    sizes = {"D": c.dim, "Q": c.n_heads * c.head_dim, "K": c.n_kv_heads * c.head_dim, "F": c.ffn_dim}
    for i in range(c.n_blocks):
        for name, shape in SHAPES.items():
            yield f"blk.{i}.{name}.weight", weight(rng, tuple(sizes[s] for s in shape), types.get(name, other))
    yield "output_norm.weight", weight(rng, (c.dim,), "F32")
    head = "token_embd.weight" if c.tied else "output.weight"
    yield head, weight(rng, (c.vocab_size, c.dim), other)


def make(backend: type[AnyBackend], c: ModelConfig, types: dict[str, str], other: str, max_rows: int) -> AnyBackend:
    blocks, rope = range(c.n_blocks), rope_table(c, c.context)
    return backend(c, weights(c, types, other), blocks=blocks, rope=rope, n_slots=8, max_rows=max_rows)


def hidden(rows: int, c: ModelConfig = TINY) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, c.dim)).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def close(ours: np.ndarray, plain: np.ndarray) -> None:
    assert np.abs(ours - plain).max() <= 2e-5 * (plain.max() - plain.min())


@pytest.mark.parametrize(
    ("config", "types", "other"),
    [(TINY, {}, "F32"), (TINY, {}, "F16"), (TINY, {}, "BF16"), (TINY, MIXED, "F16"), (SMOLLM2, {}, "F16")],
    ids=["f32", "f16", "bf16", "mixed", "smollm2"],
)
def test_block_and_readout_agree_with_plain_tinygrad(config: ModelConfig, types: dict[str, str], other: str):
    """A chunk of a prompt, then rows of two sequences, one of which goes on from that chunk."""
    ours, plain = (make(backend, config, types, other, 4) for backend in (CpuKernels, PlainTinygrad))
    for x, slots, positions in [
        (hidden(4, config), ints(2, 2, 2, 2), ints(0, 1, 2, 3)),
        (hidden(3, config), ints(2, 5, 2), ints(4, 0, 5)),
    ]:
        y = ours.forward(x, slots, positions)
        close(y, plain.forward(x, slots, positions))
    close(ours.logits(y[-1:]), plain.logits(y[-1:]))


@pytest.fixture(scope="module", params=["F32", "F16", "BF16"])
def one_type(request: pytest.FixtureRequest) -> CpuKernels:
    return make(CpuKernels, TINY, {}, request.param, TINY.context)


@pytest.mark.parametrize("lanes", [2, 3, 5, 6, 7, 8])
def test_a_row_has_the_same_bytes_alone_and_in_company(one_type: CpuKernels, lanes: int):
    x, slots = hidden(lanes), np.arange(lanes, dtype=np.int32)
    for position in range(3):
        positions = np.full(lanes, position, np.int32)
        together = one_type.forward(x, slots, positions)
        alone = [one_type.forward(x[i : i + 1], slots[i : i + 1], positions[i : i + 1]) for i in range(lanes)]
        assert together.tobytes() == np.concatenate(alone).tobytes()
    logits = one_type.logits(together)
    assert logits.tobytes() == np.concatenate([one_type.logits(row[None]) for row in together]).tobytes()


@pytest.mark.parametrize("chunk", [1, 4, 7, 13, 49])
def test_a_prompt_has_the_same_bytes_however_it_is_cut(one_type: CpuKernels, chunk: int):
    n = 60  # more than a panel
    x, positions = hidden(n), np.arange(n, dtype=np.int32)
    whole = one_type.forward(x, np.full(n, 1, np.int32), positions)
    slots = np.full(n, 3, np.int32)
    parts = [slice(i, i + chunk) for i in range(0, n, chunk)]
    cut = [one_type.forward(x[part], slots[part], positions[part]) for part in parts]
    assert np.concatenate(cut).tobytes() == whole.tobytes()


def test_rows_of_a_prompt_and_of_other_lanes_mix_in_one_call(one_type: CpuKernels):
    x = hidden(9)
    expected = [one_type.forward(x[:6], np.full(6, 0, np.int32), np.arange(6, dtype=np.int32))]
    expected += [one_type.forward(x[i : i + 1], ints(i - 5), ints(0)) for i in (6, 7, 8)]
    order = np.random.default_rng(3).permutation(9)
    slots, positions = ints(4, 4, 4, 4, 4, 4, 5, 6, 7), ints(0, 1, 2, 3, 4, 5, 0, 0, 0)
    mixed = one_type.forward(x[order], slots[order], positions[order])
    assert mixed.tobytes() == np.concatenate(expected)[order].tobytes()


def test_a_position_computed_again_and_a_slot_taken_over_leave_no_trace(one_type: CpuKernels):
    x, slot, positions = hidden(5), np.zeros(5, np.int32), np.arange(5, dtype=np.int32)
    first = one_type.forward(x, slot, positions)
    one_type.forward(hidden(20), np.zeros(20, np.int32), np.arange(20, dtype=np.int32))  # another sequence, longer
    again = [one_type.forward(x[:3], slot[:3], positions[:3]), one_type.forward(x[1:], slot[1:], positions[1:])]
    assert again[1].tobytes() == first[1:].tobytes()


def test_the_last_position_of_the_context_is_within_the_cache(one_type: CpuKernels):
    """And what lies behind it is another slot's: still the same after."""
    other = one_type.forward(hidden(2), ints(1, 1), ints(0, 1))[1:]
    n = TINY.context
    one_type.forward(hidden(n), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    assert one_type.forward(hidden(2)[1:], ints(1), ints(1)).tobytes() == other.tobytes()


def test_exponentials_are_accurate():
    probe = "\nvoid probe(float *x, long n) { for (long i = 0; i < n; i += 16) store(x + i, exp16(load(x + i))); }\n"
    sizes = "#define DIM 16\n#define EPS 0.0f\n"
    device = Device["CPU"]
    binary = device.compiler.compile_cached(sizes + SOURCE.read_text() + probe)
    program = device.runtime(TinyELF(binary, "probe", device.renderer.target, signature=()))
    x = np.linspace(-86.0, 88.0, 1 << 16).astype(np.float32)
    x[:16], x[-1] = [-1e30, -np.inf, -87.0, *[0.0] * 13], 0.0
    y = x.copy()
    program.fxn(ctypes.c_uint64(y.ctypes.data), ctypes.c_uint64(len(y)))
    assert y[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(y[16:], np.exp(x[16:].astype(np.float64)), rtol=4e-7)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dim": 72}, "hidden width 72"),
        ({"ffn_dim": 100}, "feed-forward width 100"),
        ({"head_dim": 8}, "head width 8"),
        ({"vocab_size": 3}, "vocabulary of 3"),
    ],
)
def test_sizes_that_the_kernels_cannot_do_are_told(change: dict[str, int], why: str):
    assert obstacle(TINY) is None
    assert why in str(obstacle(replace(TINY, **change)))
