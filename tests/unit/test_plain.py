"""The tinygrad path by itself: the goldens of every family, the steps it tells, portions, quantised weights."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tinygrad import Tensor

from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, ModelConfig, Rope
from pptasks.models import open_model
from workers.plain import CPU_ROWS, OnDevice, PlainTinygrad
from workers.reference import block as reference_block
from workers.reference import rope_angles
from workers.trace import Trace
from workers.weights import QUANTISED, Weight, load

GOLDENS = ["gpt2", "llama-odd", "llama-untied-sharded-bf16", "mistral-window", "qwen2-bias", "qwen3-tied"]
CONTEXT, SLOT, TRACED = 64, 1, 1
RNG = np.random.default_rng(3)


def make(config: ModelConfig, weights: dict[str, Weight], blocks: range, **changes: Any) -> PlainTinygrad:
    rope = None
    if config.rope:
        angles = rope_angles(config.rope, config.head_dim, range(CONTEXT))
        rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    settings = {"context": CONTEXT, "n_slots": 2, "max_rows": 64, "traced": range(TRACED, TRACED + 1), **changes}
    return PlainTinygrad(config, weights.items(), blocks=blocks, rope=rope, **settings)


@dataclass(frozen=True)
class Golden:
    config: ModelConfig
    weights: dict[str, Weight]
    expected: dict[str, Any]
    backend: PlainTinygrad

    def run(self, x: np.ndarray, *, trace: int | None = None) -> np.ndarray:
        positions = np.arange(len(x), dtype=np.int32)
        return self.backend.forward(x, np.full(len(x), SLOT, np.int32), positions, trace=trace)


@pytest.fixture(scope="module", params=GOLDENS)
def golden(request: pytest.FixtureRequest, goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    model = open_model(goldens / request.param, tmp_path_factory.mktemp("cache"))
    c = model.config
    refs = model.stage_tensors(0, c.n_blocks, embedding=True, readout=True)
    weights = dict(load(refs, lambda *_: None))
    expected = json.loads((model.path / "expected.json").read_text())
    return Golden(c, weights, expected, make(c, weights, range(c.n_blocks)))


def test_goldens_and_the_steps_of_a_block(golden: Golden):
    ids = np.array(golden.expected["prompt_ids"], np.int32)
    x = golden.backend.embed(ids, np.arange(len(ids), dtype=np.int32))
    y = golden.run(x, trace=TRACED)
    logits, expected = golden.backend.logits(y[-2:])[1], np.array(golden.expected["logits_last"])
    assert np.abs(logits - expected).max() <= 2e-3 * (expected.max() - expected.min())
    assert logits.argmax() == golden.expected["greedy_ids"][0]
    assert golden.backend.trace is not None
    check_steps(golden, golden.backend.trace)


def check_steps(golden: Golden, t: Trace) -> None:
    """Every step is what the formulas make of those before it."""
    c, name = golden.config, f"blk.{TRACED}."
    w = {name: weight.data.astype(np.float64) for name, weight in golden.weights.items()}

    def linear(x: np.ndarray, layer: str) -> np.ndarray:
        return x @ w[f"{name}{layer}.weight"].T + w.get(f"{name}{layer}.bias", 0.0)

    assert t.block == TRACED
    np.testing.assert_allclose(t.y, reference_block(c, TRACED, w, t.x), atol=1e-4)
    np.testing.assert_allclose(t.o, attention(c, t), atol=1e-5)
    up = linear(t.h, "ffn_up")
    if c.ffn == "swiglu":
        gate = linear(t.h, "ffn_gate")
        a = gate / (1 + np.exp(-gate)) * up
    else:
        a = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    np.testing.assert_allclose(t.a, a, atol=1e-4)
    np.testing.assert_allclose(t.y, t.x + linear(t.o, "attn_output") + linear(t.a, "ffn_down"), atol=1e-4)


def attention(c: ModelConfig, t: Trace) -> np.ndarray:
    """All rows are of one sequence, from position 0 on."""
    n, (q, k, v) = len(t.x), (a.reshape(len(t.x), -1, c.head_dim) for a in (t.q, t.k, t.v))
    k, v = (np.repeat(a, c.n_heads // c.n_kv_heads, axis=1) for a in (k, v))
    scores = np.einsum("rhd,phd->hrp", q, k) / np.sqrt(c.head_dim)
    age = np.arange(n)[:, None] - np.arange(n)
    scores[:, (age < 0) | (age >= (c.windows[TRACED] or n))] = -np.inf
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hrp,phd->rhd", odds / odds.sum(-1, keepdims=True), v).reshape(n, -1)


CONFIG = ModelConfig(
    architecture="llama", n_blocks=2, dim=256, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=512, vocab_size=40,
    context=CONTEXT, norm="rms", norm_eps=1e-5, ffn="swiglu", rope=Rope(10000.0), windows=(0, 5), tied=False,
)  # fmt: skip
SHAPES = {
    "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
    "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
}  # fmt: skip


def quantised(dtype: str, shape: tuple[int, int]) -> Weight:
    """Any bytes, but each block's float16 scales small."""
    kind = gguf.GGMLQuantizationType[dtype]
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = RNG.integers(0, 256, (shape[0] * shape[1] // per_block, nbytes), np.uint8)
    scales = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(dtype, 1)
    first = nbytes - 2 if dtype == "Q6_K" else 0
    values = RNG.uniform(-1e-3, 1e-3, (len(blocks), scales)).astype(np.float16)
    blocks[:, first : first + 2 * scales] = values.view(np.uint8)
    return Weight(blocks.reshape(shape[0], -1), dtype, shape)


def floats(weight: Weight) -> Weight:
    return Weight(weight.rows(np.arange(weight.shape[0])), "F32", weight.shape)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_bytes_are_widened_to_what_gguf_says(dtype: str):
    weight = quantised(dtype, (6, 512))
    on_device = OnDevice(Tensor(weight.data).realize(), dtype, weight.shape)
    whole, index = weight.rows(np.arange(6)), np.array([5, 0, 5], np.int32)
    assert np.abs(whole).max() > 1e-3
    np.testing.assert_allclose(on_device.values().numpy(), whole, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(on_device.rows(Tensor(index)).numpy(), whole[index], rtol=1e-6, atol=1e-9)


def mixed_weights() -> dict[str, Weight]:
    """Two blocks with all the quantised types, the embedding and the head included."""
    types = iter(QUANTISED * 3)
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    shapes |= {EMBEDDING: (40, 256), OUTPUT: (40, 256)}
    norms = [f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn")]
    ones = {name: Weight(np.ones(256, np.float32), "F32", (256,)) for name in (*norms, OUTPUT_NORM)}
    return {name: quantised(next(types), shape) for name, shape in shapes.items()} | ones


@pytest.fixture(scope="module")
def mixed() -> tuple[PlainTinygrad, PlainTinygrad]:
    """The same model with quantised weights and with their values as float32. Its second block has a window."""
    weights = mixed_weights()
    wide = {name: floats(weight) if weight.dtype in QUANTISED else weight for name, weight in weights.items()}
    return tuple(make(CONFIG, w, range(2), traced=range(1)) for w in (weights, wide))  # type: ignore[return-value]


def test_a_quantised_model_is_the_model_of_its_values(mixed: tuple[PlainTinygrad, PlainTinygrad]):
    ids, positions, slots = np.arange(12, dtype=np.int32), np.arange(12, dtype=np.int32), np.zeros(12, np.int32)
    results = []
    for backend in mixed:
        x = backend.embed(ids, positions) * 100
        y = backend.forward(x, slots, positions)
        results.append((x, y, backend.logits(y)))
    for quantised_result, wide_result in zip(*results, strict=True):
        scale = np.abs(wide_result).max()
        assert scale > 1e-3
        assert np.abs(quantised_result - wide_result).max() < 1e-5 * scale


def test_rows_in_any_order_and_number_are_those_of_one_by_one(mixed: tuple[PlainTinygrad, PlainTinygrad]):
    """Two sequences, mixed and backwards, in more rows than one call on the device takes."""
    backend, rows = mixed[1], CPU_ROWS + 5
    x = RNG.standard_normal((rows, CONFIG.dim)).astype(np.float32)
    slots, positions = np.arange(rows, dtype=np.int32) % 2, np.arange(rows, dtype=np.int32) // 2
    single = [backend.forward(x[r : r + 1], slots[r : r + 1], positions[r : r + 1])[0] for r in range(rows)]
    backwards = slice(None, None, -1)
    together = backend.forward(x[backwards], 1 - slots[backwards], positions[backwards])[backwards]
    np.testing.assert_allclose(together, np.stack(single), atol=1e-5)


def test_a_replay_tells_the_steps_of_its_own_call(mixed: tuple[PlainTinygrad, PlainTinygrad]):
    """Here the traced block's input is the caller's; the first calls record."""
    backend, positions, slots = mixed[1], np.arange(CPU_ROWS, dtype=np.int32), np.zeros(CPU_ROWS, np.int32)
    for call in range(5):
        x = RNG.standard_normal((CPU_ROWS, CONFIG.dim)).astype(np.float32)
        y = backend.forward(x, slots, positions, trace=0)
        trace = backend.trace
        assert trace is not None
        assert np.array_equal(trace.x, x), call
        first = backend.run_block(0, x, slots, positions)
        np.testing.assert_allclose(trace.y, first, atol=1e-3)  # of values up to 20
        np.testing.assert_allclose(backend.run_block(1, first, slots, positions), y, atol=1e-3)
    backend.forward(x[::-1].copy(), slots, positions)
    assert backend.trace is trace
    assert np.array_equal(trace.x, x)


def test_warm_reports_its_progress_and_runs_what_is_there(mixed: tuple[PlainTinygrad, PlainTinygrad]):
    seen: list[tuple[str, int, int]] = []
    mixed[1].warm(lambda *at: seen.append(at))
    assert seen == [("compile", 0, 2), ("compile", 1, 2), ("compile", 2, 2)]


def test_a_span_without_blocks_returns_its_rows():
    backend = make(replace(CONFIG, n_blocks=0, windows=()), {}, range(0), traced=range(0))
    x = np.ones((2, CONFIG.dim), np.float32)
    y = backend.forward(x, np.zeros(2, np.int32), np.zeros(2, np.int32))
    assert np.array_equal(y, x)
    assert y is not x
