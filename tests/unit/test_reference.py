"""workers/reference.py against another implementation's numbers, and mistakes in a model that it must not forgive."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pptasks.errors import Unsupported
from pptasks.modelinfo import ModelConfig, Rope
from tests.gguf_files import write_gguf
from tests.reference_model import Weights, from_folder, from_gguf
from workers import reference

FOLDERS = {path.parent.name: path.parent for path in (Path(__file__).parents[1] / "goldens").glob("*/expected.json")}
REQUIRED = {"gpt2", "llama-tied", "llama-untied-sharded-bf16", "qwen2-bias"}
TOLERANCE = 5e-6  # of the range of the logits: what float32 loses, and the six decimals of expected.json
# This golden was computed after its rotary frequencies had been rounded to bfloat16 along with the weights.
ROUNDED, ROUNDED_TOLERANCE = "llama-untied-sharded-bf16", 1e-3
NOTICED = 1e-2  # a mistake must move the logits by more than this part of their range
every_golden = pytest.mark.parametrize("name", sorted(FOLDERS))
Mutation = Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]


def expected(name: str) -> dict[str, Any]:
    return json.loads((FOLDERS[name] / "expected.json").read_text())


def tolerance(name: str) -> float:
    return ROUNDED_TOLERANCE if name == ROUNDED else TOLERANCE


def off_by(name: str, config: ModelConfig, weights: Weights) -> float:
    """The largest error of the logits after the golden's prompt, as a part of their range."""
    golden = expected(name)
    want = np.array(golden["logits_last"])
    got = reference.forward(config, weights, golden["prompt_ids"])[-1]
    return float(np.abs(got - want).max() / np.ptp(want))


# --- the goldens ----------------------------------------------------------------------------------------------------


def test_the_required_goldens_are_there() -> None:
    assert set(FOLDERS) >= REQUIRED


@every_golden
def test_yields_the_golden_logits(name: str) -> None:
    assert off_by(name, *from_folder(FOLDERS[name])) < tolerance(name)


@every_golden
def test_yields_the_golden_tokens(name: str) -> None:
    golden = expected(name)
    prompt, greedy = golden["prompt_ids"], golden["greedy_ids"]
    rows = reference.forward(*from_folder(FOLDERS[name]), [*prompt, *greedy[:-1]])[len(prompt) - 1 :]
    assert rows.argmax(axis=1).tolist() == greedy


@every_golden
def test_a_gguf_of_a_golden_yields_its_logits(name: str, tmp_path: Path) -> None:
    path = write_gguf(FOLDERS[name], tmp_path / "model.gguf")
    assert off_by(name, *from_gguf(path)) < tolerance(name)


def test_frequencies_rounded_to_bfloat16_explain_the_one_golden_that_is_further_off() -> None:
    config, weights = from_folder(FOLDERS[ROUNDED])
    assert config.rope
    exact = reference.rope_angles(config.rope, config.head_dim, [1])[0]
    factors = exact / exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert off_by(ROUNDED, config, weights) > 10 * TOLERANCE
    assert off_by(ROUNDED, config, {**weights, "rope_freqs.weight": factors}) < TOLERANCE


def test_the_real_model_yields_the_golden_tokens(smollm2_gguf: Path, goldens: Path) -> None:
    cases = json.loads((goldens / "smollm2-135m-q4_1.json").read_text())["cases"]
    case = min(cases, key=lambda case: len(case["prompt_ids"] + case["greedy_ids"]))
    prompt, greedy = case["prompt_ids"], case["greedy_ids"]
    config, weights = from_gguf(smollm2_gguf)
    rows = reference.forward(config, weights, [*prompt, *greedy[:-1]])[len(prompt) - 1 :]
    assert rows.argmax(axis=1).tolist() == greedy


# --- mistakes in the model ------------------------------------------------------------------------------------------


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutation:
    return lambda config, weights: (config, {**weights, name: change(weights[name])})


