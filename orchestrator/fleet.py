"""A cluster of machines that are rented: asked for, watched, replaced where they are stuck, and always ended."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from orchestrator import signals, sweep
from orchestrator.board import Board, Row
from orchestrator.ledger import Ledger
from orchestrator.offers import Choice
from orchestrator.provider import Instance, Offer, Provider
from orchestrator.renting import Machine, Renter, Terms
from orchestrator.run import Run
from orchestrator.signals import interruptible, uninterrupted
from orchestrator.stages import Stages
from orchestrator.watch import READY, Trouble, trouble
from pptasks.config import Settings
from pptasks.errors import (
    BadKey,
    BudgetReached,
    DeadlineReached,
    NoCredit,
    NotReady,
    OfferGone,
    ProviderError,
    StageFailed,
)
from pptasks.plan import Plan

POLL_S = 0.2
REPLACEMENTS = 2  # of one stage, until all have been ready for SETTLED_S
SETTLED_S = 600.0
STRAYS_S = 30.0  # between two tries to end what was given up
UNANSWERED = 3  # creates without an answer, until we give up: each may have made a machine
LOG_LINES = 20
SENT_S = 1.5  # within which a machine sends what it wrote: more than workers/child.py waits between two sends
More = Callable[[frozenset[str]], Iterable[Offer]]  # given the machine ids that were tried


class Fleet:
    """A context manager: inside it, every stage is ready and `settings` say how to reach the run, which is entered
    already. linked: the machines reach it through a link. more: further offers, once the spares are gone, on machines
    that were not tried.

    Whatever happens, every machine that it asked for is ended when it is left, or named in StillBilling, whose context
    is the error that was on its way. Raises besides: StageFailed with the last lines of the worker's log,
    NotReady, BudgetReached, DeadlineReached, and what the provider, the broker and the link raise.
    """

    def __init__(
        self, run: Run, plan: Plan, terms: Terms, choice: Choice, provider: Provider, ledger: Ledger, board: Board,
        *, linked: bool = True, more: More = lambda tried: (),
    ):  # fmt: skip
        self.plan, self.terms, self.ready_s = plan, terms, 0.0
        self._run, self._linked = run, linked
        self._provider, self._ledger, self.board = provider, ledger, board
        self._firsts, self._spares, self._more = choice.stages, deque(choice.spares), more
        self._places: dict[int, Machine] = {}
        self._replaced = [0] * plan.n_stages
        self._looked_at = self._all_ready_at = self._strays_at = 0.0

    @property
    def settings(self) -> Settings:
        return self._run.settings

    @property
    def folder(self) -> Path:
        return self._run.folder

    @property
    def deadline(self) -> float:
        return self.terms.deadline

    @property
    def price_usd_hour(self) -> float:
        """Of the machines that are there now."""
        return sum(machine.price_usd_hour for machine in self._places.values())

    @property
    def spent_usd(self) -> float:
        return self._renter.spent_usd

    def __enter__(self) -> "Fleet":
        began = time.monotonic()
        gate = self._run.serve() if self._linked else None
        self.stages = Stages(self._run.redis, self.plan, self.settings)
        self._renter = Renter(self._run, gate, self.plan, self._provider, self._ledger, self.terms)
        try:
            with interruptible():
                for stage, offer in enumerate(self._firsts):
                    self._fill(stage, offer)
                while not self.tend():
                    time.sleep(POLL_S)
        except BaseException:
            self._end()
            raise
        self.ready_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def check(self) -> None:
        """Raises StageFailed for a stage that is lost, and what is raised while it starts."""
        for machine, found in self._look():
            raise self._failed(machine, found)

    def tend(self) -> bool:
        """Replace what is stuck or lost. Whether every stage is ready and can be found by its name."""
        for machine, found in self._look():
            self._replace(machine, found)
        members = self.stages.members
        all_ready = len(members) == self.plan.n_stages and all(m.state == "ready" for m in members.values())
        self._all_ready_at = self._all_ready_at or time.monotonic() if all_ready else 0.0
        if self.stages.are_ready():
            if time.monotonic() - self._all_ready_at > SETTLED_S:
                self._replaced = [0] * self.plan.n_stages
            return True
        if all_ready and time.monotonic() - self._all_ready_at > self.terms.patience.step_s:
            raise NotReady("every stage is ready, but their names do not resolve: is another program at the broker?")
        return False

    def _look(self) -> list[tuple[Machine, Trouble]]:
        """Everything once, and what is wrong with which machine. Raises what concerns all of them."""
        self._run.check()
        self._check_limits()
        self._look_at_provider()
        members, now = self.stages.refresh(), time.monotonic()
        found = []
        for stage, machine in sorted(self._places.items()):
            member, patience = members.get(stage), self.terms.patience
            wrong = trouble(machine.watch, machine.instance, member, now, patience)
            machine.watch = machine.watch.seen(machine.instance, member, now, patience.step_s)
            if wrong is not None:
                found.append((machine, wrong))
        self._show()
        return found

    def _check_limits(self) -> None:
        signals.check()
        if time.time() > self.terms.deadline:
            raise DeadlineReached("the deadline has passed: give a later --deadline")
        budget = self.terms.budget_usd
        if budget is not None and self.spent_usd >= budget:
            raise BudgetReached(f"the budget of ${budget:.2f} is spent: give a higher --budget-usd")

    def _look_at_provider(self) -> None:
        """How the provider shows each machine, every `look_s`. One that does not answer now may answer later."""
        now = time.monotonic()
        if now - self._looked_at < self.terms.look_s:
            return
        try:
            shown = {instance.id: instance for instance in self._provider.list(self._renter.prefix)}
            for machine in self._places.values():
                machine.instance = shown.get(machine.instance_id or "") or self._again(machine)
            self._end_strays(shown.values())
        except BadKey:
            raise
        except ProviderError as error:
            self.board.say(f"{self._provider.name}: {error}")
        self._looked_at = time.monotonic()

    def _end_strays(self, shown: Iterable[Instance]) -> None:
        """Machines that were given up, and bill: their end failed, or they came up late. Now and then."""
        if time.monotonic() - self._strays_at < STRAYS_S:
            return
        kept = {machine.label for machine in self._places.values()}
        for instance in shown:
            if instance.label not in kept and (why := self._renter.end_stray(instance)):
                self.board.say(why)
                self._strays_at = time.monotonic()

    def _again(self, machine: Machine) -> Instance | None:
        """What is not listed: asked for by its id before it counts as gone."""
        return self._provider.get(machine.instance_id or "") if machine.watch.shown else None

    def _fill(self, stage: int, offer: Offer | None = None) -> None:
        """A machine for a stage: the offer, or the first spare that can still be had."""
        unanswered = 0
        while True:
            if offer is None:
                offer = self._next_spare(stage)
            self._check_limits()
            self._show()
            try:
                self._places[stage] = self._renter.rent(stage, offer)
                return
            except (NoCredit, BadKey):
                raise
            except ProviderError as error:
                unanswered += not isinstance(error, OfferGone)
                self.board.say(f"stage {stage}: {error}; taking another offer")
                if unanswered >= UNANSWERED:
                    raise
            offer = None

    def _next_spare(self, stage: int) -> Offer:
        if not self._spares:
            tried = frozenset(machine.offer.machine_id for machine in self._renter.machines)
            self._spares.extend(self._more(tried))
            if not self._spares:
                raise ProviderError(
                    f"stage {stage} has no machine, and no offer is left ({len(tried)} machines tried): "
                    "try again later, or ask for less"
                )
        return self._spares.popleft()

    def _replace(self, machine: Machine, found: Trouble) -> None:
        stage = machine.stage
        if not found.replaceable or self._replaced[stage] >= REPLACEMENTS:
            raise self._failed(machine, found)
        try:
            offer = self._next_spare(stage)
        except ProviderError as error:
            raise self._failed(machine, found) from error
        self._replaced[stage] += 1
        self.board.say(f"stage {stage}: {machine} {found.why}; taking another machine")
        del self._places[stage]
        self._renter.end(machine)
        self.stages.forget(stage)
        self._fill(stage, offer)

    def _failed(self, machine: Machine, found: Trouble) -> StageFailed:
        stage = machine.stage
        remedy = "" if found.replaceable else self._remedy(found)
        return StageFailed(f"stage {stage} on {machine} {found.why}{remedy}", self._last_words(machine))

    def _remedy(self, found: Trouble) -> str:
        ended = found.why.startswith("its machine has ended")
        return f": push the image {self.terms.image} where it can be pulled, or give --image" if ended else ""

    def _last_words(self, machine: Machine) -> tuple[str, ...]:
        """The worker's own log over Redis, else the provider's."""
        if machine.watch.heard_at is not None:
            time.sleep(SENT_S)  # what it wrote last may still be on its way
        lines = self.stages.log(machine.stage, LOG_LINES)
        if not lines and machine.instance_id is not None:
            try:
                lines = tuple(self._provider.logs(machine.instance_id, LOG_LINES).splitlines())
            except ProviderError as error:
                lines = (f"(no log: {error})",)
        return lines

    def _show(self) -> None:
        rows = [self._row(stage) for stage in range(self.plan.n_stages)]
        self.board.show(rows, self.spent_usd, self.terms.budget_usd)

    def _row(self, stage: int) -> Row:
        machine, member = self._places.get(stage), self.stages.members.get(stage)
        if machine is None:
            return Row(stage, "", 0.0, "asked", 0, 0, None, "")
        instance, watch = machine.instance, machine.watch
        state = watch.step if member is not None or watch.heard_at is not None else "asked"
        if member is None and instance is not None:
            state = instance.state.value
        return Row(
            stage,
            str(machine),
            machine.price_usd_hour,
            "lost" if member is None and watch.heard_at is not None else state,
            1 if state == READY else member.done if member else 0,
            1 if state == READY else member.total if member else 0,
            member.rtt_ms if member and member.rtt_ms else None,
            instance.status if instance and member is None else "",
        )

    def _end(self) -> None:
        """Every machine of the run, also one that came up after we gave up on it. The provider's list has the last
        word."""
        if not self._renter.machines:
            return
        with uninterrupted():
            self.board.say("ending all machines of this run")
            found = self._renter.left(self.board.say)
            left = sweep.end(found, [self._provider], self._ledger, self.board.say)
            again = [machine for machine in self._renter.left(self.board.say) if machine.listed] if not left else []
            self._renter.lock_out_all()
            if left := left or sweep.end(again, [self._provider], self._ledger, self.board.say):
                raise sweep.still_billing(left)
