"""A cluster of machines that join by a ticket (`pp join`): invited, dealt their stages, watched."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from orchestrator.board import Board, Row
from orchestrator.dealing import Deal, deal
from orchestrator.joining import Table
from orchestrator.run import Run
from orchestrator.signals import interruptible
from orchestrator.stages import Stages
from orchestrator.watch import START, Patience, Trouble, Watch, trouble
from pptasks.config import Settings
from pptasks.errors import DeadlineReached, NotReady, StageFailed
from pptasks.guests import Guest
from pptasks.invitation import Invitation
from pptasks.modelinfo import Model
from pptasks.plan import Plan

POLL_S = 0.2
LOG_LINES = 20
OnInvited = Callable[[Sequence[Invitation]], None]


class Joined:
    """A context manager, in a run that is entered already: inside it, every stage is ready.

    It waits for machines until the deadline (Unix time). One that leaves before the stages are dealt makes room for the
    next; one that leaves later is a StageFailed. Leaving the run is what ends the workers. Raises as Fleet does.
    """

    price_usd_hour = spent_usd = 0.0  # the machines are the users' own

    def __init__(
        self, run: Run, model: Model, n: int, deadline: float, patience: Patience, board: Board, on_invited: OnInvited
    ):
        self.deadline, self.ready_s = deadline, 0.0
        self._run, self._model, self._n = run, model, n
        self._patience, self._board, self._on_invited = patience, board, on_invited
        self._deal: Deal | None = None
        self._hosts: dict[int, Guest] = {}  # by stage
        self._watches: dict[int, Watch] = {}  # by stage

    @property
    def settings(self) -> Settings:
        """With the split that was dealt."""
        settings = self._run.settings
        deal = self._deal
        return replace(settings, split=deal.split, slots=deal.plan.slots, memory=None) if deal else settings

    @property
    def plan(self) -> Plan:
        if self._deal is None:
            raise NotReady("the stages are not dealt yet")
        return self._deal.plan

    @property
    def folder(self) -> Path:
        return self._run.folder

    def __enter__(self) -> "Joined":
        with interruptible():
            table = Table(self._run, self._run.serve())
            self._on_invited(table.invite(self._n))
            while self._deal is None:
                self._deal = self._dealt(table)
            began, self._hosts = time.monotonic(), table.dealt
            self.stages = Stages(self._run.redis, self.plan, self.settings)
            self._watches = {stage: Watch(START, began, began=began) for stage in self._hosts}
            while not self.tend():
                time.sleep(POLL_S)
            self.ready_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def tend(self) -> bool:
        """Whether every stage is ready and can be found by its name. Raises as `check`."""
        self.check()
        return self.stages.are_ready()

    def check(self) -> None:
        """Raises StageFailed for a stage that is stuck or lost, DeadlineReached, and what Run.check raises."""
        self._check_run()
        members, now = self.stages.refresh(), time.monotonic()
        for stage, watch in self._watches.items():
            member = members.get(stage)
            if wrong := trouble(watch, None, member, now, self._patience):
                raise self._failed(stage, wrong)
            self._watches[stage] = watch.seen(None, member, now, self._patience.step_s)
        self._board.show([self._row(stage) for stage in sorted(self._watches)], 0.0, None)

    def _check_run(self) -> None:
        self._run.check()
        if time.time() > self.deadline:
            raise DeadlineReached("the deadline has passed: give a later --deadline")

    def _dealt(self, table: Table) -> Deal | None:
        """None: a machine left at the last moment, and its place is free again."""
        guests = table.wait(self._tell_guests, self._check_run)
        dealt = deal(self._model, self._run.settings, guests)
        try:
            table.assign(dealt, self._run.settings, self.deadline, self._check_run)
        except NotReady as error:
            if table.dealt:  # the others have begun
                raise
            self._board.say(str(error))
            return None
        return dealt

    def _tell_guests(self, guests: Mapping[int, Guest]) -> None:
        there = [f"{guest.host} on seat {seat} ({_able(guest)})" for seat, guest in sorted(guests.items())]
        self._board.say(f"{len(guests)} of {self._n} machines: {', '.join(there) or 'none yet'}")

    def _failed(self, stage: int, wrong: Trouble) -> StageFailed:
        host = self._hosts[stage].host
        return StageFailed(f"stage {stage} on {host} {wrong.why}", self.stages.log(stage, LOG_LINES))

    def _row(self, stage: int) -> Row:
        member, watch, guest = self.stages.members.get(stage), self._watches[stage], self._hosts[stage]
        state = watch.step if member is not None else "asked" if watch.heard_at is None else "lost"
        done, total = (member.done, member.total) if member and member.state != "ready" else (0, 0)
        return Row(stage, f"{guest.host} ({guest.device})", 0.0, state, done, total, member.rtt_ms if member else None)


def _able(guest: Guest) -> str:
    if guest.phase == "failed":
        return f"failed: {guest.error}"
    if not guest.is_ready:
        return guest.phase
    return f"{guest.device}, {guest.memory_bytes / 1e9:.1f} GB free, {guest.speed / 1e9:.1f} GB/s"
