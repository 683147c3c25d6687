"""Slices of whole models: the goldens by both paths, a split is the whole, and mistakes that must not go unnoticed."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pptasks.modelinfo import Model, Rope
from pptasks.models import open_model
from pptasks.plan import Span
from workers import plain
from workers.model import Slice, rope_table
from workers.reference import rope_angles

FAMILIES = sorted(p.name for p in (Path(__file__).parents[1] / "goldens").iterdir() if p.is_dir())
LLAMAS = ["llama-tied", "llama-untied-sharded-bf16"]
CONTEXT, MAX_ROWS, SLOT = 64, 16, 1
PARAMETERS = 134_515_008 + 49_152 * 576  # of SmolLM2, whose tied matrix is here on the first stage and on the last


@dataclass(frozen=True)
class Golden:
    model: Model
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=LLAMAS)
def golden(request: pytest.FixtureRequest, goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder = goldens / request.param
    expected = json.loads((folder / "expected.json").read_text())
    return Golden(open_model(folder, tmp_path_factory.mktemp("cache")), expected)


def make(model: Model, lo: int, hi: int, **changes: Any) -> Slice:
    """A slice of blocks [lo, hi), by default with the embedding and the read-out where they begin and end the model."""
    settings: dict[str, Any] = {
        "embedding": lo == 0, "readout": hi == model.config.n_blocks, "n_slots": 3, "context": CONTEXT,
        "max_rows": MAX_ROWS, "kernels": "auto", "on_progress": lambda *_: None,
    }  # fmt: skip
    return Slice(model, Span(lo, hi), **{**settings, **changes})


def run(slices: list[Slice], ids: list[int], first: int = 0) -> np.ndarray:
    """Logits (len(ids), V) of consecutive positions from `first` on, through a chain of slices."""
    positions = np.arange(first, first + len(ids), dtype=np.int32)
    x = slices[0].embed(np.array(ids, np.int32), positions)
    for slice_ in slices:
        x = slice_.forward(x, np.full(len(ids), SLOT, np.int32), positions)
    return slices[-1].logits(x)


def greedy(slices: list[Slice], prompt: list[int], n: int) -> tuple[np.ndarray, list[int]]:
    """Logits after the prompt, and the ids that follow."""
    after_prompt = [run(slices, prompt[i : i + MAX_ROWS], i) for i in range(0, len(prompt), MAX_ROWS)][-1][-1]
    ids = [int(after_prompt.argmax())]
    while len(ids) < n:
        ids.append(int(run(slices, ids[-1:], len(prompt) + len(ids) - 1)[0].argmax()))
    return after_prompt, ids


def check_golden(folder: Path, cache: Path, **changes: Any) -> Slice:
    """The whole model in one slice, every call audited: the golden tokens, and logits close to the golden ones."""
    model, golden = open_model(folder, cache), json.loads((folder / "expected.json").read_text())
    n = len(golden["prompt_ids"]) + len(golden["greedy_ids"])
    whole = make(model, 0, model.config.n_blocks, context=n, audit_rate=1.0, **changes)
    logits, ids = greedy([whole], golden["prompt_ids"], len(golden["greedy_ids"]))
    expected = np.array(golden["logits_last"])
    assert ids == golden["greedy_ids"]
    assert np.abs(logits - expected).max() <= 2e-3 * (expected.max() - expected.min())
    assert whole.gate_failure == ""
    return whole


@pytest.mark.parametrize("name", FAMILIES)
def test_goldens(goldens: Path, tmp_path: Path, name: str):
    assert check_golden(goldens / name, tmp_path).kernels_used == "c"


@pytest.mark.parametrize("name", ["llama-tied"])
def test_goldens_by_tinygrad(goldens: Path, tmp_path: Path, name: str):
    assert check_golden(goldens / name, tmp_path, kernels="tinygrad").kernels_used == "tinygrad"


@pytest.mark.parametrize("cuts", [(3,), (1, 2), (0, 4), (1, 2, 3, 4, 5)])
def test_a_split_is_the_whole_bit_for_bit(golden: Golden, cuts: tuple[int, ...]):
    n, prompt = golden.model.config.n_blocks, golden.expected["prompt_ids"]
    edges = [0, *cuts, n]
    parts = [make(golden.model, lo, hi) for lo, hi in pairwise(edges)]
    whole = [make(golden.model, 0, n)]
    for first, ids in [(0, prompt), (len(prompt), [7]), (len(prompt) + 1, [8, 9])]:
        assert run(parts, ids, first).tobytes() == run(whole, ids, first).tobytes()


def test_a_slice_holds_its_own_tensors_and_no_others(golden: Golden):
    c, n = golden.model.config, golden.model.config.n_blocks
    matrix = c.vocab_size * c.dim * (2 if "bf16" in golden.model.name else 4)
    whole, middle = make(golden.model, 0, n), make(golden.model, 2, 4)
    blocks = make(golden.model, 0, n, embedding=False, readout=False)
    norm = c.dim * 4
    assert whole.weights_bytes == blocks.weights_bytes + norm + matrix * (1 if c.tied else 2)
    assert middle.weights_bytes * n == blocks.weights_bytes * 2
    assert make(golden.model, 0, 0).weights_bytes == matrix


@pytest.mark.parametrize("mistake", ["a dropped block", "two stages swapped", "positions off by one", "slots mixed up"])
def test_mistakes_are_visible(golden: Golden, mistake: str):
    n, prompt = golden.model.config.n_blocks, golden.expected["prompt_ids"]
    wrong = {"a dropped block": [(0, 2), (3, n)], "two stages swapped": [(0, 2), (4, n), (2, 4)]}
    bounds = wrong.get(mistake, [(0, 3), (3, n)])
    chain = [make(golden.model, lo, hi, embedding=True, readout=True) for lo, hi in bounds]
    slots, positions = np.full(len(prompt), SLOT, np.int32), np.arange(len(prompt), dtype=np.int32)
    x = chain[0].embed(np.array(prompt, np.int32), positions)
    if mistake == "positions off by one":
        positions[-1] += 1
    if mistake == "slots mixed up":
        slots[-1] += 1
    for slice_ in chain:
        x = slice_.forward(x, slots, positions)
    expected = np.array(golden.expected["logits_last"])
    assert np.abs(chain[-1].logits(x[-1:])[0] - expected).max() > 2e-2 * (expected.max() - expected.min())


def test_the_plain_path_takes_any_rows_up_to_its_largest(golden: Golden):
    """Padding rows go to a slot of their own."""
    plain, ours = make(golden.model, 1, 2, kernels="tinygrad", max_rows=3), make(golden.model, 1, 2, max_rows=3)
    x = np.random.default_rng(0).standard_normal((3, plain.dim)).astype(np.float32)
    for rows in (2, 3, 1):
        slots, positions = np.array([2, 2, 0], np.int32)[:rows], np.array([0, 1, 0], np.int32)[:rows]
        y = ours.forward(x[:rows], slots, positions)
        np.testing.assert_allclose(plain.forward(x[:rows], slots, positions), y, atol=1e-4)


@pytest.fixture(scope="module", params=["auto", "tinygrad"])
def two_blocks(request: pytest.FixtureRequest, goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """Every call audited: also what a copy wrote over is known to have changed."""
    model = open_model(goldens / "llama-tied", tmp_path_factory.mktemp("cache"))
    return make(model, 1, 3, n_slots=4, max_rows=8, audit_rate=1.0, kernels=request.param)


def in_slot(slice_: Slice, slot: int, x: np.ndarray, first: int = 0) -> bytes:
    positions = np.arange(first, first + len(x), dtype=np.int32)
    return slice_.forward(x, np.full(len(x), slot, np.int32), positions).tobytes()


@pytest.mark.parametrize("n", [1, 5, 7])
def test_a_copy_is_what_computing_gives_bit_for_bit(two_blocks: Slice, n: int):
    """Positions of slot 0 go on in slot 3, over what was there, as all of them do in slot 2."""
    x, other = np.random.default_rng(n).standard_normal((2, 8, two_blocks.dim)).astype(np.float32)
    before = in_slot(two_blocks, 2, x[:n]), in_slot(two_blocks, 0, x[:n])
    assert before[0] == before[1]
    expected = [in_slot(two_blocks, 2, x[n:], n), in_slot(two_blocks, 2, other[:1], 8)]
    in_slot(two_blocks, 0, other[n:], n)  # the source goes on with something else
    in_slot(two_blocks, 3, other[: max(1, n - 1)])
    two_blocks.copy(0, 3, n)
    assert [in_slot(two_blocks, 3, x[n:], n), in_slot(two_blocks, 3, other[:1], 8)] == expected


def test_a_copy_leaves_all_but_its_positions_alone(two_blocks: Slice):
    """Of the source, of the slots beside, and of the slot that it goes to."""
    x, y, z = np.random.default_rng(9).standard_normal((3, 8, two_blocks.dim)).astype(np.float32)
    for slot, rows in enumerate((x, y, z, y)):
        in_slot(two_blocks, slot, rows)
    held = {slot: cache_of(two_blocks, slot, 8) for slot in range(4)}
    two_blocks.copy(1, 2, 3)
    assert all(cache_of(two_blocks, slot, 8) == held[slot] for slot in (0, 1, 3))
    assert cache_of(two_blocks, 2, 8) == [
        copied[: len(own) * 3 // 8] + own[len(own) * 3 // 8 :] for copied, own in zip(held[1], held[2], strict=True)
    ]
    two_blocks.copy(2, 1, 8)  # and back
    assert cache_of(two_blocks, 1, 8) == cache_of(two_blocks, 2, 8)


def cache_of(slice_: Slice, slot: int, n: int) -> list[bytes]:
    """The first `n` positions of a slot: keys and values of each block."""
    return [part.tobytes() for i in (1, 2) for part in slice_._backend.cached(i, slot, 0, n - 1)]


@pytest.mark.parametrize(
    ("source", "slot", "n", "told"),
    [(0, 4, 1, "slot 4"), (-1, 0, 1, "slot -1"), (0, 1, CONTEXT + 1, f"position {CONTEXT}"), (0, 1, 0, "position -1")],
)
def test_a_copy_that_would_leave_the_cache_is_refused(two_blocks: Slice, source: int, slot: int, n: int, told: str):
    with pytest.raises(ValueError, match=told):
        two_blocks.copy(source, slot, n)


def test_a_device_that_names_no_part_of_a_buffer_copies_too(
    goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As OpenCL and WebGPU: the whole cache is read and written then, where programs that are compiled find it."""
    model = open_model(goldens / "llama-tied", tmp_path)
    slice_ = make(model, 1, 3, n_slots=4, max_rows=1, kernels="tinygrad")
    x, other = np.random.default_rng(5).standard_normal((2, 3, slice_.dim)).astype(np.float32)
    for position in range(3):
        expected = in_slot(slice_, 2, x[position:][:1], position)
        in_slot(slice_, 3, other[position:][:1], position)
        if position < 2:
            in_slot(slice_, 0, x[position:][:1], position)

    def no_part(*_: object) -> object:
        raise NotImplementedError

    monkeypatch.setattr(plain, "_part", no_part)
    slice_.copy(0, 3, 2)
    assert in_slot(slice_, 3, x[2:], 2) == expected


