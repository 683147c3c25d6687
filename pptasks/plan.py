"""Who computes what: spans that tile the blocks, and the plan that every stage of a run must share.

Pure. A plan that does not tile is refused here, because a pipeline that skips a block would still write fluent text.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from pptasks.config import Settings
from pptasks.errors import PlanError
from pptasks.modelinfo import Model, memory_bytes
from pptasks.wire import DIGEST_BYTES, DTYPES, max_rows

DEFAULT_CONTEXT = 2048
DEFAULT_SLOTS = 16  # if they fit what --memory and --kv-bytes allow; else as many as do
CACHE_SHARE = 0.9  # of free memory, for weights and KV cache; steps need the rest
MIN_MEMORY = 1 << 20  # bytes; less is a unit that was forgotten


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range of blocks, `[lo, hi)`."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= self.hi:
            raise PlanError(f"span [{self.lo}, {self.hi}) is not a range of blocks")

    def __len__(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"[{self.lo}, {self.hi})"


@dataclass(frozen=True)
class Plan:
    """What the stages of a run agree on. Two stages with different plans refuse each other's frames.

    Raises PlanError unless the spans tile `[0, n_blocks)` in order and only the head's is empty.
    """

    spans: tuple[Span, ...]
    n_blocks: int
    fingerprint: str  # of the model
    wire: str  # dtype of the hidden state between stages: bf16, f16, f32
    readout: str  # "first": on the head, a ring; "last": on the last stage, a line
    context: int  # positions that a slot holds
    slots: int  # sequences in flight, where the stages' memory allows it (`Member.slots`)
    max_rows: int  # most rows of a frame
    weights: str = "16bit"  # how quantised weights are held: 16bit, quantized

    def __post_init__(self) -> None:
        check_tiling(self.spans, self.n_blocks)
        if self.readout not in ("first", "last"):
            raise PlanError(f"readout is {self.readout!r}: give first or last")

    @property
    def n_stages(self) -> int:
        return len(self.spans)

    @property
    def is_ring(self) -> bool:
        """True when the hidden state travels back to the head for its read-out; one stage alone needs no ring."""
        return self.readout == "first" and self.n_stages > 1

    @property
    def readout_stage(self) -> int:
        return 0 if self.readout == "first" else self.n_stages - 1

    @property
    def digest(self) -> bytes:
        """16 bytes that differ when anything in the plan does."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).digest()[:DIGEST_BYTES]

    def to_json(self) -> dict[str, Any]:
        return {
            "spans": [[s.lo, s.hi] for s in self.spans],
            "wire": self.wire,
            "readout": self.readout,
            "digest": self.digest.hex(),
        }


def make_plan(model: Model, settings: Settings) -> Plan:
    """The plan of a run. Every machine makes it again from the model's own header and its settings; the digests must
    agree.

    Raises PlanError.
    """
    obstacle = PlanError("no slots")
    for slots in [settings.slots] if settings.slots else range(DEFAULT_SLOTS, 0, -1):
        try:
            return _plan(model, replace(settings, slots=slots), slots)
        except TooLarge as e:
            obstacle = e
    raise obstacle


class TooLarge(PlanError):
    """Weights and KV cache are more than a stage may hold: fewer slots may do."""


def _plan(model: Model, settings: Settings, slots: int) -> Plan:
    config = model.config
    if settings.context is not None and settings.context > config.context:
        raise PlanError(
            f"context {settings.context} is more than the {config.context} positions that {model.name} was trained for"
        )
    rows = min(settings.prefill_chunk, max_rows(config.dim, DTYPES["f32"], slots))  # a TRACE is float32
    if rows < 1:
        raise PlanError(f"not one hidden state of width {config.dim} with {slots} lanes fits a frame: use fewer slots")
    readout = settings.readout if settings.readout != "auto" else "first" if config.tied else "last"
    context = settings.context or min(DEFAULT_CONTEXT, config.context)
    plan = Plan(
        spans=_spans_of(model, settings, slots, readout, context),
        n_blocks=config.n_blocks,
        fingerprint=model.fingerprint,
        wire=settings.wire,
        readout=readout,
        context=context,
        slots=slots,
        max_rows=rows,
        weights=settings.weights,
    )
    _check_memory(model, plan, settings)
    return plan


