"""One machine in the place of a stage: asked for, told what to do, locked out and ended. The ledger knows it first."""

import time
from dataclasses import dataclass, field, replace

import redis

from orchestrator import labels, sweep
from orchestrator.acl import create_user, drop_user
from orchestrator.ledger import Ledger
from orchestrator.provider import Instance, Offer, Order, Provider
from orchestrator.run import Gate, Run
from orchestrator.sweep import Leftover, Say
from orchestrator.watch import START, Patience, Watch
from pptasks.config import Settings, environment_elsewhere
from pptasks.connect import explain
from pptasks.errors import BadKey, CreatedAnyway, NoCredit, OfferGone, PPError, ProviderError
from pptasks.keys import names_of
from pptasks.plan import Plan

LATER_S = 3.0  # after the deadline, at which the run ends its machines, they stop by themselves


@dataclass(frozen=True)
class Terms:
    """What is asked of every machine of a run, and how long and how dear it may be."""

    image: str
    command: str  # for /bin/sh -c, in the image
    deadline: float  # Unix time; each machine knows it too, see LATER_S
    budget_usd: float | None = None
    disk_gb: float = 20.0
    spot: bool = False
    patience: Patience = field(default_factory=Patience)
    hf_token: str = field(default="", repr=False)  # for the workers
    look_s: float = 2.0  # between two looks at what the provider shows


@dataclass
class Machine:
    """A machine that was asked for. `instance`, `watch` and `note` are its latest state."""

    stage: int
    offer: Offer
    label: str
    peer: str  # its id at the gate; "" without a link
    asked_at: float  # Unix time
    watch: Watch
    instance_id: str | None = None  # None: not known, or there is none
    instance: Instance | None = None
    ended_at: float | None = None
    note: str = ""

    @property
    def price_usd_hour(self) -> float:
        """As offered, or as it is billed if that is more."""
        return max(self.offer.price_usd_hour, self.instance.price_usd_hour if self.instance else 0.0)

    @property
    def cost_usd(self) -> float:
        """From the call that asked for it, which is a little too much."""
        return self.price_usd_hour * ((self.ended_at or time.time()) - self.asked_at) / 3600

    def __str__(self) -> str:
        place = f", {self.offer.geolocation}" if self.offer.geolocation else ""
        return f"machine {self.offer.machine_id} ({self.offer.gpu_name}{place})"


