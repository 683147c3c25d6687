"""How blocks are cut into stages, and what makes two plans differ."""

from dataclasses import replace
from pathlib import Path

import pytest

from pptasks.config import Settings
from pptasks.errors import PlanError
from pptasks.modelinfo import EMBEDDING, OUTPUT, OUTPUT_NORM, Model, ModelConfig, Rope, TensorRef
from pptasks.plan import (
    DEFAULT_CONTEXT,
    DEFAULT_SLOTS,
    Plan,
    Span,
    cache_bytes,
    check_tiling,
    make_plan,
    memory_sizes,
    partition,
    stage_bytes,
)
from pptasks.wire import MAX_FRAME_BYTES

SMOLLM2 = ModelConfig(
    architecture="llama",
    n_blocks=30,
    dim=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    vocab_size=49152,
    context=8192,
    norm="rms",
    norm_eps=1e-5,
    ffn="swiglu",
    rope=Rope(100000.0),
    windows=(0,) * 30,
    tied=True,
)
PLAN = Plan(
    spans=(Span(0, 2), Span(2, 5)),
    n_blocks=5,
    fingerprint="ab" * 32,
    wire="bf16",
    readout="last",
    context=2048,
    slots=4,
    max_rows=128,
)


def sizes(spans: tuple[Span, ...]) -> list[int]:
    return [len(span) for span in spans]


def even(n_blocks: int, stages: int) -> list[int]:
    return sizes(partition(n_blocks, stages, "even", [1.0] * n_blocks, [0.0] * stages))


def given(n_blocks: int, stages: int, split: str) -> list[int]:
    return sizes(partition(n_blocks, stages, split, [1.0] * n_blocks, [0.0] * stages))


