"""The running audit: silent on every family whatever row it looks at, and loud, by name, when a product is wrong."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from pptasks.errors import AuditFailed
from pptasks.modelinfo import ROPE_FACTORS, Model
from pptasks.models import open_model
from pptasks.plan import Span
from workers.audit import Audit
from workers.kernels import CpuKernels
from workers.model import Slice, rope_table
from workers.plain import PlainTinygrad
from workers.trace import Trace
from workers.weights import Weight, aligned_zeros, load

GOLDENS = sorted(p.name for p in (Path(__file__).parents[1] / "goldens").iterdir() if p.is_dir())
DIFFERENT = ["llama-tied", "qwen2-bias", "qwen3-tied", "gpt2-untied-bf16", "mistral-window"]
ROUNDS, SLOT = 20, 1


@dataclass(frozen=True)
class Rig:
    """A whole model on one backend, with an audit, and the very memory of its weights."""

    model: Model
    backend: CpuKernels | PlainTinygrad
    audit: Audit
    weights: dict[str, Weight]
    prompt: list[int]

    def embed(self, ids: list[int], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, slots and positions of consecutive tokens."""
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        return self.backend.embed(np.array(ids, np.int32), positions), np.full(len(ids), SLOT, np.int32), positions

    def trace(self, i: int, ids: list[int], first: int = 0) -> tuple[Trace, np.ndarray, np.ndarray]:
        return self.trace_of(i, *self.embed(ids, first))

    def trace_of(
        self, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[Trace, np.ndarray, np.ndarray]:
        self.backend.forward(x, slots, positions, trace=i)
        self.audit.wrote(slots, positions)
        assert self.backend.trace is not None
        return self.backend.trace, slots, positions

    def check(self, trace: Trace, slots: np.ndarray, positions: np.ndarray) -> None:
        self.audit.check_block(trace, slots, positions, self.backend.cached)


TRACED = 1  # by tinygrad


def make(
    folder: Path, cache: Path, seed: int = 0, dtype: str = "", backend: type[CpuKernels | PlainTinygrad] = CpuKernels
) -> Rig:
    """dtype: the type of the block format that its matrices are brought into."""
    model = open_model(folder, cache)
    c = model.config
    refs = {ref.name: ref for ref in model.stage_tensors(0, c.n_blocks, embedding=True, readout=True)}
    factors = next(load([refs.pop(ROPE_FACTORS)], lambda *_: None))[1].data if ROPE_FACTORS in refs else None
    blocks = range(c.n_blocks)
    audit = Audit(c, 1.0, np.random.default_rng(seed), traced=blocks, names=refs.keys(), factors=factors)
    weights = {name: quantised(w, dtype) for name, w in load(list(refs.values()), lambda *_: None)}
    for name, weight in weights.items():
        audit.see(name, weight)
    prompt = json.loads((folder / "expected.json").read_text())["prompt_ids"]
    context = len(prompt) + ROUNDS
    made = backend(
        c, weights.items(), blocks=blocks, rope=rope_table(c, context, factors), context=context, n_slots=2,
        max_rows=len(prompt), traced=range(TRACED, TRACED + 1),
    )  # fmt: skip
    return Rig(model, made, audit, weights, prompt)


def quantised(weight: Weight, dtype: str) -> Weight:
    if not dtype or len(weight.shape) == 1:
        return weight
    rows = gguf.quants.quantize(weight.data.astype(np.float32), gguf.GGMLQuantizationType[dtype])
    data = aligned_zeros(rows.shape, rows.dtype)
    data[:] = rows
    return Weight(data, dtype, weight.shape)


QUANTISED = [("llama-wide-bf16", dtype) for dtype in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "") for name in GOLDENS), *QUANTISED])
def test_no_false_alarm(goldens: Path, tmp_path: Path, name: str, dtype: str):
    for seed in range(3):
        rig = make(goldens / name, tmp_path, seed, dtype)
        stays_silent(rig, range(rig.model.config.n_blocks))


@pytest.mark.parametrize("name", ["gpt2", "llama-bias"])
def test_no_false_alarm_on_tinygrad(goldens: Path, tmp_path: Path, name: str):
    stays_silent(make(goldens / name, tmp_path, backend=PlainTinygrad), range(TRACED, TRACED + 1))


def stays_silent(rig: Rig, blocks: range) -> None:
    """In a prompt and in single steps after it, at rows and channels of many choices."""
    for i in blocks:
        for ids, first in [(rig.prompt, 0), (rig.prompt[:1], len(rig.prompt)), ([3, 4], len(rig.prompt) + 1)]:
            trace, slots, positions = rig.trace(i, ids, first)
            for _ in range(ROUNDS):
                rig.check(trace, slots, positions)
    logits = rig.backend.logits(trace.y)
    for _ in range(ROUNDS):
        rig.audit.check_logits(trace.y, logits)


