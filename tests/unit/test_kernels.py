"""The C kernels against the formulas in float64, and their one order of summation: there bytes are compared."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import gguf
import numpy as np
import pytest
from tinygrad import Device
from tinygrad.device import TinyELF

from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, OUTPUT_NORM_BIAS, POSITIONS, ModelConfig, Rope
from workers.kernels import SOURCE, CpuKernels, obstacle
from workers.weights import FLOATS, QUANTISED, Weight, aligned_zeros

LLAMA = ModelConfig(
    "llama", n_blocks=2, dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=176, vocab_size=514, context=64,
    norm="rms", norm_eps=1e-5, ffn="swiglu", rope=Rope(10000.0), windows=(0, 0), tied=False,
)  # fmt: skip  # 514 rows: no multiple of four
GPT2 = replace(LLAMA, architecture="gpt2", n_kv_heads=4, norm="layer", ffn="gelu", rope=None)
ODD = {"dim": 40, "n_heads": 5, "n_kv_heads": 5, "head_dim": 8, "ffn_dim": 72, "vocab_size": 301}
LINEARS = {
    "attn_q": ("Q", "D"), "attn_k": ("K", "D"), "attn_v": ("K", "D"), "attn_output": ("D", "Q"),
    "ffn_gate": ("F", "D"), "ffn_up": ("F", "D"), "ffn_down": ("D", "F"),
}  # fmt: skip
Tensors = dict[str, Weight]


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    dtype: str = "F16"
    types: Mapping[str, str] = field(default_factory=dict)  # of linear layers that are not `dtype`
    biases: frozenset[str] = frozenset()  # the linear layers and norms that have one
    head_norms: bool = False


MIXED = {"attn_q": "F32", "attn_k": "BF16", "ffn_up": "BF16", "ffn_down": "F32"}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ALL = frozenset(LINEARS) | {"attn_norm", "ffn_norm"}
WIDE = replace(LLAMA, dim=256, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=512)
CASES = {
    "f32": Case(LLAMA, "F32"),
    "f16": Case(LLAMA),
    "bf16": Case(LLAMA, "BF16"),
    "mixed": Case(LLAMA, types=MIXED),
    "smollm2": Case(replace(LLAMA, dim=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn_dim=1536, tied=True)),
    "mistral": Case(replace(LLAMA, windows=(3, 0))),
    "qwen2": Case(LLAMA, biases=QKV),
    "qwen3": Case(replace(LLAMA, head_dim=48), head_norms=True),
    "gpt2": Case(GPT2, biases=ALL),
    "layer norm, no bias": Case(replace(GPT2, ffn="swiglu")),
    "odd": Case(replace(LLAMA, **ODD)),
    "odd gpt2": Case(replace(GPT2, **ODD), "F32", biases=ALL),
    "odd qwen3": Case(replace(LLAMA, **ODD | {"n_kv_heads": 1, "head_dim": 24}), "BF16", biases=ALL, head_norms=True),
    "smallest": Case(
        replace(GPT2, dim=2, n_heads=1, n_kv_heads=1, head_dim=3, ffn_dim=1, vocab_size=3), biases=ALL, types=MIXED
    ),
    **{t: Case(WIDE, t, biases=ALL) for t in QUANTISED},
}  # fmt: skip


def matrix(rng: np.random.Generator, rows: int, width: int, dtype: str) -> Weight:
    if dtype in QUANTISED:
        data, values = quantised(rng, rows, width, dtype)
    else:
        values = rng.standard_normal((rows, width), np.float32) / np.sqrt(width) * 3.0
        data = aligned_zeros((rows, width), FLOATS[dtype])
        data[...] = values.astype(FLOATS[dtype])
    return Weight(data, dtype, (rows, width))


def quantised(rng: np.random.Generator, rows: int, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Random bits of quantised rows, whose scales let the values be about as large as those of a float matrix."""
    kind = gguf.GGMLQuantizationType[dtype]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = aligned_zeros((rows, width // elements * size), np.dtype(np.uint8))
    data[...] = rng.integers(0, 256, data.shape, np.uint8)
    blocks = data.reshape(-1, size)
    scales = blocks[:, -2:] if dtype == "Q6_K" else blocks[:, : 4 if dtype in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2]
    signs = rng.choice([-1.0, 1.0], (len(blocks), scales.shape[1] // 2))
    largest = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 128, "Q4_K": 512, "Q5_K": 1024, "Q6_K": 2048}
    scale = signs * rng.uniform(0.5, 1.5, signs.shape) * 3.0 / largest[dtype] / np.sqrt(width)
    scales[...] = scale.astype(np.float16).view(np.uint8)
    return data, gguf.quants.dequantize(data, kind)


def vector(rng: np.random.Generator, width: int, mean: float) -> Weight:
    data = aligned_zeros((width,), FLOATS["F32"])
    data[...] = mean + 0.3 * rng.standard_normal(width)
    return Weight(data, "F32", (width,))


def tensors(case: Case) -> Tensors:
    return dict(_tensors(case, np.random.default_rng(11)))


def _tensors(case: Case, rng: np.random.Generator) -> Iterator[tuple[str, Weight]]:
    c = case.config
    size = {"D": c.dim, "Q": c.n_heads * c.head_dim, "K": c.n_kv_heads * c.head_dim, "F": c.ffn_dim}
    linears = {name: shape for name, shape in LINEARS.items() if c.ffn == "swiglu" or name != "ffn_gate"}
    for i in range(c.n_blocks):
        for name, (rows, width) in linears.items():
            yield f"blk.{i}.{name}.weight", matrix(rng, size[rows], size[width], case.types.get(name, case.dtype))
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", vector(rng, c.dim, 1.0)
        for name in ("attn_q_norm", "attn_k_norm") if case.head_norms else ():
            yield f"blk.{i}.{name}.weight", vector(rng, c.head_dim, 1.0)
        for name in sorted(case.biases & {*linears, "attn_norm", "ffn_norm"}):
            yield f"blk.{i}.{name}.bias", vector(rng, size[linears.get(name, ("D",))[0]], 0.0)
    yield OUTPUT_NORM, vector(rng, c.dim, 1.0)
    if c.norm == "layer" and case.biases:
        yield OUTPUT_NORM_BIAS, vector(rng, c.dim, 0.0)
    yield EMBEDDING, matrix(rng, c.vocab_size, c.dim, case.dtype)
    if not c.tied:
        yield OUTPUT, matrix(rng, c.vocab_size, c.dim, case.dtype)
    if c.rope is None:
        yield POSITIONS, matrix(rng, c.context, c.dim, "F32")


def rope_table(c: ModelConfig) -> np.ndarray | None:
    if c.rope is None:
        return None
    angles = np.outer(np.arange(c.context), c.rope.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def make(case: Case, weights: Tensors | None = None) -> CpuKernels:
    c, weights = case.config, tensors(case) if weights is None else weights
    return CpuKernels(
        c, weights.items(), blocks=range(c.n_blocks), rope=rope_table(c), context=c.context, n_slots=8, max_rows=64,
        traced=range(c.n_blocks),
    )  # fmt: skip


class Expected:
    """The formulas, row by row, in float64 and numpy's own order."""

    def __init__(self, case: Case):
        self.c, self.table = case.config, rope_table(case.config)
        self.w = {name: _values(weight) for name, weight in tensors(case).items()}
        self.cache: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}  # (block, slot) -> its k, v

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def norm(self, x: np.ndarray, name: str, kind: str) -> np.ndarray:
        x = x - x.mean() if kind == "layer" else x
        x = x / np.sqrt(np.square(x).mean() + self.c.norm_eps)
        return x * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0.0)

    def heads(self, x: np.ndarray, norm: str, position: int) -> np.ndarray:
        x = x.reshape(-1, self.c.head_dim)
        if f"{norm}.weight" in self.w:
            x = np.stack([self.norm(head, norm, "rms") for head in x])
        if self.table is None:
            return x
        cos, sin = np.split(self.table[position].astype(np.float64), 2)
        a, b = np.split(x, 2, axis=1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def attend(self, q: np.ndarray, past: list[tuple[np.ndarray, np.ndarray]], window: int) -> np.ndarray:
        keys, values = (np.stack(part) for part in zip(*past[-window:], strict=True))  # (T, KV, Hd)
        out = np.empty_like(q)
        for h, head in enumerate(q):
            kv = h // (self.c.n_heads // self.c.n_kv_heads)
            weights = np.exp(keys[:, kv] @ head / np.sqrt(self.c.head_dim))
            out[h] = weights @ values[:, kv] / weights.sum()
        return out.reshape(-1)

    def block(self, i: int, x: np.ndarray, slot: int, position: int) -> dict[str, np.ndarray]:
        """What a Trace holds, of one row; positions of a slot come in order."""
        b, t = f"blk.{i}.", {"x": x}
        normed = self.norm(x, b + "attn_norm", self.c.norm)
        q, k, t["v"] = (self.linear(normed, f"{b}attn_{name}") for name in "qkv")
        q, k = self.heads(q, b + "attn_q_norm", position), self.heads(k, b + "attn_k_norm", position)
        past = self.cache.setdefault((i, slot), [])
        past[position:] = [(k, t["v"].reshape(k.shape))]
        t |= {"q": q.reshape(-1), "k": k.reshape(-1), "o": self.attend(q, past, self.c.windows[i])}
        x = x + self.linear(t["o"], b + "attn_output")
        t["h"] = self.norm(x, b + "ffn_norm", self.c.norm)
        up = self.linear(t["h"], b + "ffn_up")
        if self.c.ffn == "gelu":
            t["a"] = 0.5 * up * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (up + 0.044715 * up**3)))
        else:
            gate = self.linear(t["h"], b + "ffn_gate")
            t["a"] = gate / (1.0 + np.exp(-gate)) * up
        return t | {"y": x + self.linear(t["a"], b + "ffn_down")}

    def logits(self, x: np.ndarray) -> np.ndarray:
        normed = self.norm(x, "output_norm", self.c.norm)
        return self.linear(normed, "token_embd" if self.c.tied else "output")


def _values(weight: Weight) -> np.ndarray:
    if weight.dtype in QUANTISED:
        return gguf.quants.dequantize(weight.data, gguf.GGMLQuantizationType[weight.dtype]).astype(np.float64)
    return weight.data.astype(np.float64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def hidden(rows: int, c: ModelConfig = LLAMA) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, c.dim)).astype(np.float32)


