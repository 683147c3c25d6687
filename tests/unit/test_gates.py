"""The boot gates: kernels that are right pass, and one that is wrong in any way is replaced before it serves."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pptasks.errors import ProbeFailed
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import Span
from workers import blocks, gates, kernels, model, plain
from workers.model import Slice
from workers.weights import load

CONTEXT = MAX_ROWS = 64
SOURCE = kernels.SOURCE.read_text()
ONE_ROW = "*(f32x4 *)out = sum4(acc[0], acc[1], acc[2], acc[3])"
READ_FROM = "long from = (slots[r] * context"
BREAKS = {  # what each replaces in kernels.c
    "the scale of the norm": ("+ EPS)", "+ 2.0f * EPS)"),
    "one step of RoPE": ("b * cosine + a * sine", "b * cosine - a * sine"),
    "the scores' scale": ("1.0f / __builtin_sqrtf((float)HEAD_DIM)", "1.01f / __builtin_sqrtf((float)HEAD_DIM)"),
    "the window's first position": ("end > window ? end - window", "end > window ? end - window + 1"),
    "a polynomial of the exponential": ("0.0416666667f", "0.0516666667f"),
    "the residual": ("add(x, y, rows * DIM)", "add(x, x, rows * DIM)"),
    "positions from 12 on": ("long end = positions[r] + 1,", "long end = positions[r] < 12 ? positions[r] + 1 : 12,"),
    "positions from 50 on": ("long end = positions[r] + 1,", "long end = positions[r] < 50 ? positions[r] + 1 : 50,"),
    "rows behind the first panel": ("first < rows; first += PANEL", "first < 1; first += PANEL"),
    "a row of a tile of 5": ("*(f32x4 *)(out + n * n_out) =", "if (N != 5 || n != 3) *(f32x4 *)(out + n * n_out) ="),
    "a row of a tile of 4": ("*(f32x4 *)(out + n * n_out) =", "if (N != 4 || n != 3) *(f32x4 *)(out + n * n_out) ="),
    "one row": ("products(x, w + (o + k) * n_in, n_in)", "products(x, w + (o + 3 - k) * n_in, n_in)"),
    "a slot that is read": (READ_FROM, READ_FROM.replace("slots[r]", "(positions[r] > 10 ? 0 : slots[r])")),
    "another slot that is read": (READ_FROM, READ_FROM.replace("slots[r]", "(positions[r] > 10 ? 1 : slots[r])")),
    "a slot that is written": ("long at = (slots[r]", "long at = (0 * slots[r]"),
    "the last bits of one row": (ONE_ROW, f"{ONE_ROW} * 1.0000002f"),
}
GELU_BREAK = ("0.044715f", "0.044f")


def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """From here on the C kernels are compiled from a text in which `old` is `new`."""
    assert SOURCE.count(old) >= 1, f"{old!r} is not in kernels.c any more: change this test"
    path = tmp_path / "kernels.c"
    path.write_text(SOURCE.replace(old, new))
    monkeypatch.setattr(kernels, "SOURCE", path)
    monkeypatch.setattr(gates, "SOURCE", path)


def make(model: Model, lo: int = 0, hi: int | None = None, **changes: Any) -> Slice:
    hi = model.config.n_blocks if hi is None else hi
    settings: dict[str, Any] = {
        "embedding": lo == 0, "readout": hi == model.config.n_blocks, "n_slots": 2, "context": CONTEXT,
        "max_rows": MAX_ROWS, "kernels": "auto", "on_progress": lambda *_: None,
    }  # fmt: skip
    return Slice(model, Span(lo, hi), **{**settings, **changes})


@pytest.fixture
def llama(goldens: Path, tmp_path: Path) -> Model:
    return open_model(goldens / "llama-tied", tmp_path)


@pytest.mark.parametrize("what", BREAKS)
def test_a_kernel_that_is_wrong_is_switched_off(
    goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
):
    folder = goldens / ("mistral-window" if "window" in what else "llama-tied")
    broken(tmp_path, monkeypatch, *BREAKS[what])
    with caplog.at_level(logging.ERROR):
        slice_ = make(open_model(folder, tmp_path), 1, 2)
    assert (slice_.kernels_used, slice_.arithmetic) == ("tinygrad", "")
    assert re.match("block 1 of c (and the numpy reference differ at position|depends on how)", slice_.gate_failure)
    assert slice_.gate_failure in caplog.text


def test_a_window_that_no_row_reaches_the_end_of_is_tried_too(
    goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = open_model(goldens / "mistral-window", tmp_path)
    model = replace(model, config=replace(model.config, windows=(0, 100, 100, 100)))
    assert make(model, 1, 2).gate_failure == ""
    broken(tmp_path, monkeypatch, "first = window && end > window ? end - window : 0", "first = 0")
    failure = make(model, 1, 2).gate_failure
    assert failure.startswith("block 1 of c and the numpy reference differ, with a window of 5, at position 5")
    assert make(model, 0, 1).gate_failure == ""


def test_a_table_of_angles_that_is_wrong_from_some_position_on(
    llama: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    right = model.rope_table

    def shifted(*args: Any) -> np.ndarray:
        table = right(*args)
        return np.concatenate([table[:9], table[10:], table[-1:]])

    monkeypatch.setattr(model, "rope_table", shifted)
    with pytest.raises(ProbeFailed, match="block 1 of tinygrad and the numpy reference differ at position"):
        make(llama, 1, 2)
    assert "block 1 of c and the numpy reference differ at position" in caplog.text


def test_a_block_of_each_kind_is_compared(goldens: Path, tmp_path: Path):
    """A kernel, with a window or none, with which biases."""
    m = open_model(goldens / "qwen2-bias", tmp_path)
    weights = dict(load(m.stage_tensors(0, 6, embedding=False, readout=False), lambda *_: None))
    del weights["blk.3.attn_k.bias"]
    config = replace(m.config, windows=(0, 0, 8, 8, 4, 0))
    backend = kernels.CpuKernels(
        config, weights.items(), blocks=range(6), rope=model.rope_table(config, 8), context=8, n_slots=1, max_rows=8,
        traced=range(0),
    )  # fmt: skip
    assert backend.block_kinds() == [0, 2, 3]


def test_few_rows_are_compared_of_a_large_block(llama: Model, monkeypatch: pytest.MonkeyPatch):
    """In every number of rows all the same."""
    calls: list[tuple[int, int]] = []
    right = kernels.CpuKernels.run_block

    def run_block(self: Any, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        calls.append((len(x), int(positions.max())))
        return right(self, i, x, slots, positions)

    monkeypatch.setattr(kernels.CpuKernels, "run_block", run_block)
    monkeypatch.setattr(gates, "LARGE_BLOCK", 1000)
    assert make(llama, 1, 2).gate_failure == ""
    assert {rows for rows, _ in calls} == {1, 2, 3, 4, 5, 6, 2 * gates.FEW}
    assert max(last for _, last in calls) == gates.FEW - 1


def test_a_gelu_with_another_constant_is_switched_off(goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken(tmp_path, monkeypatch, *GELU_BREAK)
    assert make(open_model(goldens / "gpt2", tmp_path), 0, 1).gate_failure.startswith("block 0 of c and the numpy")


def test_what_is_switched_off_is_replaced(llama: Model, goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole model, audited where tinygrad can be; its answer is the golden one."""
    broken(tmp_path, monkeypatch, *BREAKS["the residual"])
    slice_ = make(llama, audit_rate=1.0)
    expected = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    ids = np.array(expected["prompt_ids"], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)
    logits = slice_.logits(slice_.forward(slice_.embed(ids, positions), 0 * positions, positions)[-1:])[0]
    np.testing.assert_allclose(logits, expected["logits_last"], atol=1e-3 * np.ptp(logits))
    assert slice_._audit is not None
    assert isinstance(slice_._backend, plain.PlainTinygrad)
    assert len(slice_._audit._traced) == 1
    assert slice_._audit._traced == slice_._backend._traced
    assert len({name.split(".")[1] for name in slice_._audit._samples if name.startswith("blk.")}) == 1
    assert slice_.arithmetic == ""