BACKENDS = pytest.mark.parametrize("backend", [CpuKernels, PlainTinygrad])


@BACKENDS
@pytest.mark.parametrize("name", ["gpt2", "llama-bias"])
def test_no_false_alarm_at_large_values(
    goldens: Path, tmp_path: Path, name: str, backend: type[CpuKernels | PlainTinygrad]
):
    """Residuals far above what a block adds, and rows of nearly constant values, where a LayerNorm cancels. What is
    really wrong still rings."""
    rig = make(goldens / name, tmp_path, backend=backend)
    noise = np.random.default_rng(0).standard_normal((len(rig.prompt), rig.model.config.dim))
    _, slots, positions = rig.embed(rig.prompt, 0)
    for values in (6000 + noise, 1e4 * noise, 100 + 0.01 * noise, 1e4 + 0 * noise, 300 * noise + 1e4):
        trace, *where = rig.trace_of(TRACED, values.astype(np.float32), slots, positions)
        for _ in range(3 * ROUNDS):
            rig.check(trace, *where)
        with pytest.raises(AuditFailed, match="product ffn_down"):
            rig.check(replace(trace, y=trace.y + np.float32(2e-5) * np.abs(values).max() + np.float32(0.01)), *where)


@BACKENDS
def test_a_slot_that_is_mixed_up_is_found_in_decode(
    goldens: Path, tmp_path: Path, backend: type[CpuKernels | PlainTinygrad]
):
    """No row of the prompt is in the call any more: the attention is computed from the cache."""
    rig = make(goldens / "llama-tied", tmp_path, backend=backend)
    rig.trace(TRACED, rig.prompt)
    x, slots, positions = rig.embed(rig.prompt[::-1], 0)
    rig.trace_of(TRACED, x, 0 * slots, positions)
    trace, slots, positions = rig.trace(TRACED, [5], len(rig.prompt))
    rig.check(trace, slots, positions)
    wrong, *_ = rig.trace_of(TRACED, trace.x, 0 * slots, positions)  # the same row, read from and written to slot 0
    rig.trace(TRACED, [5], len(rig.prompt))
    with pytest.raises(AuditFailed, match=r"block 1, product attention, row \d+ \(position \d+\): got"):
        rig.check(replace(trace, o=wrong.o), slots, positions)


def test_a_row_that_is_written_elsewhere_is_found(goldens: Path, tmp_path: Path):
    rig = make(goldens / "llama-tied", tmp_path)
    trace, slots, positions = rig.trace(TRACED, rig.prompt)
    with pytest.raises(AuditFailed, match="product attn_k"):
        rig.check(trace, 0 * slots, positions)


def test_another_window_is_found_in_decode(goldens: Path, tmp_path: Path):
    rig = make(goldens / "mistral-window", tmp_path)
    backend = rig.backend
    assert isinstance(backend, CpuKernels)
    rig.trace(TRACED, rig.prompt)
    for window, found in ((rig.model.config.windows[TRACED] - 1, True), (0, True), (None, False)):
        x, slots, positions = rig.embed([5], len(rig.prompt))
        backend.run_block(TRACED, x, slots, positions, window=window)
        trace = backend._trace_of(TRACED, x, backend.run_block(TRACED, x, slots, positions, window=window))
        if found:
            with pytest.raises(AuditFailed, match="product attention"):
                rig.check(trace, slots, positions)
        else:
            rig.check(trace, slots, positions)


@BACKENDS
def test_a_cache_that_changes_between_two_steps_is_found(
    goldens: Path, tmp_path: Path, backend: type[CpuKernels | PlainTinygrad]
):
    rig = make(goldens / "llama-tied", tmp_path, backend=backend)
    rig.check(*rig.trace(TRACED, rig.prompt))
    rig.check(*rig.trace(TRACED, [5], len(rig.prompt)))
    keys = rig.backend._cache[TRACED][0]
    if isinstance(keys, np.ndarray):
        keys *= np.float32(1.01)
    else:
        keys.assign(keys * 1.01).realize()
    step = rig.trace(TRACED, [5], len(rig.prompt) + 1)
    with pytest.raises(AuditFailed, match=rf"^audit: block 1, KV cache, position {len(rig.prompt)} of slot 1: "):
        rig.check(*step)


def test_a_place_of_the_cache_that_is_written_again_is_no_alarm(goldens: Path, tmp_path: Path):
    rig = make(goldens / "llama-tied", tmp_path)
    rig.check(*rig.trace(TRACED, [5]))
    rig.check(*rig.trace(TRACED, [6]))


@pytest.fixture(params=DIFFERENT)
def rig(request: pytest.FixtureRequest, goldens: Path, tmp_path: Path) -> Rig:
    return make(goldens / request.param, tmp_path)


FIELDS = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attention", "h": "ffn_(norm|up)", "a": "ffn_up", "y": "ffn_down",
}  # fmt: skip