def model(config: ModelConfig) -> Model:
    """A model of this configuration whose tensors lie nowhere: a plan is made from their shapes alone."""
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, c.dim), OUTPUT_NORM: (c.dim,)}
    if not c.tied:
        shapes[OUTPUT] = (c.vocab_size, c.dim)
    for i in range(c.n_blocks):
        block = {
            "attn_norm": (c.dim,),
            "attn_q": (q, c.dim),
            "attn_k": (kv, c.dim),
            "attn_v": (kv, c.dim),
            "attn_output": (c.dim, q),
            "ffn_norm": (c.dim,),
            "ffn_gate": (c.ffn_dim, c.dim),
            "ffn_up": (c.ffn_dim, c.dim),
            "ffn_down": (c.dim, c.ffn_dim),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    tensors = {name: TensorRef(name, Path("nowhere"), 0, 0, "F32", shape) for name, shape in shapes.items()}
    return Model("toy", Path("nowhere"), config, tensors, "cd" * 32, {}, "toy")


def planned(config: ModelConfig = SMOLLM2, **settings: object) -> Plan:
    return make_plan(model(config), Settings(**settings))  # type: ignore[arg-type]


def test_an_even_split_keeps_the_remainder_for_the_last_stage() -> None:
    assert even(30, 2) == [15, 15]
    assert even(30, 4) == [7, 7, 7, 9]
    assert even(5, 3) == [1, 1, 3]
    assert even(7, 1) == [7]
    assert even(3, 3) == [1, 1, 1]


@pytest.mark.parametrize("split", ["even", "auto"])
def test_one_stage_more_than_blocks_leaves_the_head_empty(split: str) -> None:
    spans = partition(4, 5, split, [1.0] * 4, [0.0] * 5)
    assert sizes(spans) == [0, 1, 1, 1, 1]
    assert spans[0] == Span(0, 0)


@pytest.mark.parametrize("split", ["even", "auto"])
@pytest.mark.parametrize("stages", [0, -1, 6, 100])
def test_more_stages_than_blocks_and_one_are_refused_with_both_numbers(split: str, stages: int) -> None:
    with pytest.raises(PlanError, match=rf"^{stages} stages for 4 blocks: give 1 to 5\b"):
        partition(4, stages, split, [1.0] * 4, [0.0] * max(stages, 0))


def test_an_explicit_split_is_taken_as_it_is() -> None:
    assert given(30, 3, "10,10,10") == [10, 10, 10]
    assert given(30, 3, "1,14,15") == [1, 14, 15]
    assert given(30, 3, "0,15,15") == [0, 15, 15]
    assert given(30, 3, " 10, 10 ,10 ") == [10, 10, 10]
    assert given(30, 1, "30") == [30]


@pytest.mark.parametrize(
    ("stages", "split", "told"),
    [
        (3, "15,15", ("'15,15'", "2 stages", "3 are asked for")),
        (2, "15,14", ("'15,14'", "29 blocks", "has 30")),
        (2, "20,20", ("40 blocks", "has 30")),
        (2, "30,0", ("'30,0'", "only stage 0")),
        (3, "15,0,15", ("only stage 0",)),
        (2, "fair", ("'fair'", "10,10,10")),
        (2, "15;15", ("'15;15'",)),
        (2, "-1,31", ("'-1,31'",)),
        (2, "15,15,", ("'15,15,'",)),
        (1, "", ("''",)),
        (2, "1.5,28.5", ("'1.5,28.5'",)),
        (2, "\u0661\u0665,15", ("neither even, auto nor",)),
        (2, "15," + "9" * 5000, ("numbers of blocks",)),
    ],
)
def test_a_split_that_does_not_tile_is_refused_by_name(stages: int, split: str, told: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as refusal:
        given(30, stages, split)
    for words in told:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(1, 5)],
        [Span(0, 4)],
        [Span(0, 6)],
        [Span(0, 2), Span(3, 5)],  # a gap
        [Span(0, 3), Span(2, 5)],  # an overlap
        [Span(2, 5), Span(0, 2)],  # swapped
        [Span(0, 2), Span(2, 2), Span(2, 5)],  # a hole
        [Span(0, 5), Span(5, 5)],
    ],
)
def test_spans_that_do_not_tile_make_no_plan(spans: list[Span]) -> None:
    with pytest.raises(PlanError):
        check_tiling(spans, 5)
    with pytest.raises(PlanError):
        replace(PLAN, spans=tuple(spans))


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2)])
def test_a_span_is_a_range(lo: int, hi: int) -> None:
    with pytest.raises(PlanError, match=rf"\[{lo}, {hi}\)"):
        Span(lo, hi)


def test_readout_is_at_one_of_the_ends() -> None:
    with pytest.raises(PlanError, match="'middle'"):
        replace(PLAN, readout="middle")
    ring, line = replace(PLAN, readout="first"), replace(PLAN, readout="last")
    assert (ring.readout_stage, ring.is_ring) == (0, True)
    assert (line.readout_stage, line.is_ring) == (1, False)


def test_one_stage_alone_is_no_ring() -> None:
    alone = replace(PLAN, spans=(Span(0, 5),), readout="first")
    assert (alone.readout_stage, alone.is_ring) == (0, False)


def test_every_field_changes_the_digest() -> None:
    others = {
        "spans": (Span(0, 3), Span(3, 5)),
        "fingerprint": "ab" * 31 + "ac",
        "wire": "f16",
        "readout": "first",
        "context": 2049,
        "slots": 5,
        "max_rows": 127,
        "weights": "quantized",
    }
    digests = {replace(PLAN, **{name: value}).digest for name, value in others.items()}  # type: ignore[arg-type]
    digests |= {PLAN.digest, replace(PLAN, spans=(Span(0, 2), Span(2, 6)), n_blocks=6).digest}
    assert {*others, "n_blocks"} == set(Plan.__dataclass_fields__)
    assert len(digests) == len(others) + 2
    assert all(len(digest) == 16 for digest in digests)


def test_equal_plans_have_equal_digests() -> None:
    assert replace(PLAN).digest == PLAN.digest


