"""`python -m workers.node`, or `pp-node`: all that a rented or joined machine runs. The link to the broker, and the
Celery worker of a stage behind it.

The environment says what to do: the variables of pptasks/config.py, and with PP_LINK_TICKET those of pptasks/peers.py,
for a broker that is reached through a link: then host and port in PP_BROKER do not matter. PP_DEADLINE is the Unix time
after which the machine must not work.

The worker stops before the link that it says goodbye through. A link that ends is started again on the same port; the
worker stops when it stays away. What both write goes to stderr, and the last lines of it to the broker, under the run's
keys, for as long as that can be reached. `--health` says whether this machine's worker is alive, from beside it: with a
link, it needs a fixed PP_LINK_PORT.

Exit code: 0 stopped by SIGTERM or SIGINT, or --health and healthy; 1 worker or link failed; 2 the environment does not
hold; 3 the deadline has passed.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import redis

from pptasks.config import Settings, bare_environment, child_environment, worker_module
from pptasks.connect import connect, through
from pptasks.errors import ConfigError, LinkError, PPError
from pptasks.keys import Keys
from pptasks.members import read_member
from pptasks.peers import LinkSettings
from workers.child import Log, running

STOPPED, FAILED, DEADLINE = 0, 1, 3
LINK_AWAY_S = 30.0  # without a link for that long: give up
LINK_PAUSE_S = 1.0  # before one that did not come up is started again; the worker waits for the other some seconds
TICK_S = 1.0


@dataclass(frozen=True)
class Job:
    """What this machine is to do. Raises ConfigError."""

    settings: Settings
    link: LinkSettings | None
    deadline: float  # Unix time

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Job":
        settings = Settings.from_env(environ)
        if settings.stage is None:
            raise ConfigError("STAGE is not set: give the index of the stage that this machine serves")
        _ = settings.secret_bytes  # there is one
        link = LinkSettings.from_environ(environ) if environ.get("PP_LINK_TICKET") else None
        try:
            deadline = float(environ.get("PP_DEADLINE") or math.inf)
        except ValueError:
            deadline = math.nan
        if math.isnan(deadline):
            raise ConfigError(f"PP_DEADLINE is {environ['PP_DEADLINE']!r}: give Unix time, a number of seconds")
        return cls(settings, link, deadline)

    @property
    def stage(self) -> int:
        return self.settings.stage or 0

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log may show. A password that is too short to be one would blot out words."""
        mine = (self.settings.secret, self.settings.hf_token, urlsplit(self.settings.broker).password)
        links = (self.link.key, self.link.secret, self.link.ticket) if self.link else ()
        return tuple(secret for secret in (*mine, *links) if secret and len(secret) >= 8)

    def broker(self, port: int | None) -> str:
        """The broker's URL, through the link's port if there is a link."""
        return self.settings.broker if port is None else through(self.settings.broker, port)


async def keep_link(job: Job, log: Log, port: asyncio.Future[int | None]) -> int:
    """The link, again and again. Sets `port` when it is up for the first time. Raises LinkError."""
    if job.link is None:
        raise LinkError("there is no link to keep")
    settings = replace(job.link, die_with_parent=str(os.getpid()))
    up_at = time.monotonic()
    while True:
        env = bare_environment() | settings.to_environ()
        async with running(log, env, "pptasks.link", "connect", announces=True) as link:
            announced = await link.stdout.readline() if link.stdout else b""
            if announced:
                settings = replace(settings, port=str(json.loads(announced)["port"]))
                if not port.done():
                    port.set_result(int(settings.port))
            await link.wait()
            if announced:
                up_at = time.monotonic()
        if link.returncode == ConfigError.exit_code:
            raise ConfigError("the link's variables do not hold: see above")
        if time.monotonic() - up_at > LINK_AWAY_S:
            raise LinkError(f"the link is not up after {LINK_AWAY_S:.0f} s of tries: see above")
        log.write(b"pptasks.node: the link has ended; starting it again")
        if not announced:
            await asyncio.sleep(LINK_PAUSE_S)


async def work(job: Job, log: Log, port: asyncio.Future[int | None]) -> int:
    """The worker, once there is a way to the broker. Its exit code."""
    url = job.broker(await port)
    sending = asyncio.create_task(log.keep_sending(url))
    try:
        env = child_environment(replace(job.settings, broker=url))
        async with running(log, env, *worker_module(job.stage)) as worker:
            code = await worker.wait()
        if code < 0:
            log.write(f"pptasks.node: the worker was ended by {signal.Signals(-code).name}; out of memory?".encode())
        return code if code >= 0 else FAILED
    finally:
        log.close()
        await sending


async def run(job: Job) -> int:
    """Work until told to stop, until the deadline, or until the worker or the link has failed. Raises PPError."""
    log, loop = Log(Keys(job.settings.run).log(job.stage), job.secrets), asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    port: asyncio.Future[int | None] = loop.create_future()
    if job.link is None:
        port.set_result(None)
    worker = asyncio.create_task(work(job, log, port))
    links = [asyncio.create_task(keep_link(job, log, port))] if job.link else []
    ends = [asyncio.create_task(until_told(signalled, job.deadline)), worker, *links]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return next(end for end in ends if end.done()).result()
    finally:
        for task in (worker, *links):  # in this order: the worker says goodbye through the link
            task.cancel()
            await asyncio.wait([task])


async def until_told(signalled: asyncio.Event, deadline: float) -> int:
    """Looks at the clock each second: one that is set, or a machine that slept, must not let the deadline pass."""
    while (left := deadline - time.time()) > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signalled.wait(), min(left, TICK_S))
            return STOPPED
    return DEADLINE


def healthy(job: Job) -> bool:
    """Whether the broker hears from this machine's worker, and it has not failed."""
    if job.link and job.link.port == "0":
        raise ConfigError("PP_LINK_PORT is not set: --health needs to know the port of the link")
    try:
        with connect(job.broker(int(job.link.port) if job.link else None)) as client:
            member = read_member(client, Keys(job.settings.run), job.stage)
    except redis.RedisError:
        member = None
    mine = member is not None and member.host == socket.gethostname()
    print(f"stage {job.stage}: {f'{member.state}, {member.phase}' if member and mine else 'no heartbeat'}")
    return mine and member is not None and member.state != "failed"


def be_init() -> None:
    """As process 1 of a container: go on in a child, forward signals to it, and reap what nobody else does."""
    child = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number) if child else sys.exit(STOPPED))
    child = os.fork()
    if child == 0:
        return
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else FAILED)


def main(args: list[str]) -> int:
    try:
        if args not in ([], ["--health"]):
            raise ConfigError("usage: python -m workers.node [--health], with the job in the environment")
        job = Job.from_env(os.environ)
        if args:
            return STOPPED if healthy(job) else FAILED
        if os.getpid() == 1:
            be_init()
        return asyncio.run(run(job))
    except PPError as error:
        print(f"pptasks: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def script() -> None:
    """`pp-node`, the same by another name."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    script()
