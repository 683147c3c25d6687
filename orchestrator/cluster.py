"""The machines of a run, here: processes on this one. Start, wait until every stage is ready, always tear down."""

import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import platformdirs
import redis

from orchestrator.broker import EmbeddedBroker, check_broker, purge, sweep
from orchestrator.process import TERM_S, Process
from pptasks.config import Settings, bare_environment, child_environment, worker_module
from pptasks.connect import connect, explain, through
from pptasks.errors import BrokerError, LinkError, NotReady, StageFailed, StorageError
from pptasks.keys import ENTRY, EXIT, Keys, stage_name
from pptasks.members import Member, check_ready, read_members, resolve
from pptasks.membership import Lease
from pptasks.plan import Plan
from pptasks.wire import key_id

if TYPE_CHECKING:
    from pptasks.peers import LinkSettings

log = logging.getLogger(__name__)

POLL_S = 0.05
LINK_UP_S = 25.0
EMBEDDED = "embedded"
KEEP_LOGS_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Options:
    """How a run is put up on this machine."""

    broker: str = EMBEDDED  # or a Redis URL
    broker_port: int | None = None
    link: str = "direct"  # or "iroh"
    relay: str = "none"
    timeout_s: float = 120.0


OnMembers = Callable[[Mapping[int, Member]], None]


