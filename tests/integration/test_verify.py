"""The differential check must pass where nothing is wrong, and must not where anything is, however small."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pptasks.errors import RequestFailed
from pptasks.models import open_model
from pptasks.plan import Span, cache_bytes
from pptasks.wire import Sampling
from tests.pipeline import Pipeline
from workers.sample import Token, choose
from workers.verify import Verification, pieces

PROMPT, N = [7, 8, 9, 230, 51, 17], 8
MODELS = ["llama-tied", "llama-untied-sharded-bf16", "mistral-window", "qwen2-bias", "qwen3-tied", "gpt2", "llama-odd"]


def pipeline(folder: Path, split: str = "auto", **settings: object) -> Pipeline:
    stages = 2 if split == "auto" else split.count(",") + 1
    return Pipeline(folder, split=split, stages=stages, **settings)


@pytest.mark.parametrize("wire", ["bf16", "f32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sound_pipeline_agrees_in_every_bit(goldens: Path, name: str, wire: str) -> None:
    pipe = pipeline(goldens / name, wire=wire, prefill_chunk=4)
    found = pipe.verify(PROMPT, N)
    assert found.passed, found.reason
    assert found.exact
    assert found.first_difference is None
    assert [(c.stage, c.max_abs_diff, c.values_differ, c.first_position) for c in found.stages] == [
        (0, 0.0, 0, None),
        (1, 0.0, 0, None),
    ]
    assert list(found.token_ids) == pipe.generate(PROMPT, N)


@pytest.mark.parametrize("readout", ["first", "last"])
@pytest.mark.parametrize("split", ["6", "0,3,3", "1,2,3"])
def test_rings_and_lines_and_an_empty_head(goldens: Path, split: str, readout: str) -> None:
    assert pipeline(goldens / "llama-tied", split, readout=readout).verify(PROMPT, N).passed


def test_a_sampled_answer_is_verified_too(goldens: Path) -> None:
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=7)
    assert pipeline(goldens / "llama-tied").verify(PROMPT, N, sampling).passed


def test_quantised_weights_are_verified_as_they_are_held(smollm2_gguf: Path) -> None:
    pipe = Pipeline(smollm2_gguf, split="15,15", stages=2, weights="quantized", context=64)
    assert pipe.verify(PROMPT, 3).passed


# ---- mutations: each is a fault of one stage that still writes fluent text ----

Mutation = Callable[[Pipeline], None]


def change_output(pipe: Pipeline, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Stage 1's blocks give something else."""
    slice_ = pipe.stages[1].slice
    whole = slice_.forward
    slice_.forward = lambda x, slots, positions: change(whole(x, slots, positions))  # type: ignore[method-assign]


def a_dropped_stage(pipe: Pipeline) -> None:
    pipe.stages[1].slice.forward = lambda x, slots, positions: x.copy()  # type: ignore[method-assign]


def swapped_stages(pipe: Pipeline) -> None:
    pipe.stages[1].slice, pipe.stages[2].slice = pipe.stages[2].slice, pipe.stages[1].slice


def one_ulp(pipe: Pipeline) -> None:
    """Of one value of a row; the wire's bf16 rounds it away."""

    def change(x: np.ndarray) -> np.ndarray:
        x[-1, 3] = np.nextafter(x[-1, 3], np.float32(np.inf))
        return x

    change_output(pipe, change)


@pytest.mark.parametrize("mutate", [a_dropped_stage, swapped_stages, one_ulp])
def test_a_wrong_stage_is_named(goldens: Path, mutate: Mutation) -> None:
    pipe = pipeline(goldens / "llama-tied", "2,2,2")
    mutate(pipe)
    found = pipe.verify(PROMPT, N)
    assert not found.passed
    assert found.reason.startswith("the hidden state after stage 1 differs from position ")
    assert found.stages[0].values_differ == 0
    assert found.stages[1].values_differ > 0


