"""Frames that are lost or doubled change no answer either, however slots change hands and prompts begin alike.

Real stages through real frames, with fewer slots than requests, so that what a lost lap would copy again is soon
somebody else's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import pytest

from pptasks.wire import Kind, Sampling, decode, short_id
from tests.pipeline import SECRET, Pipeline
from workers.scheduler import Sequence

TIED = Path(__file__).parents[1] / "goldens" / "llama-tied"
BEGINNINGS = tuple(tuple(a + i * b % 90 for i in range(60)) for a, b in ((3, 7), (5, 11)))  # what prompts share
SAMPLINGS = (Sampling(), Sampling(0.9, seed=1, frequency_penalty=0.5), Sampling(0.9, seed=2))
ROUNDS = 60


@dataclass
class Wire:
    """Loses a share of the frames, and doubles as many."""

    random: Random
    share: float = 0.0
    kinds: set[Kind] = field(default_factory=set)

    def __call__(self, data: bytes) -> list[bytes]:
        self.kinds.add(decode(data, SECRET).kind)
        drawn = self.random.random()
        return [] if drawn < self.share else [data, data] if drawn < 2 * self.share else [data]


@dataclass(frozen=True)
class Asked:
    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling


@cache
def whole() -> Pipeline:
    return Pipeline(TIED, slots=1, wire="f32", context=96)


@cache
def alone(asked: Asked) -> list[int]:
    whole().state.held.clear()  # nothing is shared
    return whole().generate(asked.ids, asked.max_tokens, sampling=asked.sampling)


def crowd(random: Random) -> Iterator[Asked]:
    for _ in range(random.randint(4, 9)):
        shared = random.choice(BEGINNINGS)[: random.choice([0, 17, 25, 40, 60])]
        own = [random.randint(3, 200) for _ in range(random.choice([1, 2, 5, 20]))]
        yield Asked((*shared, *own), random.randint(1, 8), random.choice(SAMPLINGS))


def serve(pipe: Pipeline, asked: list[Asked], random: Random, name: str) -> dict[Asked, Sequence]:
    """All of them, one after the other at some turn; a few are cancelled."""
    served, coming = {}, list(asked)
    while coming or any(True for _ in pipe.state.sequences()):
        if coming and (random.random() < 0.1 or not any(True for _ in pipe.state.sequences())):
            one, key = coming.pop(), f"{name}-{len(coming)}"
            served[one] = Sequence(
                key, short_id(key), list(one.ids), len(one.ids), one.max_tokens, frozenset(), one.sampling
            )
            pipe.state.waiting.append(served[one])
        if pipe.state.live and random.random() < 0.01:
            gone = random.choice(list(pipe.state.live.values()))
            pipe.state.end(gone)
            served = {one: sequence for one, sequence in served.items() if sequence is not gone}
        if any(True for _ in pipe.state.sequences()):
            pipe.turn()
    return served


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lost_or_doubled_changes_no_answer(seed: int) -> None:
    random = Random(seed)
    wire = Wire(random)
    pipe = Pipeline(TIED, stages=3, slots=4, wire="f32", context=96, prefill_chunk=24, tamper=wire)
    n_shared = n_lost = 0
    for i in range(ROUNDS):
        wire.share = random.choice([0.0, 0.02, 0.1])
        for one, sequence in serve(pipe, list(crowd(random)), random, f"{seed}-{i}").items():
            assert sequence.generated == alone(one), (i, sequence.request_id, sequence.shared, sequence.attempt)
            n_shared, n_lost = n_shared + bool(sequence.n_cached), n_lost + bool(sequence.attempt)
    assert n_shared > ROUNDS
    assert n_lost > ROUNDS


def test_without_a_fault_no_stage_lacks_a_position() -> None:
    random = Random(9)
    wire = Wire(random)
    pipe = Pipeline(TIED, stages=2, slots=3, wire="f32", context=96, prefill_chunk=48, tamper=wire)
    for i in range(ROUNDS):
        for one, sequence in serve(pipe, list(crowd(random)), random, f"whole-{i}").items():
            assert sequence.generated == alone(one)
            assert sequence.attempt == 0
    assert wire.kinds == {Kind.ACTIVATION, Kind.RETURN}