class LocalCluster:
    """A context manager: inside it, every stage is ready and `settings` say how to reach the run.

    Whatever happens inside, or while it starts, every process that it started has ended when it is left, and no key of
    the run is left on a given Redis. Raises StageFailed, NotReady, BrokerError or LinkError while it starts.
    """

    def __init__(self, settings: Settings, plan: Plan, options: Options, on_members: OnMembers = lambda members: None):
        self.plan, self._options, self._on_members = plan, options, on_members
        self.settings = replace(
            settings,
            stage=None,
            lease=True,
            cache=settings.cache.resolve(),
            run=f"run-{secrets.token_hex(6)}",
            secret=secrets.token_hex(32),
        )
        self.keys = Keys(self.settings.run)
        self.workers: list[Process] = []
        self.members: dict[int, Member] = {}
        self.ready_s = 0.0
        self._stack = ExitStack()
        self._links: list[Process] = []
        self._broker: EmbeddedBroker | None = None
        self.folder = Path(platformdirs.user_state_dir("pptasks", appauthor=False)) / "runs" / self.settings.run

    def __enter__(self) -> "LocalCluster":
        began = time.monotonic()
        with ExitStack() as stack:
            self._start(stack)
            self._wait_until_ready(began + self._options.timeout_s)
            self._stack = stack.pop_all()
        self.ready_s = time.monotonic() - began
        for stage, member in sorted(self.members.items()):
            if member.gate_failure:
                log.warning("stage %d (%s kernels): %s", stage, member.kernels, member.gate_failure)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises StageFailed if a worker has ended, LinkError if a link has, BrokerError if the embedded broker has."""
        if self._broker is not None and not self._broker.is_running:
            raise BrokerError("the embedded broker has ended: start again, or give a Redis with --broker")
        for stage, worker in enumerate(self.workers):
            if worker.returncode is not None:
                raise self._failed(stage, worker.how_it_ended)
        for link in self._links:
            if link.returncode is not None:
                raise LinkError(f"{link.name} {link.how_it_ended}: {' | '.join(link.tail(3))}")

    def refresh(self) -> dict[int, Member]:
        """What the stages say of themselves now."""
        self.members = read_members(self._redis, self.keys, self.plan.n_stages)
        return self.members

    def progress(self) -> "Progress":
        """How far each stage is in what it does; changes while a stage fetches or loads."""
        try:
            return _progress_of(self.refresh())
        except redis.RedisError:  # whoever waits for tokens will notice
            return ()

    def _start(self, stack: ExitStack) -> None:
        self._make_folder()
        stack.push(self._drop_logs)
        stack.callback(self._end_all, self._links)
        self._start_broker(stack)
        self._redis = stack.enter_context(connect(self.settings.broker))
        stack.enter_context(Lease(self.settings.broker, self.keys))
        brokers = self._start_links() if self._options.link == "iroh" else [self.settings.broker] * self.plan.n_stages
        stack.callback(self._end_all, self.workers)
        for stage, broker in enumerate(brokers):
            self.workers.append(self._worker(stage, broker))

    def _make_folder(self) -> None:
        """The folder for this run's logs; those of failed runs go after a week."""
        try:
            self.folder.mkdir(parents=True, mode=0o700)
            for old in self.folder.parent.iterdir():
                if time.time() - old.stat().st_mtime > KEEP_LOGS_S:
                    shutil.rmtree(old, ignore_errors=True)
        except OSError as e:
            raise StorageError(
                f"cannot use {self.folder} for logs: {e.strerror}; set XDG_STATE_HOME to a folder of yours"
            ) from None

    def _start_broker(self, stack: ExitStack) -> None:
        if self._options.broker == EMBEDDED:
            self._broker = stack.enter_context(EmbeddedBroker(self._options.broker_port))
            url = self._broker.url
        else:
            url = self._options.broker
            check_broker(url)
            sweep(url)
            stack.callback(self._purge, url)
        self.settings = replace(self.settings, broker=url)

    def _purge(self, url: str) -> None:
        """Leave no key behind. That it fails must not hide why the run ended."""
        try:
            purge(url, self.keys.prefix)
        except BrokerError as e:
            log.warning("%s; the next run on it will", e)

    def _worker(self, stage: int, broker: str) -> Process:
        argv = [sys.executable, "-m", *worker_module(stage)]
        env = child_environment(replace(self.settings, stage=stage, broker=broker))
        return Process(f"stage {stage}", argv, env, self.folder / f"stage{stage}.log", cwd=self.folder)

    def _start_links(self) -> list[str]:
        """One link at the broker, one for each worker with a key of its own; the broker URL of each worker."""
        from pptasks.peers import LinkSettings, new_key, write_allow  # loads iroh, which a direct run does not need

        broker = urlsplit(self.settings.broker)
        if broker.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise LinkError(
                f"--link iroh serves a broker on this machine, not one at {broker.hostname}: "
                "run it there, or use --link direct"
            )
        target = f"{'[::1]' if broker.hostname == '::1' else '127.0.0.1'}:{broker.port or 6379}"
        secret, (key, _) = secrets.token_hex(32), new_key()
        peers = [new_key() for _ in range(self.plan.n_stages)]  # (secret key, id)
        allow = self.folder / "allow"
        write_allow(allow, [peer_id for _, peer_id in peers])
        common = {"secret": secret, "relay": self._options.relay, "die_with_parent": str(os.getpid())}
        served = self._link("serve", LinkSettings(key=key, target=target, allow=str(allow), **common), "link")
        ticket = self._announced(served)["ticket"]
        links = [
            self._link("connect", LinkSettings(key=peer, ticket=ticket, **common), f"link{stage}")
            for stage, (peer, _) in enumerate(peers)
        ]
        return [through(self.settings.broker, self._announced(link)["port"]) for link in links]

    def _link(self, end: str, settings: "LinkSettings", name: str) -> Process:
        argv = [sys.executable, "-m", "pptasks.link", end]
        self._links.append(
            Process(
                name,
                argv,
                bare_environment() | settings.to_environ(),
                self.folder / f"{name}.log",
                cwd=self.folder,
                pipe=True,
            )
        )
        return self._links[-1]

    def _announced(self, link: Process) -> dict[str, str]:
        line = link.read_line(LINK_UP_S)
        if not line:
            raise LinkError(
                f"{link.name} is not up after {LINK_UP_S:.0f} s: {' | '.join(link.tail(3)) or link.how_it_ended}"
            )
        return json.loads(line)

    def _wait_until_ready(self, deadline: float) -> None:
        """As long as some stage gets on with what it does, by bytes or by phases, the time starts anew."""
        at = self.progress()
        while True:
            self.check()
            try:
                members = self.refresh()
                if (now_at := _progress_of(members)) != at:
                    at, deadline = now_at, time.monotonic() + self._options.timeout_s
                self._on_members(members)
                if check_ready(members, self.plan, key_id(self.settings.secret_bytes)) and self._names_resolve():
                    return
            except StageFailed as e:
                raise StageFailed(str(e), self._last_words(e)) from None
            except redis.RedisError as e:
                raise BrokerError(f"the broker was lost while the stages started: {explain(e)}") from None
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{self._who_is_late(members)} within {self._options.timeout_s:g} s: "
                    f"look at {self.folder}, or raise --timeout"
                )
            time.sleep(POLL_S)

    def _names_resolve(self) -> bool:
        try:
            names = [ENTRY, EXIT, *(stage_name(i) for i in range(self.plan.n_stages))]
            return all(resolve(self._redis, self.keys, name) for name in names)
        except NotReady:
            return False

    def _who_is_late(self, members: Mapping[int, Member]) -> str:
        late = [i for i in range(self.plan.n_stages) if i not in members or members[i].state != "ready"]
        phases = [f"stage {i} ({members[i].phase if i in members else 'never said hello'})" for i in late]
        return f"{', '.join(phases)} {'was' if len(late) == 1 else 'were'} not ready"

    def _failed(self, stage: int, how: str) -> StageFailed:
        return StageFailed(f"stage {stage} {how}", self.workers[stage].tail())

    def _last_words(self, error: StageFailed) -> tuple[str, ...]:
        failed = [i for i, m in self.members.items() if m.state == "failed"]
        return self.workers[failed[0]].tail() if failed else error.log

    def _end_all(self, processes: list[Process]) -> None:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + TERM_S
        for process in processes:
            process.finish(max(0.0, deadline - time.monotonic()))

    def _drop_logs(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Logs are kept for whoever asks why a run failed."""
        if kind is None or not issubclass(kind, Exception):
            shutil.rmtree(self.folder, ignore_errors=True)


Progress = tuple[tuple[int, str, int], ...]


def _progress_of(members: Mapping[int, Member]) -> Progress:
    return tuple((stage, member.phase, member.done) for stage, member in sorted(members.items()))