def test_a_minus_zero_for_a_zero_is_noticed(goldens: Path) -> None:
    """As numbers they are equal: the head computes zeros, the stage told one of them with a sign."""
    pipe = pipeline(goldens / "llama-tied", "2,2,2")
    sound, told = pipe.stages[1].slice.forward, list[np.ndarray]()

    def forward(x: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        told.append(np.zeros_like(sound(x, slots, positions)))
        told[-1][-1, 3] = -0.0
        return told[-1]

    pipe.stages[1].slice.forward = forward  # type: ignore[method-assign]
    zeros = lambda slice_: setattr(slice_, "forward", lambda x, slots, positions: np.zeros_like(x))  # noqa: E731
    found = pipe.verify(PROMPT, 3, changed={1: zeros})
    assert told
    assert not found.passed
    assert found.stages[1].max_abs_diff == 0.0
    assert found.stages[1].values_differ > 0


def test_a_sampler_that_takes_another_token_is_noticed(goldens: Path) -> None:
    pipe = pipeline(goldens / "llama-tied", "3,3", readout="last")
    read_out = pipe.stages[1].read_out
    pipe.stages[1].read_out = lambda lanes, hidden: [Token(t.id ^ 1) for t in read_out(lanes, hidden)]  # type: ignore[method-assign]
    found = pipe.verify(PROMPT, N)
    assert not found.passed
    assert found.first_difference == 0
    assert "token 0 of the answer is" in found.reason
    assert "higher" in found.reason


PENALISED = Sampling(presence_penalty=0.5, frequency_penalty=1.5, logprobs=2)


@pytest.mark.parametrize("sampling", [PENALISED, replace(PENALISED, temperature=1.0, seed=4)])
@pytest.mark.parametrize("readout", ["first", "last"])
def test_penalties_are_verified_too(goldens: Path, sampling: Sampling, readout: str) -> None:
    pipe = pipeline(goldens / "llama-tied", "3,3", readout=readout)
    found = pipe.verify(PROMPT, 24, sampling)
    assert found.passed, found.reason
    assert found.exact
    assert found.first_difference is None
    assert list(found.token_ids) != pipe.generate(PROMPT, 24, sampling=Sampling(sampling.temperature, seed=4))


def test_a_sampler_without_penalties_is_noticed(goldens: Path) -> None:
    """Also where another device rounds otherwise: the token that it takes has a larger logit, but for the penalty."""
    for make in (lambda pipe: pipe, lambda pipe: elsewhere(pipe, lambda x: x)):
        pipe = make(pipeline(goldens / "llama-tied", "3,3", readout="last"))
        pipe.stages[1]._sample = lambda logits, lane, position: choose(logits, Sampling(logprobs=2), position)  # type: ignore[method-assign]
        found = pipe.verify(PROMPT, 24, PENALISED)
        assert not found.passed
        assert "higher" in found.reason


def elsewhere(pipe: Pipeline, change: Callable[[np.ndarray], np.ndarray]) -> Pipeline:
    """Stage 1 is on another kind of device, which rounds otherwise, and gives what `change` makes of it."""
    change_output(pipe, change)
    pipe.stages[1].slice.arithmetic = ""
    return pipe


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3), PENALISED])
def test_another_devices_rounding_passes(goldens: Path, sampling: Sampling) -> None:
    noise = np.random.default_rng(1)
    pipe = elsewhere(
        pipeline(goldens / "llama-tied", "2,2,2"),
        lambda x: x * (1 + 1e-6 * noise.standard_normal(x.shape)).astype(np.float32),
    )
    for i in range(4):
        found = pipe.verify([*PROMPT, i], 12, sampling)
        assert not found.exact
        assert found.passed, found.reason
        assert found.stages[0].values_differ == found.stages[2].values_differ == 0  # each stage by itself
        assert 0 < (found.stages[1].worst or 0) < 1e-4


WRONG_ELSEWHERE = {
    "half as much again": lambda x: 1.5 * x,  # the final norm hides it from the tokens
    "one row": lambda x: np.concatenate([x[:-1], 1.01 * x[-1:]]),
    "one value": lambda x: x + 0.05 * np.eye(1, x.shape[1], 7, dtype=np.float32),
    "no number": lambda x: np.full_like(x, np.nan),
}


@pytest.mark.parametrize("case", WRONG_ELSEWHERE)
def test_more_than_rounding_never_passes(goldens: Path, case: str) -> None:
    pipe = elsewhere(pipeline(goldens / "llama-tied", "2,2,2"), WRONG_ELSEWHERE[case])
    sample_anything(pipe)
    found = pipe.verify(PROMPT, N)
    assert not found.exact
    assert not found.passed
    assert found.reason.startswith("the hidden state after stage 1")
    json.dumps(found.to_json(), allow_nan=False)


def sample_anything(pipe: Pipeline) -> None:
    """So that a pipeline of NaNs goes on to its end."""
    for stage in pipe.stages:
        stage._sample = lambda logits, lane, position: Token(5)  # type: ignore[method-assign]


@pytest.mark.parametrize("readout", ["first", "last"])
def test_logits_that_are_no_numbers_fail_the_request(goldens: Path, readout: str) -> None:
    """Verified or not: token 0 for ever is no answer."""
    pipe = pipeline(goldens / "llama-tied", "3,3", readout=readout)
    change_output(pipe, lambda x: np.full_like(x, np.nan))
    with pytest.raises(RequestFailed, match="the logits of position 5 are not finite"):
        pipe.generate(PROMPT, N)


def test_what_a_stage_did_not_tell_is_missed(goldens: Path) -> None:
    pipe = pipeline(goldens / "llama-tied", "3,3")
    pipe.verify(PROMPT, N)
    assert pipe.traces is not None
    assert pipe.traces.missing(len(PROMPT) + N - 1) is None
    assert pipe.traces.missing(len(PROMPT) + N) == (0, len(PROMPT) + N - 1)


def test_the_report_is_json(goldens: Path) -> None:
    found: Verification = pipeline(goldens / "llama-tied", "3,3").verify(PROMPT, N)
    report = json.loads(json.dumps(found.to_json()))
    assert report["passed"] is True
    assert report["stages"][1] == {
        "stage": 1, "max_abs_diff": 0.0, "values_differ": 0, "first_position": None, "worst": 0.0,
    }  # fmt: skip


def test_a_machine_that_cannot_hold_the_model_goes_range_by_range(goldens: Path) -> None:
    model = open_model(goldens / "llama-tied", Path("/nonexistent"))
    block = sum(4 * np.prod(ref.shape) for ref in model.block_tensors(0)) + cache_bytes(model, 1, 100)
    assert list(pieces(model, Span(1, 6), "16bit", 100, 10 * block)) == [Span(1, 6)]
    assert list(pieces(model, Span(1, 6), "16bit", 100, 2 * block)) == [Span(1, 3), Span(3, 5), Span(5, 6)]
    assert list(pieces(model, Span(1, 6), "16bit", 200, 2 * block)) != [Span(1, 3), Span(3, 5), Span(5, 6)]
    assert list(pieces(model, Span(1, 4), "16bit", 100, 0)) == [Span(1, 2), Span(2, 3), Span(3, 4)]
    assert list(pieces(model, Span(2, 2), "16bit", 100, 0)) == []