def test_a_read_out_that_is_wrong_is_switched_off(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken(tmp_path, monkeypatch, "linear(logits, scratch, w, 0,", "linear(logits + 1, scratch, w, 0,")
    n = llama.config.n_blocks
    assert make(llama, n, n).gate_failure.startswith("the read-out of c and the numpy reference differ at position 0")


@pytest.mark.parametrize("kernels", ["auto", "tinygrad"])
def test_a_wrong_tinygrad_is_told(
    llama: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: str
):
    """Alone, it is refused; beside C kernels that agree with numpy, it is they that are used."""
    right = blocks.NORMS["rms"]
    monkeypatch.setitem(blocks.NORMS, "rms", lambda x, w, name, eps: right(x, w, name, eps) * 1.001)
    monkeypatch.setattr(gates, "diskcache_get", lambda *_: None)
    if kernels == "tinygrad":
        with pytest.raises(ProbeFailed, match=r"^device CPU computes wrongly: block 1 of tinygrad and the numpy ref"):
            make(llama, 1, 2, kernels=kernels)
        return
    slice_ = make(llama, 1, 2, kernels=kernels)
    assert slice_.kernels_used == "c"
    assert slice_.gate_failure.startswith("block 1 of c and plain tinygrad differ at position 0")
    assert "tinygrad's own kernels are wrong on this machine" in caplog.text


def test_what_agreed_with_tinygrad_is_remembered_for_that_kernel_alone(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[range] = []

    class Counted(plain.PlainTinygrad):
        def __init__(self, *args: Any, **kwargs: Any):
            made.append(kwargs["blocks"])
            super().__init__(*args, **kwargs)

    store: dict[str, bool] = {}
    monkeypatch.setattr(gates, "PlainTinygrad", Counted)
    monkeypatch.setattr(gates, "diskcache_get", lambda _, key: store.get(key))
    monkeypatch.setattr(gates, "diskcache_put", lambda _, key, value: store.update({key: value}))
    for _ in range(2):
        assert make(llama, 1, 2).gate_failure == ""
    assert made == [range(1, 2)]
    broken(tmp_path, monkeypatch, "/* The CPU kernels", "/* The changed CPU kernels")
    assert make(llama, 1, 2).gate_failure == ""
    assert made == [range(1, 2)] * 2


def test_the_numpy_comparison_is_never_left_out(llama: Model, monkeypatch: pytest.MonkeyPatch):
    assert make(llama, 1, 2).kernels_used == "c"
    right = kernels.CpuKernels.run_block
    monkeypatch.setattr(kernels.CpuKernels, "run_block", lambda self, *args: right(self, *args) * np.float32(1.001))
    assert make(llama, 1, 2).kernels_used == "tinygrad"


def test_one_value_of_one_row_is_enough(llama: Model, monkeypatch: pytest.MonkeyPatch):
    right = kernels.CpuKernels.run_block

    def run_block(self: Any, i: int, x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        y = right(self, i, x, slots, positions)
        if len(x) == 1:  # a step of one row, which other code computes
            y[0, -1] += np.float32(1e-3) * y.std()
        return y

    monkeypatch.setattr(kernels.CpuKernels, "run_block", run_block)
    assert f"position 0, channel {llama.config.dim - 1}: " in make(llama, 1, 2).gate_failure


@pytest.mark.parametrize(("context", "max_rows"), [(1, 1), (4, 2), (CONTEXT, 3)])
def test_a_small_stage_is_compared_too(llama: Model, context: int, max_rows: int):
    for kind in ("auto", "tinygrad"):
        assert make(llama, context=context, max_rows=max_rows, kernels=kind).gate_failure == ""


def test_a_stage_without_blocks_has_nothing_to_compare(llama: Model):
    assert make(llama, 0, 0).gate_failure == ""


def test_arithmetic_tells_the_kernels_text(llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = make(llama, 1, 2).arithmetic
    assert ours == make(replace(llama, name="again"), 2, 3).arithmetic
    assert ours.startswith("c ")
    broken(tmp_path, monkeypatch, "/* The CPU kernels", "/* The changed CPU kernels")
    assert model.c_arithmetic() != ours
