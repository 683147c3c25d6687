"""Readings of a pipeline from a real Redis: shared by all who ask, and harmless when there is none."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import redis

from orchestrator.broker import EmbeddedBroker
from orchestrator.serve.pipeline import EVERY_S, Readings, Snapshot
from pptasks.config import Settings
from pptasks.errors import BrokerError
from pptasks.keys import Keys, stage_queue
from pptasks.models import open_model
from pptasks.plan import make_plan

KEYS = Keys("test")


def readings_of(url: str, goldens: Path) -> Readings:
    model = open_model(str(goldens / "llama-tied"), cache=Path("/nonexistent"))
    settings = Settings(broker=url, run="test")
    return Readings(SimpleNamespace(plan=make_plan(model, settings), settings=settings), model)  # type: ignore[arg-type]


def test_one_reading_a_second_serves_all_who_ask(redis_url: str, goldens: Path) -> None:
    readings = readings_of(redis_url, goldens)

    async def ask() -> tuple[list[Snapshot], Snapshot]:
        at_once = await asyncio.gather(*(readings.latest() for _ in range(50)))
        await asyncio.sleep(EVERY_S + 0.05)
        return at_once, await readings.latest()

    with redis.Redis.from_url(redis_url) as client:
        client.lpush(KEYS.prefix + stage_queue(1), "a", "b")
        client.config_resetstat()
        at_once, later = asyncio.run(ask())
        assert client.info("commandstats")["cmdstat_llen"]["calls"] == 2 * 2  # two readings of two stages
    assert len({id(shot) for shot in at_once}) == 1
    assert later is not at_once[0]
    assert later.queues == (0, 2)
    assert later.present == frozenset()


def test_what_a_stranger_put_in_the_place_of_a_queue_or_a_record_is_none(redis_url: str, goldens: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set(KEYS.prefix + stage_queue(0), "no list")
        client.set(KEYS.member(0), "[" * 100_000)
        client.lpush(KEYS.member(1), "no text")
    shot = asyncio.run(readings_of(redis_url, goldens).latest())
    assert shot.queues == (0, 0)
    assert shot.present == frozenset()


def test_without_a_broker_all_are_told_at_once_and_the_loop_goes_on(goldens: Path) -> None:
    with EmbeddedBroker() as broker:
        url = broker.url
    readings, ticks = readings_of(url, goldens), list[float]()

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def ask() -> list[object]:
        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(*(readings.latest() for _ in range(20)), return_exceptions=True)
        ticking.cancel()
        return answers

    answers = asyncio.run(ask())
    assert {type(answer) for answer in answers} == {BrokerError}
    assert len({str(answer) for answer in answers}) == 1
    assert url.split("@")[0].split(":")[-1] not in str(answers[0])  # the password
    assert max((after - before for before, after in pairwise(ticks)), default=0.0) < 1.0