@pytest.mark.parametrize(("field", "product"), FIELDS.items())
def test_a_product_that_is_off_by_a_hundredth_is_named(rig: Rig, field: str, product: str):
    trace, slots, positions = rig.trace(1, rig.prompt)
    values = getattr(trace, field)
    off = replace(trace, **{field: values + np.float32(0.01) * np.sqrt(np.mean(values**2))})
    for _ in range(ROUNDS):
        with pytest.raises(AuditFailed, match=rf"^audit: block 1, product {product}, row \d+ \(position \d+\): got "):
            rig.check(off, slots, positions)
        rig.check(trace, slots, positions)


def test_logits_that_are_off_by_a_hundredth_are_named(rig: Rig):
    x = rig.trace(0, rig.prompt)[0].y
    logits = rig.backend.logits(x)
    with pytest.raises(
        AuditFailed, match=r"^audit: product (output|token_embd), row \d+ \(row \d+ of the call\): got "
    ):
        rig.audit.check_logits(x, logits + np.float32(0.01) * logits.std())


def test_a_nan_is_no_value_within_a_tolerance(rig: Rig):
    trace, slots, positions = rig.trace(0, rig.prompt)
    with pytest.raises(AuditFailed, match="product ffn_down"):
        rig.check(replace(trace, y=trace.y * np.float32(np.nan)), slots, positions)


FOUND_AT = {
    "attn_norm": "attn_q", "attn_q_norm": "attn_q", "attn_k_norm": "attn_k", "attn_output": "ffn_(norm|down)",
    "ffn_gate": "ffn_up",
}  # fmt: skip


def test_weights_that_change_in_memory_after_the_load_are_found(rig: Rig):
    """Each tensor of a block in turn: the audit's rows are copies. A step at a late position: nothing is at zero."""
    rig.trace(1, rig.prompt)
    step = [5], len(rig.prompt)
    for name in [name for name in rig.weights if name.startswith("blk.1.")]:
        layer, data = name.split(".")[2], rig.weights[name].data
        before = data.copy()
        factors = np.linspace(1.02, 1.2, len(data)).reshape(-1, *[1] * (data.ndim - 1))
        data[...] = (before.astype(np.float32) * factors + 0.02).astype(data.dtype)
        with pytest.raises(AuditFailed, match=f"block 1, product {FOUND_AT.get(layer, layer)}, row"):
            rig.check(*rig.trace(1, *step))
        data[...] = before
        rig.check(*rig.trace(1, *step))


def test_a_rotation_by_another_position_is_found(goldens: Path, tmp_path: Path):
    rig = make(goldens / "llama-tied", tmp_path)
    trace, slots, positions = rig.trace(0, rig.prompt)
    with pytest.raises(AuditFailed, match="product attn_q"):
        rig.check(trace, slots, positions + 1)


def slice_of(folder: Path, cache: Path, rate: float) -> Slice:
    return Slice(
        open_model(folder, cache), Span(0, 2), embedding=True, readout=True, n_slots=1, context=32, max_rows=4,
        kernels="auto", audit_rate=rate, on_progress=lambda *_: None,
    )  # fmt: skip


def step(slice_: Slice, position: int) -> np.ndarray:
    where = np.array([position], np.int32)
    return slice_.logits(slice_.forward(slice_.embed(where, where), np.zeros(1, np.int32), where))


@pytest.mark.parametrize("part", ["forward", "logits"])
def test_a_slice_that_is_audited_does_not_give_a_wrong_result(
    goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
):
    audited, trusted = (slice_of(goldens / "llama-tied", tmp_path, rate) for rate in (1.0, 0.0))
    assert step(audited, 0).tobytes() == step(trusted, 0).tobytes()
    if part == "logits":
        right = CpuKernels.logits
        monkeypatch.setattr(CpuKernels, "logits", lambda self, x: right(self, x) + np.float32(0.1))
    else:
        computed = CpuKernels.forward

        def forward(self: CpuKernels, *args: np.ndarray, trace: int | None = None) -> np.ndarray:
            out = computed(self, *args, trace=trace)
            if self.trace is not None:
                self.trace = replace(self.trace, y=self.trace.y + np.float32(0.1))
            return out

        monkeypatch.setattr(CpuKernels, "forward", forward)
    with pytest.raises(AuditFailed, match=r"product (ffn_down|token_embd), row"):
        step(audited, 1)
    step(trusted, 1)


def test_the_rate_is_the_share_of_calls(goldens: Path, tmp_path: Path):
    config = open_model(goldens / "llama-tied", tmp_path).config
    audit, none = (
        Audit(config, 0.1, np.random.default_rng(0), traced=traced, names=()) for traced in (range(3, 6), range(0))
    )
    assert 900 < sum(audit.due() for _ in range(10_000)) < 1100
    assert none.choose() is None
    assert {audit.choose() for _ in range(100)} == {3, 4, 5}