def lost(name: str) -> Mutation:
    """The tensor is not there; it must have been."""

    def mutate(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        assert name in weights
        return config, {other: array for other, array in weights.items() if other != name}

    return mutate


def config_field(**changes: Any) -> Mutation:
    return lambda config, weights: (replace(config, **changes), weights)


def windows(window: int) -> Mutation:
    return lambda config, weights: (replace(config, windows=(window,) * config.n_blocks), weights)


def rope(**changes: Any) -> Mutation:
    def mutate(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        assert config.rope
        return replace(config, rope=replace(config.rope, **changes)), weights

    return mutate


def blocks(order: list[int]) -> Mutation:
    """The blocks of the model are those of `order`."""

    def mutate(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        kept = {name: array for name, array in weights.items() if not name.startswith("blk.")}
        for at, i in enumerate(order):
            mine = f"blk.{i}."
            kept |= {f"blk.{at}.{n.removeprefix(mine)}": a for n, a in weights.items() if n.startswith(mine)}
        return replace(config, n_blocks=len(order), windows=tuple(config.windows[i] for i in order)), kept

    return mutate


def heads(n: int, order: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: np.concatenate([np.split(rows, n)[i] for i in order])


def interleaved(n: int) -> Callable[[np.ndarray], np.ndarray]:
    """The rows of a GGUF's llama export, taken as they are: pairs side by side, not half a head apart."""
    return lambda rows: np.concatenate(
        [np.stack(np.split(head, 2), 1).reshape(head.shape) for head in np.split(rows, n)]
    )


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "gpt2, transposed Conv1D": ("gpt2", weight("blk.2.attn_output.weight", np.transpose)),
    "gpt2, positions of the next token": ("gpt2", weight("position_embd.weight", lambda w: np.roll(w, 1, axis=0))),
    "gpt2, q and k swapped": ("gpt2", lambda c, w: (c, {**w, "blk.1.attn_q.weight": w["blk.1.attn_k.weight"],
                                                       "blk.1.attn_k.weight": w["blk.1.attn_q.weight"]})),
    "gpt2, no bias of the last norm": ("gpt2", weight("output_norm.bias", np.zeros_like)),
    "gpt2, RMSNorm": ("gpt2", config_field(norm="rms")),
    "untied, the embedding as the head": ("llama-untied-sharded-bf16", config_field(tied=True)),
    "dropped block": ("llama-tied", blocks([0, 1, 3, 4, 5])),
    "dropped last block": ("llama-tied", blocks([0, 1, 2, 3, 4])),
    "doubled block": ("llama-tied", blocks([0, 1, 2, 2, 3, 4, 5])),
    "swapped blocks": ("llama-tied", blocks([0, 1, 3, 2, 4, 5])),
    "swapped halves of the blocks": ("qwen2-bias", blocks([3, 4, 5, 0, 1, 2])),
    "gate and up swapped": ("llama-tied", lambda c, w: (c, {**w, "blk.3.ffn_up.weight": w["blk.3.ffn_gate.weight"],
                                                           "blk.3.ffn_gate.weight": w["blk.3.ffn_up.weight"]})),
    "key heads of other groups": ("llama-tied", weight("blk.0.attn_k.weight", heads(2, [1, 0]))),
    "interleaved queries": ("llama-tied", weight("blk.4.attn_q.weight", interleaved(4))),
    "another theta": ("llama-tied", rope(theta=20000.0)),
    "no positions": ("llama-tied", rope(scaling="linear", factor=1e9)),
    "mistral, no window": ("mistral-window", windows(0)),
    "mistral, window one shorter": ("mistral-window", windows(7)),
    "mistral, window one longer": ("mistral-window", windows(9)),
    "mistral, a window it has not": ("mistral-no-window", windows(32)),
    "linear scaling left out": ("llama-linear-rope", rope(scaling="none")),
    "linear scaling by another factor": ("llama-linear-rope", rope(factor=2.0)),
    "llama3 scaling left out": ("llama3-rope", rope(scaling="none")),
    "llama3 scaling taken as linear": ("llama3-rope", rope(scaling="linear")),
    "llama3 scaling from another context": ("llama3-rope", rope(original_context=64)),
    "llama3 scaling, other bounds": ("llama3-rope", rope(high=2.0)),
    "qwen3, no norm of q": ("qwen3-tied", lost("blk.1.attn_q_norm.weight")),
    "qwen3, no norm of k": ("qwen3-tied", lost("blk.1.attn_k_norm.weight")),
}  # fmt: skip
BIASED = {
    "gpt2": ["attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down"],  # of k: see below
    "llama-bias": ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"],
    "qwen2-bias": ["attn_q", "attn_k", "attn_v"],
}
MUTATIONS |= {
    f"{folder}, no bias of {layer}": (folder, lost(f"blk.1.{layer}.bias"))
    for folder, layers in BIASED.items()
    for layer in layers
}


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_mistake_is_noticed(mistake: str) -> None:
    name, mutate = MUTATIONS[mistake]
    if name not in FOLDERS:
        pytest.skip(f"no golden {name}")
    config, weights = mutate(*from_folder(FOLDERS[name]))
    assert off_by(name, config, weights) > NOTICED


def test_without_rotation_a_bias_of_the_keys_changes_nothing() -> None:
    """It adds the same q . b to all scores of a row, which softmax forgives: no test of GPT-2's output can miss it."""
    config, weights = lost("blk.1.attn_k.bias")(*from_folder(FOLDERS["gpt2"]))
    assert off_by("gpt2", config, weights) < TOLERANCE


# --- single formulas ------------------------------------------------------------------------------------------------

LLAMA31 = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_angles_are_the_position_times_the_frequency() -> None:
    angles = reference.rope_angles(Rope(10000.0), 8, [0, 1, 30])
    np.testing.assert_allclose(angles, [[0] * 4, [1, 0.1, 0.01, 0.001], [30, 3, 0.3, 0.03]], rtol=1e-14)


def test_linear_scaling_stretches_positions() -> None:
    scaled = reference.rope_angles(Rope(10000.0, "linear", 4.0), 8, [0, 4, 40])
    np.testing.assert_allclose(scaled, reference.rope_angles(Rope(10000.0), 8, [0, 1, 10]), rtol=1e-14)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = reference.rope_angles(Rope(500000.0), 128, [1])[0]
    stretch = plain / reference.rope_angles(LLAMA31, 128, [1])[0]
    wave = 2 * np.pi / plain
    assert (stretch[wave < 8192 / 4] == 1).all()
    assert (stretch[wave > 8192] == 8).all()
    between = stretch[(wave >= 8192 / 4) & (wave <= 8192)]
    assert len(between) == 6
    assert (np.diff([1, *between, 8]) > 0).all()


def test_llama3_scaling_is_continuous_and_halfway_between_its_bounds() -> None:
    """At 2.5 turns, in the middle of 1 and 4, the frequency is the mean of the kept and the stretched one."""

    def stretch(turns: float) -> float:
        theta = (turns * 2 * np.pi / 8192) ** -2  # of a head of 4, the second frequency is theta^(-1/2)
        rope = replace(LLAMA31, theta=theta)
        return float(reference.rope_angles(rope, 4, [1])[0, 1] * np.sqrt(theta))

    assert [stretch(t) for t in (0.5, 1, 2.5, 4, 5)] == pytest.approx([1 / 8, 1 / 8, (1 + 1 / 8) / 2, 1, 1])


def test_factors_divide_frequencies() -> None:
    angles = reference.rope_angles(Rope(10000.0, "linear", 2.0), 4, [6], factors=np.array([1, 4], np.float32))
    np.testing.assert_allclose(angles, [[3, 6 * 0.01 / 2 / 4]], rtol=1e-14)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="'yarn'"):
        reference.rope_angles(Rope(10000.0, "yarn", 4.0), 4, [0])


TINY = ModelConfig("llama", 1, 4, 2, 1, 2, 4, 8, 16, "rms", 0.0, "swiglu", Rope(10000.0), (0,), tied=True)


def test_a_block_by_hand() -> None:
    """One row attends to itself alone: v, doubled for both heads, and then silu(gate) * up, worked out by hand."""
    eye = np.eye(4)
    block = {"attn_q": eye, "attn_k": eye[:2], "attn_v": eye[:2], "attn_output": eye, "ffn_gate": 0.1 * eye,
             "ffn_up": eye, "ffn_down": 10 * eye}  # fmt: skip
    weights = {f"blk.0.{name}.weight": array for name, array in block.items()}
    weights |= {f"blk.0.{name}.weight": np.ones(4) for name in ("attn_norm", "ffn_norm")}
    x = np.array([[1.0, -1.0, 1.0, -1.0]])  # its norm is itself; v is (1, -1) and so is each head's output
    mid = 2 * x
    silu = np.array([0.1, -0.1]) / (1 + np.exp([-0.1, 0.1]))
    want = mid + 10 * np.tile(silu, 2) * x
    np.testing.assert_allclose(reference.block(TINY, 0, weights, x), want, rtol=1e-14)


def test_gelu_is_the_tanh_form_and_silu_does_not_overflow() -> None:
    assert reference._gelu(np.array([1.0]))[0] == pytest.approx(0.8411919906, abs=1e-10)  # the erf form: 0.8413447461
    np.testing.assert_allclose(reference._silu(np.array([-1e4, 0.0, 1e4])), [0, 0, 1e4])


def test_a_large_matrix_is_never_widened_as_a_whole() -> None:
    config = replace(TINY, dim=1024, vocab_size=32768)
    weights = {"output_norm.weight": np.ones(1024), "token_embd.weight": np.ones((32768, 1024), np.float16)}
    x = np.full((2, 1024), 2.0)
    tracemalloc.start()
    got = reference.logits(config, weights, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (got == 1024).all()
    assert peak < 4 << 20  # as float64 the matrix has 256 MiB