@pytest.mark.parametrize("kernels", ["auto", "tinygrad"])
def test_warm_reports_its_progress(golden: Golden, kernels: str):
    seen: list[tuple[str, int, int]] = []
    slice_ = make(
        golden.model, 0, 1, readout=True, max_rows=1, kernels=kernels, on_progress=lambda *at: seen.append(at)
    )
    seen.clear()
    assert slice_.warm() >= 2  # programs: a block's, and that of the read-out
    assert seen[0][:2] == ("compile", 0)
    assert seen[-1] == ("compile", seen[0][2], seen[0][2])


@pytest.mark.parametrize(
    ("rows", "slot", "position"), [(0, 0, 0), (MAX_ROWS + 1, 0, 0), (1, 3, 0), (1, -1, 0), (1, 0, CONTEXT), (1, 0, -1)]
)
def test_what_would_leave_the_cache_is_refused(golden: Golden, rows: int, slot: int, position: int):
    slice_ = make(golden.model, 0, 1)
    x = np.zeros((rows, slice_.dim), np.float32)
    with pytest.raises(ValueError, match=r"slot -?\d|position -?\d|rows; expected 1 to 16"):
        slice_.forward(x, np.full(rows, slot, np.int32), np.full(rows, position, np.int32))


@pytest.mark.parametrize("token", [-1, 512])
def test_an_id_outside_the_vocabulary_is_refused(golden: Golden, token: int):
    with pytest.raises(ValueError, match=f"token id {token} is outside 0 to 511"):
        make(golden.model, 0, 0).embed(np.array([token], np.int32), np.zeros(1, np.int32))