def close(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 2e-5 * np.abs(expected).max() + 1e-7


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_intermediate_and_the_logits_agree_with_the_formulas(case: Case):
    """A chunk of a prompt, then rows of two sequences, one of which goes on from that chunk."""
    kernels, expected, c = make(case), Expected(case), case.config
    for x, slots, positions in [
        (hidden(7, c), np.full(7, 2, np.int32), np.arange(7, dtype=np.int32)),
        (hidden(3, c), ints(2, 5, 2), ints(7, 0, 8)),
        (hidden(1, c), ints(5), ints(1)),
    ]:
        for i in range(c.n_blocks):
            y = kernels.run_block(i, x, slots, positions)
            rows = [expected.block(i, *row) for row in zip(x.astype(np.float64), slots, positions, strict=True)]
            close(y, np.stack([row["y"] for row in rows]))
            x = y  # each block is judged on its own
        kernels.forward(hidden(len(x), c), slots, positions, trace=c.n_blocks - 1)
        trace = kernels.trace
        assert trace is not None
        assert trace.block == c.n_blocks - 1
        for name in "qkvohay":
            close(getattr(trace, name), np.stack([row[name] for row in rows]))
    close(kernels.logits(x), np.stack([expected.logits(row) for row in x.astype(np.float64)]))


def test_a_trace_does_not_change_the_result_and_is_of_the_block_asked_for():
    kernels, x = make(CASES["f16"]), hidden(5)
    slots, positions = np.zeros(5, np.int32), np.arange(5, dtype=np.int32)
    y = kernels.forward(x, slots, positions)
    assert kernels.trace is None
    traces = []
    for i in range(2):
        assert kernels.forward(x, slots, positions, trace=i).tobytes() == y.tobytes()
        assert kernels.trace is not None
        traces.append(kernels.trace)
    assert traces[0].x.tobytes() == x.tobytes()
    assert traces[0].y.tobytes() == traces[1].x.tobytes()
    assert traces[1].y.tobytes() == y.tobytes()


@pytest.mark.parametrize("name", ["f16", "gpt2", "odd gpt2", "Q4_K"])
def test_embeddings_are_exact(name: str):
    case = CASES[name]
    w, ids, positions = tensors(case), ints(5, 0, case.config.vocab_size - 1), ints(0, 9, 63)
    expected = _values(w[EMBEDDING])[ids].astype(np.float32)
    if case.config.rope is None:
        expected = expected + w[POSITIONS].data[positions]
    x = make(case).embed(ids, positions)
    assert x.dtype == np.float32
    assert x.tobytes() == expected.tobytes()


def test_there_is_a_kind_for_each_set_of_types():
    w = tensors(CASES["f16"]) | {"blk.1.ffn_up.weight": tensors(CASES["f32"])["blk.1.ffn_up.weight"]}
    assert make(CASES["f16"], w).block_kinds() == [0, 1]
    assert make(CASES["f16"]).block_kinds() == [0]


@pytest.mark.parametrize("missing", ["attn_norm", "attn_v", "ffn_gate", "ffn_down"])
def test_a_block_that_lacks_a_tensor_is_not_run(missing: str):
    w = {name: weight for name, weight in tensors(CASES["f16"]).items() if name != f"blk.1.{missing}.weight"}
    with pytest.raises(KeyError, match=f"block 1 lacks {missing}"):
        make(CASES["f16"], w).forward(hidden(1), ints(0), ints(0))


# ---- one order: bytes ----


@pytest.fixture(
    scope="module", params=["f32", "f16", "bf16", "mistral", "odd gpt2", "odd qwen3", "Q4_0", "Q4_1", "Q8_0", "Q6_K"]
)
def one_case(request: pytest.FixtureRequest) -> tuple[CpuKernels, ModelConfig]:
    case = CASES[request.param]
    return make(case), case.config


@pytest.mark.parametrize("lanes", [2, 3, 5, 6, 7, 8])
def test_a_row_has_the_same_bytes_alone_and_in_company(one_case: tuple[CpuKernels, ModelConfig], lanes: int):
    kernels, c = one_case
    x, slots = hidden(lanes, c), np.arange(lanes, dtype=np.int32)
    for position in range(3):
        positions = np.full(lanes, position, np.int32)
        together = kernels.forward(x, slots, positions)
        alone = [kernels.forward(x[i : i + 1], slots[i : i + 1], positions[i : i + 1]) for i in range(lanes)]
        assert together.tobytes() == np.concatenate(alone).tobytes()
    logits = kernels.logits(together)
    assert logits.tobytes() == np.concatenate([kernels.logits(row[None]) for row in together]).tobytes()


@pytest.mark.parametrize("chunk", [1, 4, 7, 13, 49])
def test_a_prompt_has_the_same_bytes_however_it_is_cut(one_case: tuple[CpuKernels, ModelConfig], chunk: int):
    kernels, c = one_case
    n = 60  # more than a panel
    x, positions = hidden(n, c), np.arange(n, dtype=np.int32)
    whole = kernels.forward(x, np.full(n, 1, np.int32), positions)
    slots = np.full(n, 3, np.int32)
    parts = [slice(i, i + chunk) for i in range(0, n, chunk)]
    cut = [kernels.forward(x[part], slots[part], positions[part]) for part in parts]
    assert np.concatenate(cut).tobytes() == whole.tobytes()


def test_rows_of_a_prompt_and_of_other_lanes_mix_in_one_call(one_case: tuple[CpuKernels, ModelConfig]):
    kernels, c = one_case
    x = hidden(9, c)
    expected = [kernels.forward(x[:6], np.full(6, 0, np.int32), np.arange(6, dtype=np.int32))]
    expected += [kernels.forward(x[i : i + 1], ints(i - 5), ints(0)) for i in (6, 7, 8)]
    order = np.random.default_rng(3).permutation(9)
    slots, positions = ints(4, 4, 4, 4, 4, 4, 5, 6, 7), ints(0, 1, 2, 3, 4, 5, 0, 0, 0)
    mixed = kernels.forward(x[order], slots[order], positions[order])
    assert mixed.tobytes() == np.concatenate(expected)[order].tobytes()


def test_a_position_computed_again_and_a_slot_taken_over_leave_no_trace(one_case: tuple[CpuKernels, ModelConfig]):
    kernels, c = one_case
    x, slot, positions = hidden(5, c), np.zeros(5, np.int32), np.arange(5, dtype=np.int32)
    first = kernels.forward(x, slot, positions)
    kernels.forward(hidden(20, c), np.zeros(20, np.int32), np.arange(20, dtype=np.int32))  # another sequence, longer
    again = [kernels.forward(x[:3], slot[:3], positions[:3]), kernels.forward(x[1:], slot[1:], positions[1:])]
    assert again[1].tobytes() == first[1:].tobytes()


def test_the_last_position_of_the_context_is_within_the_cache(one_case: tuple[CpuKernels, ModelConfig]):
    """And what lies behind it is another slot's: still the same after."""
    kernels, c = one_case
    other = kernels.forward(hidden(2, c), ints(1, 1), ints(0, 1))[1:]
    n = c.context
    kernels.forward(hidden(n, c), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    assert kernels.forward(hidden(2, c)[1:], ints(1), ints(1)).tobytes() == other.tobytes()


# ---- weights as they are ----


def columns(data: np.ndarray, dtype: str, width: int) -> np.ndarray:
    """What the read-out's product makes of each unit vector: float32 (width, rows of the matrix), its columns.

    With eps 0 the norm of a unit vector is the square root of the width, here a power of 4; so the products are exact.
    """
    c = replace(LLAMA, dim=width, norm_eps=0.0, vocab_size=len(data), tied=True)
    norm = Weight(np.full(width, width**-0.5, np.float32), "F32", (width,))
    w = {OUTPUT_NORM: norm, EMBEDDING: Weight(data, dtype, (len(data), width))}
    kernels = CpuKernels(
        c, w.items(), blocks=range(0), rope=None, context=1, n_slots=1, max_rows=width, traced=range(0)
    )  # fmt: skip
    together = kernels.logits(np.eye(width, dtype=np.float32))
    assert kernels.logits(np.eye(width, dtype=np.float32)[3:4]).tobytes() == together[3].tobytes()
    return together


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_comes_through_the_product(dtype: str):
    """All 65536 bit patterns of 16 bits, of F32 those and the others' edges; a sum of zeros is +0, so -0 becomes it."""
    every = np.arange(1 << 16)
    bits = every.astype(np.uint16) if dtype != "F32" else np.concatenate([every, every << 16, (every << 16) - 1])
    patterns = bits.astype(f"u{FLOATS[dtype].itemsize}").view(FLOATS[dtype])
    data, at = aligned_zeros((len(patterns), 16), FLOATS[dtype]), np.arange(len(patterns))
    data[at, at % 16] = patterns
    with np.errstate(invalid="ignore"):
        values, expected = columns(data, dtype, 16)[at % 16, at], patterns.astype(np.float32)
    number = ~np.isnan(expected)
    assert np.isnan(values[~number]).all()
    assert values[number].tobytes() == (expected[number] + 0.0).tobytes()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_quantised_weight_has_the_bits_that_gguf_gives_it(dtype: str):
    data, values = quantised(np.random.default_rng(5), 513, 256, dtype)
    assert columns(data, dtype, 256).T.tobytes() == (values + 0.0).tobytes()


# ---- functions ----


def probe(expression: str, x: np.ndarray) -> np.ndarray:
    """`expression` of the v16 `x` in kernels.c, on each element; the entry has to come first there."""
    numbers = {"ENTRY_BLOCK": 1, "EPS": "0.0f", "LAYER_NORM": 0, "GELU": 1}
    numbers |= dict.fromkeys(("DIM", "HEADS", "KV_HEADS", "HEAD_DIM", "FFN"), 16)
    numbers |= dict.fromkeys(("Q_T", "K_T", "V_T", "O_T", "GATE_T", "UP_T", "DOWN_T"), "f32")
    entry = f"""
        static inline v16 exp16(v16 x);
        static inline v16 gelu16(v16 x);
        void probe(float *p, long n) {{
            for (; n > 0; n -= 16, p += 16) {{ v16 x = *(f32x16 *)p; *(f32x16 *)p = {expression}; }}
        }}
        #ifdef ENTRY_READOUT"""
    source = "".join(f"#define {name} {value}\n" for name, value in numbers.items())
    source += SOURCE.read_text().replace("#ifdef ENTRY_READOUT", entry, 1)
    device = Device["CPU"]
    binary = device.compiler.compile_cached(source)
    program = device.runtime(TinyELF(binary, "probe", device.renderer.target, signature=()))
    y = x.astype(np.float32)
    program.fxn(ctypes.c_uint64(y.ctypes.data), ctypes.c_uint64(len(y)))
    return y


def test_exponentials_are_accurate():
    x = np.linspace(-86.0, 88.0, 1 << 16).astype(np.float32)
    x[:16], x[-1] = [-1e30, -np.inf, -87.0, *[0.0] * 13], 0.0
    y = probe("exp16(x)", x)
    assert y[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(y[16:], np.exp(x[16:].astype(np.float64)), rtol=4e-7)


def test_gelu_is_accurate():
    """To a part in a million, or 1e-7 where x is far below 0 and so its value next to nothing."""
    x = np.linspace(-12.0, 12.0, 1 << 16).astype(np.float32)
    x[:16] = [-1e30, 1e30, -1e10, 1e10, 0.0, -100.0, 100.0, *[1.0] * 9]
    y, wide = probe("gelu16(x)", x), x.astype(np.float64)
    expected = 0.5 * wide * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-7)


def test_no_size_is_an_obstacle():
    for case in CASES.values():
        assert obstacle(case.config) is None
    assert obstacle(replace(LLAMA, ffn="relu")) == "the feed-forward layer is relu"
