"""`python -m workers.join`: this machine takes a seat of a run, is given a stage of it, and serves that.

PP_INVITATION is the ticket that `pp up --join` printed (pptasks/invitation.py). PP_JOIN_TRUST=1: whoever runs it may
name a model of this machine's disk or network, and use its Hugging Face login and cache.

The link comes up, the seat's lock is taken, the machine is probed and measured (appraise.py), and says what it can do
for as long as it waits. With its stage it goes on as workers/node.py does: by another link, with another Redis user,
and with its own cache and access to models. Progress goes to stderr.

Exit code: 0 stopped by SIGTERM or SIGINT, at any time; 1 the run is gone, the seat is taken or dismissed, or this
machine is not fit; 2 the ticket or the environment does not hold; otherwise that of workers/node.py.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pptasks import invitation
from pptasks.config import Settings, bare_environment, child_environment
from pptasks.errors import ConfigError, LinkError, PPError, ProbeFailed
from pptasks.guests import MAX_TEXT, Assignment
from pptasks.invitation import Invitation
from pptasks.keys import Keys
from pptasks.membership import BEAT_S
from pptasks.peers import LinkSettings
from pptasks.plan import split_sizes
from workers.appraise import Appraisal
from workers.child import Log, running
from workers.node import STOPPED, Job, run
from workers.seat import Seat

SOCKET_TIMEOUT_S = 3.0  # below BROKER_GRACE_S and TTL_S
_COUNT = re.compile(rb"(\d{1,3})/(\d{1,3})", re.ASCII)


async def sit(invited: Invitation, trust: bool, log: Log) -> Job:
    """Take the seat, say what this machine can do, and wait for a stage. Raises PPError."""
    mine = Settings.of_this_machine()
    async with linked(invited, log) as client, taken(client, invited, log) as seat:
        appraising = asyncio.create_task(appraise(mine, log))
        try:
            while seat.stage is None:
                counted = seat.count
                await seat.beat()
                _check_cancelled()
                if seat.count != counted and seat.guest.is_ready:
                    log.write(_waiting(seat).encode())
                if seat.guest.is_ready:
                    await asyncio.sleep(BEAT_S)
                elif (await asyncio.wait([appraising], timeout=BEAT_S))[0]:
                    able = appraising.result()
                    seat.guest = replace(
                        seat.guest, phase="wait", device=able.device, memory_bytes=able.memory_bytes, speed=able.speed
                    )
                    log.write(f"pptasks: {_able(able)}".encode())
            given = Assignment.from_json(seat.stage, invited.run, mine, trust=trust)
            log.write(f"pptasks: {_given(given)}".encode())
        except PPError as error:
            seat.guest = replace(seat.guest, phase="failed", error=_one_line(error))
            raise
        finally:
            await _end(appraising)
        seat.guest = replace(seat.guest, phase="start")
        await seat.beat()  # the seat's user ends now: what follows is the stage's to say
    return Job(given.settings, replace(_link_of(invited), key=given.link_key), given.deadline)


@contextlib.asynccontextmanager
async def linked(invited: Invitation, log: Log) -> AsyncIterator[Redis]:
    """The run's broker, by the seat's link and as its user. Raises LinkError."""
    env = bare_environment() | replace(_link_of(invited), die_with_parent=str(os.getpid())).to_environ()
    async with running(log, env, "pptasks.link", "connect", announces=True) as link:
        announced = await link.stdout.readline() if link.stdout else b""
        if not announced:
            raise LinkError(
                "the run cannot be reached: the reason is above; is it still there, and this seat neither dismissed "
                "nor given a stage?"
            )
        log.write(b"pptasks: the link is up")
        login = f"{invited.user}:{quote(invited.password, safe='')}"
        url = f"redis://{login}@127.0.0.1:{json.loads(announced)['port']}"
        retry = Retry(NoBackoff(), 0)
        async with Redis.from_url(url, socket_timeout=SOCKET_TIMEOUT_S, retry=retry) as client:
            yield client


@contextlib.asynccontextmanager
async def taken(client: Redis, invited: Invitation, log: Log) -> AsyncIterator[Seat]:
    """The seat; given back when the block fails. If it ends well, the machine has a stage and the run ends the seat."""
    seat = Seat(client, Keys(invited.run), invited.seat)
    try:
        await seat.take()
        log.write(f"pptasks: seat {invited.seat} is taken; looking at what this machine can do".encode())
        yield seat
    except BaseException:
        await seat.leave()
        raise


async def appraise(mine: Settings, log: Log) -> Appraisal:
    """What appraise.py says of this machine. Raises ProbeFailed."""
    env = child_environment(replace(mine, hf_token=""))
    async with running(log, env, "workers.appraise", announces=True) as child:
        said = await child.stdout.readline() if child.stdout else b""
        if await child.wait() != 0:
            raise ProbeFailed("this machine is not fit for a stage: the reason is above")
    return Appraisal(**json.loads(said))


async def join(invited: Invitation, trust: bool) -> int:
    """Until told to stop, or as workers/node.py ends. Raises PPError."""
    secrets = (str(invited), invited.link_key, invited.link_secret, invited.ticket, invited.password)
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    told = asyncio.create_task(signalled.wait())
    sitting = asyncio.create_task(sit(invited, trust, Log("", secrets)))
    await asyncio.wait([sitting, told], return_when=asyncio.FIRST_COMPLETED)
    await _end(told, sitting)
    if signalled.is_set() or sitting.cancelled():
        return STOPPED
    return await run(sitting.result())  # which hears the signals from now on


def _check_cancelled() -> None:
    """Before Python 3.12 asyncio.wait_for, which redis-py sends with, may swallow a cancellation (cpython 86296)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _link_of(invited: Invitation) -> LinkSettings:
    return LinkSettings(invited.link_key, invited.link_secret, ticket=invited.ticket, relay=invited.relay)


def _able(able: Appraisal) -> str:
    return f"{able.device}, {able.memory_bytes / 1e9:.1f} GB free, reads {able.speed / 1e9:.1f} GB/s"


def _waiting(seat: Seat) -> str:
    count = _COUNT.fullmatch(seat.count)
    others = int(count[2]) - int(count[1]) if count else 0
    of = f" of {int(count[2])}" if count else ""
    return f"pptasks: seat {seat.guest.seat}{of} is ready; waiting for {others} other{'s' * (others != 1)}"


def _given(given: Assignment) -> str:
    settings, sizes = given.settings, split_sizes(given.settings.split)
    stage = settings.stage or 0
    lo, hi = sum(sizes[:stage]), sum(sizes[: stage + 1])
    until = f", until {time.strftime('%H:%M:%S', time.localtime(given.deadline))}" if given.deadline < math.inf else ""
    return f"stage {stage}, blocks [{lo}, {hi}) of {settings.model}{until}"


def _one_line(error: PPError) -> str:
    return "".join(c if c.isprintable() else " " for c in str(error))[:MAX_TEXT]


def main(args: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # until the loop has its own
    try:
        if args:
            raise ConfigError("usage: python -m workers.join, with the ticket in PP_INVITATION")
        return asyncio.run(
            join(invitation.parse(os.environ.get("PP_INVITATION", "")), os.environ.get("PP_JOIN_TRUST") == "1")
        )
    except PPError as error:
        print(f"pptasks: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:  # while the loop was not there
        return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
