"""The machines of a run, here: processes on this one. Start, wait until every stage is ready, always tear down."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from orchestrator.process import Process, end_all, python
from orchestrator.run import Gate, Options, Run
from orchestrator.signals import check, held
from orchestrator.stages import Stages, progress_of
from pptasks.config import Settings, child_environment, worker_module
from pptasks.connect import through
from pptasks.errors import NotReady, StageFailed
from pptasks.members import Member
from pptasks.plan import Plan

log = logging.getLogger(__name__)

POLL_S = 0.05
OnMembers = Callable[[Mapping[int, Member]], None]


class LocalCluster:
    """A context manager: inside it, every stage is ready and `settings` say how to reach the run.

    Whatever happens inside, or while it starts, every process that it started has ended when it is left, and no key of
    the run is left on a given Redis. Raises StageFailed, NotReady, BrokerError or LinkError while it starts.
    """

    def __init__(self, settings: Settings, plan: Plan, options: Options, on_members: OnMembers = lambda members: None):
        self.plan, self._options, self._on_members = plan, options, on_members
        self._run = Run(settings, options)
        self.keys, self.folder = self._run.keys, self._run.folder
        self.workers: list[Process] = []
        self.ready_s = 0.0
        self._stack = ExitStack()

    @property
    def settings(self) -> Settings:
        return self._run.settings

    def __enter__(self) -> "LocalCluster":
        began = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(self._run)
            stack.callback(end_all, self.workers)
            with held():  # a worker whose start was interrupted would be nobody's
                self._start()
            check()
            self.stages = Stages(self._run.redis, self.plan, self.settings)
            self._wait_until_ready()
            self._stack = stack.pop_all()
        self.ready_s = time.monotonic() - began
        for stage, member in sorted(self.stages.members.items()):
            if member.gate_failure:
                log.warning("stage %d (%s kernels): %s", stage, member.kernels, member.gate_failure)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises StageFailed if a worker has ended, LinkError if a link has, BrokerError if the embedded broker has."""
        self._run.check()
        for stage, worker in enumerate(self.workers):
            if worker.returncode is not None:
                raise StageFailed(f"stage {stage} {worker.how_it_ended}", worker.tail())

    def _start(self) -> None:
        n_stages, broker = self.plan.n_stages, self.settings.broker
        brokers = self._link(self._run.serve()) if self._options.link == "iroh" else [broker] * n_stages
        for stage, url in enumerate(brokers):
            argv, env = (
                python(*worker_module(stage)),
                child_environment(replace(self.settings, stage=stage, broker=url, memory_share=1 / n_stages)),
            )
            log_file = self.folder / f"stage{stage}.log"
            self.workers.append(Process(f"stage {stage}", argv, env, log_file, cwd=self.folder))

    def _link(self, gate: Gate) -> list[str]:
        """A link for each worker, with a key of its own; the broker's URL as each sees it."""
        from pptasks.peers import LinkSettings, new_key

        links = []
        for stage in range(self.plan.n_stages):
            key, peer = new_key()
            gate.admit(peer)
            end = LinkSettings(key, gate.secret, ticket=gate.ticket, relay=gate.relay, die_with_parent=str(os.getpid()))
            links.append(self._run.start_link("connect", end, f"link{stage}"))
        return [through(self.settings.broker, self._run.announced(link)["port"]) for link in links]

    def _wait_until_ready(self) -> None:
        """As long as some stage gets on with what it does, by bytes or by phases, the time starts anew."""
        at, heard = self.stages.progress(), time.monotonic()
        while True:
            self.check()
            members = self.stages.refresh()
            if (now_at := progress_of(members)) != at:
                at, heard = now_at, time.monotonic()
            self._on_members(members)
            try:
                if self.stages.are_ready():
                    return
            except StageFailed as e:
                raise StageFailed(str(e), self._last_words(e)) from None
            if time.monotonic() - heard > self._options.timeout_s:
                raise NotReady(
                    f"{self.stages.late()} within {self._options.timeout_s:g} s: "
                    f"look at {self.folder}, or raise --timeout"
                )
            time.sleep(POLL_S)

    def _last_words(self, error: StageFailed) -> tuple[str, ...]:
        failed = [i for i, m in self.stages.members.items() if m.state == "failed"]
        return self.workers[failed[0]].tail() if failed else error.log