def test_to_json_is_what_a_result_shows_of_the_plan() -> None:
    assert PLAN.to_json() == {
        "spans": [[0, 2], [2, 5]],
        "wire": "bf16",
        "readout": "last",
        "digest": PLAN.digest.hex(),
    }


def test_auto_counts_the_readout_where_it_is() -> None:
    assert sizes(planned(num_stages=2, split="auto").spans) == [11, 19]  # tied: read out on the head
    assert sizes(planned(num_stages=2, split="auto", readout="last").spans) == [19, 11]
    assert sizes(planned(replace(SMOLLM2, tied=False), num_stages=2, split="auto").spans) == [19, 11]
    assert sizes(planned(num_stages=2).spans) == [15, 15]


def test_auto_readout_follows_the_output_head() -> None:
    untied = replace(SMOLLM2, tied=False)
    assert planned().readout == "first"
    assert planned(untied).readout == "last"
    assert planned(readout="last").readout == "last"
    assert planned(untied, readout="first").readout == "first"


def test_context_is_bounded_by_what_the_model_was_trained_for() -> None:
    assert planned().context == DEFAULT_CONTEXT
    assert planned(replace(SMOLLM2, context=512)).context == 512
    assert planned(context=8192).context == 8192
    with pytest.raises(PlanError, match=r"8193 .*8192 .*toy"):
        planned(context=8193)


def test_rows_of_a_frame_are_bounded_by_the_chunk_and_by_the_largest_frame() -> None:
    assert planned(prefill_chunk=64).max_rows == 64
    wide = replace(SMOLLM2, dim=1 << 20)
    for wire in ("bf16", "f32"):  # what is told for a verification is float32 in any case
        rows = planned(wide, wire=wire, prefill_chunk=4096).max_rows
        assert rows == MAX_FRAME_BYTES // (wide.dim * 4) - 1  # all but the one that header, lanes and tag need
    with pytest.raises(PlanError, match=rf"width {1 << 24}\b.* 4 lanes .*fewer slots"):
        planned(replace(SMOLLM2, dim=1 << 24, n_blocks=1), num_stages=1, slots=4)


def test_a_plan_carries_what_it_was_made_from() -> None:
    plan = planned(num_stages=3, split="0,10,20", wire="f16", slots=7)
    assert plan.spans == (Span(0, 0), Span(0, 10), Span(10, 30))
    assert (plan.n_blocks, plan.n_stages, plan.wire, plan.slots) == (30, 3, "f16", 7)
    assert plan.fingerprint == "cd" * 32


def test_memory_sizes() -> None:
    assert memory_sizes("8G,24G", 2) == [8 << 30, 24 << 30]
    assert memory_sizes("1.5m, 7000000, 2048KiB", 3) == [3 << 19, 7_000_000, 2 << 20]
    assert memory_sizes("1TB", 3) == [1 << 40] * 3


@pytest.mark.parametrize(
    "memory", ["", "8G", "8G,8G,8G", "8X,8G", "-1G,8G", "0,8G", "8G,,8G", "1e3,8G", "8,8", "\u0668G,8G"]
)
def test_memory_that_is_no_size_for_each_stage(memory: str) -> None:
    if memory == "8G":
        memory = "8G,"
    with pytest.raises(PlanError, match="memory"):
        memory_sizes(memory, 2)


def test_auto_fills_each_stage_by_its_memory() -> None:
    """Blocks go where there is room: a stage with three times the memory holds about three times the bytes."""
    plan = planned(num_stages=2, split="auto", memory="1G,3G", slots=4)
    held = [stage_bytes(model(SMOLLM2), plan, stage) for stage in range(2)]
    assert sizes(plan.spans) == [4, 26]  # float32: the head's embedding takes 113 MB
    assert 2.5 < held[1] / held[0] < 3.5
    assert sizes(planned(num_stages=2, split="auto", memory="8G", slots=4).spans) == [13, 17]  # the KV cache counts too
    assert sizes(planned(num_stages=2, split="auto").spans) == [11, 19]


