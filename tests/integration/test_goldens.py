"""The golden test: a model cut in any way gives the tokens that another implementation gives for the whole."""

import json
from pathlib import Path

import numpy as np
import pytest

from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.wire import Frame, Kind, Sampling, decode, short_id
from tests import reference_model
from tests.gguf_files import write_gguf
from tests.pipeline import SECRET, Pipeline, logits_of
from workers import reference
from workers.scheduler import Sequence
from workers.stage import Stage

SPLITS = ["6", "3,3", "2,2,2", "1,5", "4,1,1", "0,3,3", "1,1,1,1,1,1", "0,1,1,1,1,1,1"]
SPLITS_OF_7 = ["7", "3,4", "2,2,3", "1,6", "5,1,1", "0,3,4", "1,1,1,1,1,1,1", "0,1,1,1,1,1,1,1"]
N_REAL = 10  # tokens of the real model's answers
CASES = [("llama-tied", s) for s in SPLITS] + [("llama-untied-sharded-bf16", s) for s in SPLITS_OF_7]


def expected_of(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


def pipeline(folder: Path, split: str, **settings: object) -> Pipeline:
    return Pipeline(folder, split=split, stages=split.count(",") + 1, **{"wire": "f32", **settings})


@pytest.mark.parametrize("readout", ["first", "last"])
@pytest.mark.parametrize(("name", "split"), CASES)
def test_every_split_yields_the_golden_tokens(goldens: Path, name: str, split: str, readout: str) -> None:
    golden = expected_of(goldens / name)
    assert (
        pipeline(goldens / name, split, readout=readout).generate(golden["prompt_ids"], len(golden["greedy_ids"]))
        == golden["greedy_ids"]
    )


@pytest.mark.parametrize("readout", ["first", "last"])
@pytest.mark.parametrize(("name", "split"), CASES)
def test_every_split_yields_the_golden_logits(goldens: Path, name: str, split: str, readout: str) -> None:
    golden = expected_of(goldens / name)
    expected = np.array(golden["logits_last"])
    logits = logits_of(pipeline(goldens / name, split, readout=readout), golden["prompt_ids"])[-1]
    assert np.abs(logits - expected).max() < 2e-3 * np.ptp(expected)


# ---- every family, as a folder and as a GGUF file ----

FAMILIES = [
    "gpt2", "gpt2-no-prefix", "gpt2-untied-bf16", "llama-bias", "llama-headdim-f16", "llama-linear-rope", "llama-odd",
    "llama-wide-bf16", "llama3-rope", "mistral-no-window", "mistral-window", "qwen2-bias", "qwen2-untied-f16",
    "qwen3-tied", "qwen3-untied-bf16-sharded",
]  # fmt: skip


def splits_of(n_blocks: int) -> list[str]:
    """The whole, a head without blocks, one block on the head, one block each."""
    half = n_blocks // 2
    return [f"{n_blocks}", f"0,{half},{n_blocks - half}", f"1,{n_blocks - 1}", ",".join("1" * n_blocks)]


@pytest.mark.parametrize("readout", ["first", "last"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_yields_the_golden_answer(goldens: Path, name: str, readout: str) -> None:
    golden, folder = expected_of(goldens / name), goldens / name
    expected = np.array(golden["logits_last"])
    for split in splits_of(open_model(folder, cache=Path("/nonexistent")).config.n_blocks):
        pipe = pipeline(folder, split, readout=readout, prefill_chunk=16)
        answer = pipe.generate(golden["prompt_ids"], len(golden["greedy_ids"]))
        assert answer == golden["greedy_ids"], split
    whole = pipeline(folder, splits_of(pipe.plan.n_blocks)[0], prefill_chunk=128)
    logits = logits_of(whole, golden["prompt_ids"])[-1]
    assert np.abs(logits - expected).max() < 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", ["llama-tied", *FAMILIES])
def test_a_gguf_of_every_family_yields_the_golden_answer(goldens: Path, tmp_path: Path, name: str) -> None:
    golden = expected_of(goldens / name)
    dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[golden["dtype"]]
    file = write_gguf(goldens / name, tmp_path / "x.gguf", dtype)
    pipe = pipeline(file, splits_of(open_model(file, cache=tmp_path).config.n_blocks)[2])
    assert pipe.generate(golden["prompt_ids"], len(golden["greedy_ids"])) == golden["greedy_ids"]


def test_a_split_gguf_yields_the_golden_answer(goldens: Path, tmp_path: Path) -> None:
    golden = expected_of(goldens / "llama3-rope")
    file = write_gguf(goldens / "llama3-rope", tmp_path / "x.gguf", "BF16", split=3)
    assert pipeline(file, "1,1,2").generate(golden["prompt_ids"], len(golden["greedy_ids"])) == golden["greedy_ids"]


QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("weights", ["16bit", "quantized"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_files_are_computed_as_their_values_say(
    goldens: Path, tmp_path: Path, dtype: str, weights: str
) -> None:
    """Against the independent reference on the values that the gguf package reads; F16 rounds them once more."""
    golden = expected_of(goldens / "llama-wide-bf16")
    file = write_gguf(goldens / "llama-wide-bf16", tmp_path / "x.gguf", dtype)
    pipe = pipeline(file, "1,1", weights=weights)
    expected = reference.forward(*reference_model.from_gguf(file), golden["prompt_ids"])
    logits = logits_of(pipe, golden["prompt_ids"])
    tolerance = 2e-5 if weights == "quantized" else 3e-3
    assert np.abs(logits - expected).max() < tolerance * np.ptp(expected)


@pytest.mark.parametrize("name", ["llama-tied", *FAMILIES])
def test_the_pipeline_agrees_with_the_independent_reference(goldens: Path, name: str) -> None:
    """At every position, on a text of its own; the reference shares no code with what serves."""
    config, weights = reference_model.from_folder(goldens / name)
    ids = np.random.default_rng(5).integers(3, min(config.vocab_size, 300), 60).tolist()
    pipe = pipeline(goldens / name, splits_of(config.n_blocks)[2], context=64)
    expected = reference.forward(config, weights, ids)
    assert np.abs(logits_of(pipe, ids) - expected).max() < 1e-5 * np.ptp(expected)


# ---- what else the goldens prove ----


@pytest.mark.parametrize("split", ["6", "2,4"])
def test_plain_tinygrad_yields_the_golden_tokens(goldens: Path, split: str) -> None:
    golden = expected_of(goldens / "llama-tied")
    pipe = pipeline(goldens / "llama-tied", split, kernels="tinygrad", prefill_chunk=4, context=64)
    assert pipe.generate(golden["prompt_ids"], 8) == golden["greedy_ids"][:8]


@pytest.mark.parametrize("chunk", [1, 4, 5, 128])
def test_chunks_of_a_prompt_change_nothing(goldens: Path, chunk: int) -> None:
    golden = expected_of(goldens / "llama-tied")
    assert (
        pipeline(goldens / "llama-tied", "2,4", prefill_chunk=chunk).generate(
            golden["prompt_ids"], len(golden["greedy_ids"])
        )
        == golden["greedy_ids"]
    )


def test_each_hop_of_a_lap_goes_to_the_next_stage(goldens: Path) -> None:
    golden = expected_of(goldens / "llama-tied")
    pipe = pipeline(goldens / "llama-tied", "2,2,2")
    pipe.generate(golden["prompt_ids"], 5)
    assert pipe.hops == [1, 2, 0] * 5


def test_many_requests_at_once_get_what_each_gets_alone(goldens: Path) -> None:
    prompts = [[7, 8, 9], [430, 51] * 9, [3], list(range(40, 70)), [100] * 5, [11, 12]]
    pipe = pipeline(goldens / "llama-tied", "2,4", slots=3, prefill_chunk=16)
    together = pipe.generate_all(prompts, 12)
    assert together == [pipe.generate(prompt, 12) for prompt in prompts]


# ---- mutations: what the golden test must notice ----


def tokens_without_a_block(pipe: Pipeline) -> None:
    """Stage 1 passes its input on."""
    pipe.stages[1].slice.forward = lambda x, slots, positions: x  # type: ignore[method-assign]


def swapped_stages(pipe: Pipeline) -> None:
    pipe.stages[1].slice, pipe.stages[2].slice = pipe.stages[2].slice, pipe.stages[1].slice


def angles_off_by_one(pipe: Pipeline) -> None:
    """RoPE turns by the angles of the position before; where keys and values are kept stays right. From position 4 on
    only, as attention does not see a shift of all positions."""
    for stage in pipe.stages:
        turn_stage(stage)


def turn_stage(stage: Stage) -> None:
    rope = stage.slice._backend._rope  # type: ignore[attr-defined]
    rope[4:] = rope[3:-1].copy()


def positions_off_by_one(pipe: Pipeline) -> None:
    """RoPE and KV cache alike take the position after."""
    whole = pipe.stages[1].slice.forward
    pipe.stages[1].slice.forward = lambda x, slots, positions: whole(x, slots, positions + (positions > 3))  # type: ignore[method-assign]


def another_slot(pipe: Pipeline) -> None:
    """Decode writes to another slot than prefill did."""
    whole = pipe.stages[1].slice.forward
    pipe.stages[1].slice.forward = lambda x, slots, positions: whole(x, slots + (len(x) == 1), positions)  # type: ignore[method-assign]


MUTATIONS = [tokens_without_a_block, swapped_stages, angles_off_by_one, positions_off_by_one, another_slot]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutation_is_noticed(goldens: Path, mutate: object) -> None:
    golden = expected_of(goldens / "llama-tied")
    pipe = pipeline(goldens / "llama-tied", "2,2,2")
    mutate(pipe)  # type: ignore[operator]
    assert pipe.generate(golden["prompt_ids"], len(golden["greedy_ids"])) != golden["greedy_ids"]


def test_the_logits_notice_wrong_angles_of_one_stage(goldens: Path) -> None:
    golden = expected_of(goldens / "llama-tied")
    expected = np.array(golden["logits_last"])
    pipe = pipeline(goldens / "llama-tied", "2,2,2")
    turn_stage(pipe.stages[1])
    assert np.abs(logits_of(pipe, golden["prompt_ids"])[-1] - expected).max() > 2e-2 * np.ptp(expected)


# ---- faults: lost and doubled frames ----


class Faults:
    """Drops, or doubles, the nth frame of a run."""

    def __init__(self, nth: int, copies: int):
        self.nth, self.copies, self.seen = nth, copies, 0

    def __call__(self, data: bytes) -> list[bytes]:
        self.seen += 1
        return [data] * (self.copies if self.seen == self.nth else 1)


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("split", ["2,4", "0,3,3"])
@pytest.mark.parametrize("readout", ["first", "last"])
def test_each_frame_may_be_lost_or_doubled_once(goldens: Path, split: str, readout: str, copies: int) -> None:
    golden = expected_of(goldens / "llama-tied")
    prompt, answer = golden["prompt_ids"], golden["greedy_ids"][:6]
    pipe = pipeline(goldens / "llama-tied", split, readout=readout, prefill_chunk=4)
    pipe.generate(prompt, 6)
    for nth in range(1, len(pipe.hops) + 1):
        pipe.tamper = Faults(nth, copies)
        assert pipe.generate(prompt, 6) == answer, f"frame {nth}"
        assert pipe.tamper.seen >= nth


def waiting(pipe: Pipeline, name: str, ids: list[int], n: int) -> Sequence:
    sequence = Sequence(name, short_id(name), list(ids), len(ids), n, frozenset(), Sampling())
    pipe.state.waiting.append(sequence)
    return sequence


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.RETURN])
def test_a_lost_lap_copies_nothing_from_a_slot_that_has_changed_hands(goldens: Path, kind: Kind) -> None:
    """What it shared was copied on some stages, or on all; another prompt is in that slot now."""
    beginning, others = list(range(5, 45)), list(range(100, 150))
    pipe = pipeline(goldens / "llama-tied", "3,3", slots=2, context=96)
    expected = pipe.generate([*beginning, 60, 61], 8)
    pipe.generate(others, 1)
    pipe.generate([*beginning, *others], 1)
    one, lost = waiting(pipe, "one", [*beginning, 60, 61], 8), list[Frame]()

    def lose(data: bytes) -> list[bytes]:
        frame = decode(data, SECRET)
        if not lost and frame.kind is kind and frame.lanes[0].request == one.short_id:
            lost.append(frame)
            return []
        return [data]

    pipe.tamper = lose
    pipe.turn()
    shared = one.shared
    assert shared is not None
    assert shared.length == 40
    other = waiting(pipe, "other", others[::-1], 2)
    while any(True for _ in pipe.state.sequences()):
        pipe.turn()
    assert lost[0].lanes[0].shared == shared
    assert (one.slot, other.slot) == (1 - shared.slot, shared.slot)
    assert one.generated == expected


def test_a_full_cache_changes_hands_without_a_miss(goldens: Path) -> None:
    """One prompt takes over the slot that the next would share from, in one lap."""
    kinds: list[Kind] = []

    def note(data: bytes) -> list[bytes]:
        kinds.append(decode(data, SECRET).kind)
        return [data]

    beginning = list(range(5, 45))
    pipe = pipeline(goldens / "llama-tied", "3,3", slots=2, context=96, tamper=note)
    expected = pipe.generate([*beginning, 60], 3)
    pipe.generate(list(range(70, 100)), 3)
    assert pipe.generate_all([list(range(100, 130)), [*beginning, 60]], 3)[1] == expected
    assert set(kinds) == {Kind.ACTIVATION, Kind.RETURN}


# ---- the real model ----


@pytest.fixture(scope="module")
def real_goldens(goldens: Path) -> list[dict]:
    return json.loads((goldens / "smollm2-135m-q4_1.json").read_text())["cases"]


def test_the_real_model_takes_the_golden_tokens_where_they_are_clear(
    smollm2_gguf: Path, real_goldens: list[dict]
) -> None:
    pipe = Pipeline(smollm2_gguf, split="15,15", stages=2, wire="f32", context=256)
    for case in real_goldens:
        ids = case["prompt_ids"] + case["greedy_ids"]
        n_prompt = len(case["prompt_ids"])
        chosen = logits_of(pipe, ids[:-1])[n_prompt - 1 :].argmax(-1)
        clear = np.array(case["margins"]) > 0.25
        assert clear.sum() > 3
        assert (chosen[clear] == np.array(case["greedy_ids"])[clear]).all()


STAGES = [2, 3, 5]


@pytest.fixture(scope="module")
def real_model(smollm2_gguf: Path) -> Model:
    return open_model(smollm2_gguf, cache=Path("/nonexistent"))


@pytest.fixture(scope="module")
def whole_answers(real_model: Model, real_goldens: list[dict]) -> list[list[int]]:
    """What one stage answers to each golden prompt."""
    pipe = Pipeline(real_model, wire="f32", context=256)
    return [pipe.generate(case["prompt_ids"], N_REAL) for case in real_goldens]


@pytest.mark.parametrize("stages", STAGES)
def test_the_real_model_gives_the_same_tokens_for_any_number_of_stages(
    real_model: Model, real_goldens: list[dict], whole_answers: list[list[int]], stages: int
) -> None:
    pipe = Pipeline(real_model, stages=stages, wire="f32", context=256)
    assert len(real_goldens) == 5
    assert [pipe.generate(case["prompt_ids"], N_REAL) for case in real_goldens] == whole_answers


@pytest.mark.parametrize("stages", STAGES)
def test_a_bf16_wire_changes_the_real_models_tokens_by_its_rounding_only(
    real_model: Model, real_goldens: list[dict], stages: int
) -> None:
    pipe = Pipeline(real_model, stages=stages, wire="bf16", context=256)
    for case in real_goldens[:2]:
        prompt = case["prompt_ids"]
        assert pipe.generate(prompt, N_REAL) == in_one_process_that_rounds(pipe, prompt, N_REAL)


def in_one_process_that_rounds(pipe: Pipeline, prompt: list[int], n: int) -> list[int]:
    """Greedy ids with the wire's rounding at each boundary, and no frame, queue, slot or scheduler."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(logits_of(pipe, ids)[-1].argmax()))
    return ids[len(prompt) :]