class Renter:
    """Rents machines of one provider for one run. `machines`: all that were ever asked for."""

    def __init__(self, run: Run, gate: Gate | None, plan: Plan, provider: Provider, ledger: Ledger, terms: Terms):
        self.machines: list[Machine] = []
        self._run, self._gate, self._plan = run, gate, plan
        self._provider, self._ledger, self._terms, self._owner = provider, ledger, terms, labels.owner()

    @property
    def spent_usd(self) -> float:
        return sum(machine.cost_usd for machine in self.machines)

    @property
    def prefix(self) -> str:
        """What the labels of all of them begin with."""
        return labels.of_run(self._owner, self._run.settings.run)

    def rent(self, stage: int, offer: Offer) -> Machine:
        """Raises as Provider.create. Whatever it raises, what may have come up is in the ledger."""
        label = str(labels.fresh(self._owner, self._run.settings.run, stage, int(self._terms.deadline)))
        machine = Machine(stage, offer, label, "", time.time(), Watch(START, time.monotonic(), began=time.monotonic()))
        order = self._order(machine)
        self.machines.append(machine)
        self._ledger.intend(
            label,
            run=self._run.settings.run,
            stage=stage,
            provider=self._provider.name,
            offer_id=offer.id,
            deadline=self._terms.deadline,
        )
        try:
            machine.instance_id = self._provider.create(offer, order)
        except (OfferGone, NoCredit, BadKey):
            self._ledger.refused(label)
            self._lock_out(machine)
            machine.ended_at = machine.asked_at
            raise
        except CreatedAnyway as error:
            machine.instance_id = error.instance_id
            self._ledger.created(label, error.instance_id)
            self.end(machine)
            raise
        except ProviderError:
            self._lock_out(machine)  # if it comes up after all, it finds no way in
            raise
        self._ledger.created(label, machine.instance_id)
        return machine

    def end(self, machine: Machine) -> bool:
        """Lock it out at once, and end it. False: not confirmed, whoever ends the run must see to it."""
        self._lock_out(machine)
        if machine.instance_id is None or machine.ended_at is not None:
            return machine.ended_at is not None
        try:
            self._provider.destroy(machine.instance_id)
        except ProviderError as error:
            machine.note = str(error)
            return False
        machine.ended_at = time.time()
        self._ledger.destroyed(machine.instance_id)
        return True

    def end_stray(self, instance: Instance) -> str:
        """End a machine of this run that has no place in it. Why it is not ended; empty if it is."""
        for machine in self.machines:
            if machine.label == instance.label and machine.ended_at is None:
                if machine.instance_id is None:
                    machine.instance_id = instance.id
                    self._ledger.created(machine.label, instance.id)
                return "" if self.end(machine) else f"{machine} is not ended yet, and bills: {machine.note}"
        return ""

    def lock_out_all(self) -> None:
        for machine in self.machines:
            if machine.ended_at is None:
                self._lock_out(machine)

    def left(self, say: Say) -> list[Leftover]:
        """What is not confirmed to be gone: by the ledger and the provider's list, and by what we remember, as the disk
        may fail."""
        run = self._run.settings.run
        try:
            found = sweep.find(self._ledger, [self._provider], say, owner=self._owner, run=run)
        except (PPError, OSError) as error:
            say(str(error))
            found = []
        known = {leftover.label for leftover in found}
        name, deadline = self._provider.name, self._terms.deadline
        return found + [
            Leftover(name, m.instance_id, m.label, run, m.stage, m.offer.price_usd_hour, deadline, "of this run")
            for m in self.machines
            if m.ended_at is None and m.label not in known
        ]

    def _order(self, machine: Machine) -> Order:
        """Its own key to the link and its own Redis user, new for each machine."""
        terms, settings = self._terms, self._run.settings
        user = create_user(self._run.redis, settings.run, machine.stage, self._plan.n_stages)
        broker = user.login(settings.broker)
        env: dict[str, str] = {"PP_DEADLINE": str(int(terms.deadline + LATER_S))}
        if self._gate is not None:
            from pptasks.connect import through
            from pptasks.peers import LinkSettings, new_key

            key, machine.peer = new_key()
            self._gate.admit(machine.peer)
            gate = self._gate
            env |= LinkSettings(key, gate.secret, ticket=gate.ticket, relay=gate.relay).to_environ()
            broker = through(broker, 6379)  # wherever the link's port is there
        worker = replace(settings, stage=machine.stage, broker=broker, hf_token=terms.hf_token)
        env |= self._environment(worker)
        price = machine.offer.price_usd_hour if terms.spot else None
        return Order(terms.image, machine.label, terms.command, env, terms.disk_gb, price)

    def _environment(self, worker: Settings) -> dict[str, str]:
        return worker.to_env() if self._provider.name == "local" else environment_elsewhere(worker)

    def _lock_out(self, machine: Machine) -> None:
        """And forget what it said, which would outlive it: the next machine of its stage speaks for itself."""
        run, stage = self._run, machine.stage
        names = (run.keys.name(name) for name in names_of(stage, self._plan.n_stages))
        try:
            if self._gate is not None:
                self._gate.dismiss(machine.peer)
            drop_user(run.redis, run.settings.run, stage)
            run.redis.delete(run.keys.member(stage), run.keys.lock(stage), run.keys.log(stage), *names)
        except (PPError, redis.RedisError, OSError) as error:  # which is gone then, and its users with it
            machine.note = explain(error)