def stage_bytes(model: Model, plan: Plan, stage: int) -> int:
    """What a stage holds in memory for as long as it runs: its weights and its KV cache (float32)."""
    span = plan.spans[stage]
    tensors = model.stage_tensors(span.lo, span.hi, embedding=stage == 0, readout=stage == plan.readout_stage)
    return memory_bytes(tensors, plan.weights) + len(span) * cache_bytes(model, plan.slots, plan.context)


def slots_that_fit(model: Model, plan: Plan, stage: int, free: int) -> int:
    """As many of the plan's slots as a stage has room for in `free` bytes beside its weights; one at least, as a device
    that cannot hold that much says so itself."""
    each = len(plan.spans[stage]) * cache_bytes(model, 1, plan.context)
    room = int(free * CACHE_SHARE) - (stage_bytes(model, plan, stage) - plan.slots * each)
    return max(1, min(plan.slots, room // each)) if each else plan.slots


def cache_bytes(model: Model, slots: int, context: int) -> int:
    """Keys and values of one block."""
    return 2 * 4 * slots * context * model.config.n_kv_heads * model.config.head_dim


def _spans_of(model: Model, settings: Settings, slots: int, readout: str, context: int) -> tuple[Span, ...]:
    n_blocks, stages = model.config.n_blocks, settings.num_stages
    if settings.split != "auto" or settings.memory is None:
        return partition(n_blocks, stages, settings.split, *_parameter_costs(model, stages, readout))
    sizes = memory_sizes(settings.memory, stages)
    cache = cache_bytes(model, slots, context)
    blocks = [memory_bytes(model.block_tensors(i), settings.weights) + cache for i in range(n_blocks)]
    extra = [0] * stages
    for stage in {0, 0 if readout == "first" else stages - 1}:
        reads = stage == (0 if readout == "first" else stages - 1)
        tensors = model.stage_tensors(0, 0, embedding=stage == 0, readout=reads)
        extra[stage] = memory_bytes(tensors, settings.weights)
    return partition(n_blocks, stages, "auto", blocks, extra, sizes)


def _check_memory(model: Model, plan: Plan, settings: Settings) -> None:
    """Raises TooLarge."""
    if settings.kv_bytes is not None:
        [most] = memory_sizes(settings.kv_bytes, 1, "--kv-bytes")
        for stage, span in enumerate(plan.spans):
            if (need := len(span) * cache_bytes(model, plan.slots, plan.context)) > most:
                raise TooLarge(
                    f"stage {stage} with blocks {span} needs {need / 1e6:,.0f} MB of KV cache for {plan.slots} "
                    f"sequences of {plan.context} positions, and --kv-bytes allows {most / 1e6:,.0f} MB: "
                    "use more stages, fewer slots, or a smaller context"
                )
    if settings.memory is None:
        return
    for stage, size in enumerate(memory_sizes(settings.memory, plan.n_stages)):
        need = stage_bytes(model, plan, stage)
        if need > size:
            who = f"stage {stage} with blocks {plan.spans[stage]}"
            raise TooLarge(
                f"{who} needs {need / 1e6:,.0f} MB for weights and KV cache, and has {size / 1e6:,.0f} MB: "
                "use more stages, --split auto, fewer slots, a smaller context, or --weights quantized"
            )


def memory_sizes(memory: str, stages: int, name: str = "memory") -> list[int]:
    """Bytes in "8G,24G" (K, M, G, T are powers of 1024; one size stands for every stage). Raises PlanError."""
    pattern = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
    parts = [pattern.fullmatch(part.strip()) for part in memory.split(",")]
    if not all(parts):
        raise PlanError(f"{name} {memory!r} is no list of sizes such as 8G,24G")
    sizes = [int(float(m[1]) * 1024 ** " KMGT".index(m[2].upper() or " ")) for m in parts if m]
    if len(sizes) == 1:
        sizes *= stages
    if len(sizes) != stages:
        raise PlanError(f"{name} {memory!r} names {len(sizes)} sizes for {stages} stages; give one, or one for each")
    if min(sizes) < MIN_MEMORY:
        raise PlanError(f"{name} {memory!r} names a size of {min(sizes)} bytes; write 8G for 8 GiB")
    return sizes


def _parameter_costs(model: Model, stages: int, readout: str) -> tuple[list[float], list[float]]:
    """Parameters that a step reads: of each block, and of each stage's read-out."""
    blocks = [float(sum(prod(t.shape) for t in model.block_tensors(i))) for i in range(model.config.n_blocks)]
    extra = [0.0] * stages
    extra[0 if readout == "first" else -1] = float(model.config.vocab_size * model.config.dim)
    return blocks, extra


def check_tiling(spans: Sequence[Span], n_blocks: int) -> None:
    """Raises PlanError unless `spans` tile `[0, n_blocks)` without gap or overlap, and only the first may be empty."""
    if not spans:
        raise PlanError("a plan needs at least one stage")
    shown = " ".join(map(str, spans))
    if spans[0].lo != 0 or spans[-1].hi != n_blocks or any(a.hi != b.lo for a, b in pairwise(spans)):
        raise PlanError(f"spans {shown} do not tile the {n_blocks} blocks of the model")
    if any(len(s) == 0 for s in spans[1:]):
        raise PlanError(f"spans {shown}: only stage 0 may keep no block")


def partition(
    n_blocks: int,
    stages: int,
    split: str,
    block_costs: Sequence[float],
    readout_costs: Sequence[float],
    capacities: Sequence[float] | None = None,
) -> tuple[Span, ...]:
    """Cut `n_blocks` blocks into `stages` spans.

    `split` is "even" (blocks // stages each, the remainder on the last), "auto" (the largest cost of a stage, by its
    capacity, is as small as it can be) or the blocks of each stage, "10,10,10". `block_costs` has one cost a block,
    `readout_costs` one a stage for what it holds besides, `capacities` one a stage, equal if not given. Raises
    PlanError for a split that does not tile, or more stages than blocks + 1.
    """
    if split not in ("even", "auto"):
        return _given(n_blocks, stages, split)
    if not 1 <= stages <= n_blocks + 1:
        raise PlanError(
            f"{stages} stages for {n_blocks} blocks: give 1 to {n_blocks + 1}, as only the head may keep no block"
        )
    if stages == n_blocks + 1:
        sizes = [0] + [1] * n_blocks
    elif split == "even":
        each = n_blocks // stages
        sizes = [each] * (stages - 1) + [n_blocks - each * (stages - 1)]
    else:
        sizes = _balanced(block_costs, readout_costs, capacities or [1.0] * stages)
    return _spans(sizes)


def _given(n_blocks: int, stages: int, split: str) -> tuple[Span, ...]:
    sizes = split_sizes(split)
    if len(sizes) != stages:
        raise PlanError(f"split {split!r} names {len(sizes)} stages, but {stages} are asked for")
    if sum(sizes) != n_blocks:
        raise PlanError(f"split {split!r} covers {sum(sizes)} blocks, but the model has {n_blocks}")
    if 0 in sizes[1:]:
        raise PlanError(f"split {split!r}: only stage 0 may keep no block")
    return _spans(sizes)


def split_sizes(split: str) -> list[int]:
    """The blocks of each stage in "a,b,...". Raises PlanError for anything else."""
    parts = [p.strip() for p in split.split(",")]
    if not all(p.isascii() and p.isdigit() and len(p) < 7 for p in parts):
        raise PlanError(f"split {split!r} is neither even, auto nor numbers of blocks such as 10,10,10")
    return [int(p) for p in parts]


def _spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return tuple(Span(lo, hi) for lo, hi in pairwise(edges))


def _balanced(costs: Sequence[float], extra: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """Blocks of each stage such that the largest load of a stage is least, and among those the sum of squares."""
    largest = _best_cut(costs, extra, capacities, lambda total, load: max(total, load), None)[0]
    return _best_cut(costs, extra, capacities, lambda total, load: total + load * load, largest)[1]


def _best_cut(
    costs: Sequence[float], extra: Sequence[float], capacities: Sequence[float], join: Any, limit: float | None
) -> tuple[float, list[int]]:
    """Dynamic programming over the cuts: best[k] = (value, sizes) with k blocks dealt to the stages so far."""
    n, stages, prefix = len(costs), len(extra), [0.0]
    for c in costs:
        prefix.append(prefix[-1] + c)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (value, sizes) in best.items():
            for end in range(start + (stage > 0), n - (stages - 1 - stage) + 1):
                load = (prefix[end] - prefix[start] + extra[stage]) / capacities[stage]
                if limit is not None and load > limit:
                    continue
                joined = join(value, load)
                if end not in after or joined < after[end][0]:
                    after[end] = (joined, [*sizes, end - start])
        best = after
    return best[n]
