"""Which machine serves which stage, and how many blocks each gets: by what it can hold, and how fast it reads.

Pure. A token waits for every stage to read its weights once, so a stage takes the bytes that it reads over its
machine's speed. The slowest stage sets the pace of a pipeline in which every stage is busy; that one is made as fast
as it can be, and among equals the sum of all, which one sequence alone waits for, is kept small.

A transformer's blocks are of one size; where a file's types differ, the largest counts for all of them. With that the
deal is the best there is: the machines differ only by who embeds and who reads out, which is tried for every pair, and
for each of those the blocks are dealt one by one, each to the machine that would then still be the fastest.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pptasks.config import Settings
from pptasks.errors import PlanError
from pptasks.guests import MAX_SEATS, Guest
from pptasks.modelinfo import Model, memory_bytes
from pptasks.plan import Plan, cache_bytes, make_plan, stage_bytes

WORKER_BYTES = 512 << 20  # of a worker besides weights and KV cache: Python, tinygrad, activations
KEEP_FREE = 0.1  # share of its free memory that a machine keeps


@dataclass(frozen=True)
class Deal:
    """`split` is PP_SPLIT, with which each machine makes the same plan again."""

    plan: Plan
    split: str
    seats: tuple[int, ...]  # of each stage
    slowest_s: float  # what the slowest stage takes for a token, by the guests' own measure


@dataclass(frozen=True)
class _Costs:
    """Bytes, with every block alike."""

    n_blocks: int
    block: int  # that a step reads
    block_held: int  # with its KV cache
    head: bool  # whether the head reads out (a ring), else the last stage (a line)
    readout: int  # that a step reads for the read-out
    embedding_held: int  # by the head besides its blocks: in a ring with what it reads out from
    readout_held: int  # by the last stage of a line besides its blocks; 0 in a ring

    def reads(self, stage: int, stages: int) -> int:
        return self.readout if stage == (0 if self.head else stages - 1) else 0

    def holds(self, stage: int, stages: int) -> int:
        """Besides its blocks."""
        return self.embedding_held if stage == 0 else self.readout_held if stage == stages - 1 else 0


def deal(model: Model, settings: Settings, guests: Mapping[int, Guest]) -> Deal:
    """Stages for guests, by their seats; all of them get one. Guests are alike whatever their seats.

    A split "a,b,..." in `settings` is kept, and its stages go to the guests by what they need and have. "even", which
    is what settings have when nobody chose, and "auto" leave the split to us; so are the slots, unless they were given:
    the most that fit. Raises PlanError, which names what is missing.
    """
    if not 1 <= len(guests) <= MAX_SEATS:
        raise PlanError(f"{len(guests)} machines: a run can be dealt to 1 to {MAX_SEATS}")
    if settings.slots is not None:
        return _deal(model, settings, guests)
    most = make_plan(model, replace(settings, stage=None, num_stages=len(guests), split="even", memory=None)).slots
    best, low, high, slots = None, 1, most, most
    obstacle = PlanError("no slots")
    while low <= high:  # what fits with more slots fits with fewer
        try:
            best, low = _deal(model, replace(settings, slots=slots), guests), slots + 1
        except PlanError as e:
            obstacle, high = e, slots - 1
        slots = (low + high) // 2
    if best is None:
        raise obstacle
    return best


def _deal(model: Model, settings: Settings, guests: Mapping[int, Guest]) -> Deal:
    settings = replace(settings, stage=None, num_stages=len(guests), memory=None)
    ranked = sorted(guests.values(), key=lambda guest: (-guest.speed, -guest.memory_bytes, guest.host, guest.seat))
    if "," in settings.split or settings.split.isdecimal():
        plan = make_plan(model, settings)
        order = _matched(model, plan, ranked)
    else:
        settings, order = _dealt(model, settings, ranked)
        plan = make_plan(model, settings)
    seconds = (read_bytes(model, plan, i) / guest.speed for i, guest in enumerate(order))
    return Deal(plan, settings.split, tuple(guest.seat for guest in order), max(seconds))


def room(guest: Guest) -> int:
    """Bytes of weights and KV cache that we let a guest hold."""
    return max(0, int(guest.memory_bytes * (1 - KEEP_FREE)) - WORKER_BYTES)


def read_bytes(model: Model, plan: Plan, stage: int) -> int:
    """Bytes of weights that a stage reads for a token; of an embedding that is one row."""
    span = plan.spans[stage]
    readout = stage == plan.readout_stage
    return memory_bytes(model.stage_tensors(span.lo, span.hi, embedding=False, readout=readout), plan.weights)


def _matched(model: Model, plan: Plan, ranked: Sequence[Guest]) -> list[Guest]:
    """The stage that needs most gets the guest that has most, and so on: if any match fits, this does."""
    needs = [stage_bytes(model, plan, stage) for stage in range(plan.n_stages)]
    largest = sorted(ranked, key=room, reverse=True)
    order = dict(zip(sorted(range(plan.n_stages), key=lambda stage: -needs[stage]), largest, strict=True))
    for stage, guest in order.items():
        if needs[stage] > room(guest):
            raise PlanError(_too_large(model, sum(needs), ranked, f"stage {stage} alone needs {_gb(needs[stage])}"))
    return [order[stage] for stage in range(plan.n_stages)]


def _dealt(model: Model, settings: Settings, ranked: Sequence[Guest]) -> tuple[Settings, list[Guest]]:
    even = make_plan(model, replace(settings, split="even"))  # what does not depend on the split, and its limits
    costs, stages = _costs(model, even), len(ranked)
    best: tuple[float, float] | None = None
    for order in _orders(ranked, costs):
        sizes = _dealt_out(order, costs)
        if sizes is None:
            continue
        times = [
            (n * costs.block + costs.reads(stage, stages)) / guest.speed
            for stage, (guest, n) in enumerate(zip(order, sizes, strict=True))
        ]
        goodness = max(times), sum(times)
        if best is None or goodness < best:
            best, chosen = goodness, (sizes, order)
    if best is None:
        needs = sum(stage_bytes(model, even, stage) for stage in range(stages))
        raise PlanError(_too_large(model, needs, ranked, f"a block needs {_gb(costs.block_held)}"))
    sizes, order = chosen
    return replace(settings, split=",".join(map(str, sizes))), order


def _orders(ranked: Sequence[Guest], costs: _Costs) -> Iterator[list[Guest]]:
    """Every head, and in a line every last stage with it; who is in between is alike."""
    for head in range(len(ranked)):
        rest = [*ranked[:head], *ranked[head + 1 :]]
        for last in range(1 if costs.head or not rest else len(rest)):
            yield [ranked[head], *rest[:last], *rest[last + 1 :], *rest[last : last + 1]]


def _dealt_out(order: Sequence[Guest], costs: _Costs) -> list[int] | None:
    """Blocks of each stage such that the slowest is as fast as can be; None if they do not fit."""
    stages = len(order)
    at_most = [(room(guest) - costs.holds(stage, stages)) // costs.block_held for stage, guest in enumerate(order)]
    sizes = [0, *[1] * (stages - 1)]  # only the head may keep no block
    if any(size > most for size, most in zip(sizes, at_most, strict=True)) or sum(at_most) < costs.n_blocks:
        return None

    def with_one_more(stage: int) -> tuple[float, int]:
        return ((sizes[stage] + 1) * costs.block + costs.reads(stage, stages)) / order[stage].speed, stage

    heap = [with_one_more(stage) for stage in range(stages) if sizes[stage] < at_most[stage]]
    heapq.heapify(heap)
    for _ in range(costs.n_blocks - sum(sizes)):
        _, stage = heapq.heappop(heap)
        sizes[stage] += 1
        if sizes[stage] < at_most[stage]:
            heapq.heappush(heap, with_one_more(stage))
    return sizes


def _costs(model: Model, even: Plan) -> _Costs:
    def held(embedding: bool, readout: bool) -> int:
        return memory_bytes(model.stage_tensors(0, 0, embedding=embedding, readout=readout), even.weights)

    blocks = (model.stage_tensors(i, i + 1, embedding=False, readout=False) for i in range(even.n_blocks))
    block, in_head = max(memory_bytes(tensors, even.weights) for tensors in blocks), even.readout_stage == 0
    return _Costs(
        n_blocks=even.n_blocks,
        block=block,
        block_held=block + cache_bytes(model, even.slots, even.context),
        head=in_head,
        readout=held(False, True),
        embedding_held=held(True, in_head),
        readout_held=0 if in_head else held(False, True),
    )


def _too_large(model: Model, needs: int, guests: Iterable[Guest], detail: str) -> str:
    rooms = sorted(((room(guest), guest.host) for guest in guests), reverse=True)
    have = f"{len(rooms)} machine{'s have' if len(rooms) > 1 else ' has'} {_gb(sum(size for size, _ in rooms))}"
    each = ", ".join(f"{host} {_gb(size)}" for size, host in rooms[:8]) + (", ..." if len(rooms) > 8 else "")
    return (
        f"{model.name} needs {_gb(needs)} for weights and KV cache ({detail}), and the {have} for them ({each}): "
        "let more or larger machines join, or use fewer slots, a smaller context, or --weights quantized"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