@pytest.mark.parametrize("position", [-1, CONTEXT])
def test_an_embedding_for_a_position_outside_the_context_is_refused(golden: Golden, position: int):
    with pytest.raises(ValueError, match=f"position {position} is outside 0 to {CONTEXT - 1}"):
        make(golden.model, 0, 0).embed(np.zeros(1, np.int32), np.array([position], np.int32))


@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0),
        Rope(1e6, "linear", factor=4.0),
        Rope(500000.0, "llama3", factor=8.0, low=1.0, high=4.0, original_context=64),
    ],
)
@pytest.mark.parametrize("factors", [None, np.linspace(1.0, 8.0, 16, dtype=np.float32)])
def test_the_rope_table_is_the_reference_angles(golden: Golden, rope: Rope, factors: np.ndarray | None):
    config = replace(golden.model.config, rope=rope, head_dim=32)
    table = rope_table(config, 100, factors)
    angles = rope_angles(rope, 32, range(100), factors)
    assert table is not None
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=1e-7)


def test_learned_positions_have_no_table(golden: Golden):
    assert rope_table(replace(golden.model.config, rope=None), 100) is None


@pytest.mark.parametrize("weights", ["16bit", "quantized"])
def test_smollm2_chooses_the_golden_ids(smollm2_gguf: Path, goldens: Path, tmp_path: Path, weights: str):
    """Teacher-forced, every call audited: the golden prefix at every position, and our choice wherever theirs was
    clear."""
    model = open_model(smollm2_gguf, tmp_path)
    changes = {"max_rows": 64, "context": 256, "audit_rate": 1.0, "weights": weights}
    slices = [make(model, lo, hi, **changes) for lo, hi in [(0, 11), (11, 30)]]
    assert sum(slice_.weights_bytes for slice_ in slices) < (1.1 if weights == "16bit" else 0.7) * 2 * PARAMETERS
    wrong, clear = [], 0
    for case in json.loads((goldens / "smollm2-135m-q4_1.json").read_text())["cases"]:
        ids = case["prompt_ids"] + case["greedy_ids"][:-1]
        logits = np.concatenate([run(slices, ids[i : i + 64], i) for i in range(0, len(ids), 64)])
        choices = logits[len(case["prompt_ids"]) - 1 :].argmax(-1)
        for choice, golden_id, margin in zip(choices, case["greedy_ids"], case["margins"], strict=True):
            clear += margin > 0.25
            if margin > 0.25 and choice != golden_id:
                wrong.append((case["prompt"], golden_id, int(choice)))
    assert not wrong
    assert clear > 50