def test_what_no_stage_can_hold_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        PlanError, match=r"stage 0 with blocks \[0, 15\) needs [45]\d\d MB .* has 105 MB.*--weights quantized"
    ):
        planned(num_stages=2, memory="100M,8G", slots=4)
    with pytest.raises(PlanError, match=r"stage 1 with blocks \[15, 30\)"):
        planned(num_stages=2, memory="8G,150M")
    with pytest.raises(PlanError, match=r"stage 0 with blocks \[0, 15\) needs 3\d\d MB .* has 105 MB"):
        planned(num_stages=2, memory="100M,8G")  # with one slot


SLOT = 15 * cache_bytes(model(SMOLLM2), 1, DEFAULT_CONTEXT)  # 47 MB, of one slot and half of the blocks


def test_there_are_sixteen_slots_where_nothing_is_said_of_memory() -> None:
    assert DEFAULT_SLOTS == 16
    assert planned(num_stages=2).slots == planned(num_stages=2, memory="8G", kv_bytes="8G").slots == 16
    assert planned(num_stages=2, slots=40).slots == 40


@pytest.mark.parametrize("slots", [1, 5, 15])
def test_there_are_fewer_slots_where_no_more_fit_the_memory(slots: int) -> None:
    needs = stage_bytes(model(SMOLLM2), planned(num_stages=2, slots=slots), 0)
    assert planned(num_stages=2, memory=f"{needs},8G").slots == slots
    if slots > 1:
        assert planned(num_stages=2, memory=f"{needs - 1},8G").slots == slots - 1


def test_what_the_memory_allows_is_found_for_each_number_of_slots_anew() -> None:
    """Their caches move the cut."""
    given = {"num_stages": 2, "split": "auto", "memory": "400M,650M"}
    plan = planned(**given)
    assert 1 < plan.slots < 16
    assert sizes(plan.spans) != sizes(planned(**given, slots=1).spans)
    for stage, size in enumerate((400, 650)):
        assert stage_bytes(model(SMOLLM2), plan, stage) <= size << 20
    assert planned(**given, slots=plan.slots) == plan
    with pytest.raises(PlanError, match="fewer slots"):
        planned(**given, slots=plan.slots + 1)


@pytest.mark.parametrize("slots", [1, 2, 7, 15])
def test_there_are_fewer_slots_where_no_more_fit_the_cache(slots: int) -> None:
    assert planned(num_stages=2, kv_bytes=str(SLOT * slots)).slots == slots
    assert planned(num_stages=2, kv_bytes=str(SLOT * (slots + 1) - 1)).slots == slots
    assert planned(num_stages=2, kv_bytes=str(SLOT * slots), context=DEFAULT_CONTEXT // 2).slots == min(2 * slots, 16)


def test_slots_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        PlanError,
        match=r"^stage 0 with blocks \[0, 15\) needs 142 MB of KV cache for 3 sequences of 2048 positions, "
        r"and --kv-bytes allows 94 MB: .*fewer slots",
    ):
        planned(num_stages=2, slots=3, kv_bytes=str(2 * SLOT))
    with pytest.raises(PlanError, match=r"needs 47 MB of KV cache for 1 sequences .* allows 47 MB"):
        planned(num_stages=2, kv_bytes=str(SLOT - 1))  # not even one
    with pytest.raises(PlanError, match=r"^stage 1 .*needs 967 MB for weights and KV cache, and has 900 MB"):
        planned(num_stages=2, slots=16, memory="8G,900000000")


@pytest.mark.parametrize("size", ["", "8X", "1G,1G", "8", "-1G"])
def test_a_bound_of_the_cache_that_is_no_size_is_named(size: str) -> None:
    with pytest.raises(PlanError, match=f"^--kv-bytes '{size}'"):
        planned(num_stages=2, kv_bytes=size)


def test_weights_kept_as_in_the_file_are_part_of_the_plan() -> None:
    assert planned(weights="quantized").digest != planned().digest
