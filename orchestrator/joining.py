"""The orchestrator's side of `pp up --join`: invites machines, waits until all are there, gives each its stage.

    table = Table(run, run.serve())
    for invitation in table.invite(3): print(f"pp join {invitation}")
    guests = table.wait(on_change, check)
    table.assign(deal(model, run.settings, guests), run.settings)

A guest's user can only say hello and read its own assignment; with that it gets its stage's user and the key of a
link of its own. The ticket's user and its link end at once, so that a ticket which is used again, or found, opens
nothing any more. Until then a machine that leaves makes room for the next one with its ticket.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import redis

from orchestrator.acl import create_guest, create_user, drop_guest, drop_user
from orchestrator.dealing import Deal
from pptasks.config import Settings
from pptasks.connect import explain
from pptasks.errors import BrokerError, NotReady, StageFailed, UsageError
from pptasks.guests import MAX_SEATS, Assignment, Guest
from pptasks.invitation import Invitation
from pptasks.membership import TTL_S

if TYPE_CHECKING:
    from orchestrator.run import Gate, Run

POLL_S = 0.1
ANSWER_S = 3 * TTL_S  # for a guest to take its stage: it asks every second, when its link is up
ASSIGNMENT_TTL_S = 60

OnChange = Callable[[Mapping[int, Guest]], None]


class Table:
    """The seats of one run. All methods raise BrokerError."""

    def __init__(self, run: "Run", gate: "Gate"):
        self._run, self._gate, self._redis, self._keys = run, gate, run.redis, run.keys
        self._peers: dict[int, str] = {}  # of each seat: the id of its link
        self._stage_peers: dict[int, str] = {}  # of each stage that is given
        self.dealt: dict[int, Guest] = {}  # of each stage, once it is assigned: who has it

    def invite(self, n: int) -> list[Invitation]:
        """Seats 1 to n. Each invitation is a secret, for one machine."""
        from pptasks.peers import new_key  # loads iroh, which not every command needs

        if not 1 <= n <= MAX_SEATS:
            raise UsageError(f"{n} machines cannot join one run: invite 1 to {MAX_SEATS}")
        invitations = []
        for seat in range(1, n + 1):
            key, self._peers[seat] = new_key()
            user = create_guest(self._redis, self._run.settings.run, seat)
            invitations.append(
                Invitation(
                    run=self._run.settings.run, seat=seat, ticket=self._gate.ticket, link_key=key,
                    link_secret=self._gate.secret, relay=self._gate.relay, user=user.name, password=user.password,
                )
            )  # fmt: skip
        self._gate.admit(*self._peers.values())
        return invitations

    def guests(self) -> dict[int, Guest]:
        """Who is there now, by seat; what is no record of a guest is nobody."""
        seats = list(self._peers)
        with self._broker():
            records = self._redis.mget([self._keys.guest(seat) for seat in seats]) if seats else []
        found = {}
        for seat, raw in zip(seats, records, strict=True):
            try:
                guest = Guest.from_json(raw or b"")
            except ValueError:
                continue
            if guest.seat == seat:
                found[seat] = guest
        return found

    def wait(self, on_change: OnChange, check: Callable[[], None]) -> dict[int, Guest]:
        """The guests, once there is one on every seat and all have been probed. Calls `check` while it waits, which
        may raise, and `on_change` with whoever is there when that has changed."""
        known: dict[int, Guest] = {}
        while True:
            check()
            if (guests := self.guests()) != known:
                known = guests
                on_change(guests)
            ready = sum(guest.is_ready for guest in guests.values())
            with self._broker():
                self._redis.set(self._keys.guests, f"{ready}/{len(self._peers)}")
            if ready == len(self._peers):
                return guests
            time.sleep(POLL_S)

    def assign(
        self, deal: Deal, settings: Settings, deadline: float = math.inf, check: Callable[[], None] = lambda: None
    ) -> None:
        """Give each guest its stage, and return when all of them have taken it and begin to load.

        Raises NotReady, or StageFailed, for a guest that left at that moment, or refuses. After that the run can only
        be ended: the others have begun.
        """
        here = self.guests()
        for seat in deal.seats:
            if seat not in here:
                raise NotReady(f"the machine on seat {seat} has left: wait for another")
        for stage, seat in enumerate(deal.seats):
            self.dealt[stage] = here[seat]
            self._write(stage, seat, deal, settings, deadline)
        waiting, until = set(deal.seats), time.monotonic() + ANSWER_S
        while waiting:
            check()
            here = self.guests()
            for stage, seat in enumerate(deal.seats):
                if seat in waiting and self._has_answered(stage, here.get(seat), time.monotonic() > until):
                    waiting.remove(seat)
                    self._end_seat(seat)
            time.sleep(POLL_S)

    def dismiss(self, seat: int) -> None:
        """Put the machine on a seat out at once, whether it has a stage or not; its ticket is void."""
        drop_guest(self._redis, self._run.settings.run, seat)
        for stage, guest in self.dealt.items():
            if guest.seat == seat:
                drop_user(self._redis, self._run.settings.run, stage)
                self._gate.dismiss(self._stage_peers[stage])
        self._gate.dismiss(self._peers[seat])

    def _write(self, stage: int, seat: int, deal: Deal, settings: Settings, deadline: float) -> None:
        from pptasks.peers import new_key

        n_stages = len(deal.seats)
        key, self._stage_peers[stage] = new_key()
        self._gate.admit(self._stage_peers[stage])
        user = create_user(self._redis, settings.run, stage, n_stages)
        db = self._redis.connection_pool.connection_kwargs.get("db") or 0
        theirs = replace(
            settings, stage=stage, num_stages=n_stages, split=deal.split, slots=deal.plan.slots, memory=None,
            broker=user.login(f"redis://broker:6379/{db}"),
        )  # fmt: skip
        with self._broker():
            record = Assignment(theirs, key, deadline).to_json()
            self._redis.set(self._keys.guest_stage(seat), record, ex=ASSIGNMENT_TTL_S)

    def _has_answered(self, stage: int, guest: Guest | None, is_late: bool) -> bool:
        who = f"{self.dealt[stage].host} (seat {self.dealt[stage].seat})"
        if guest is None or is_late:
            raise NotReady(f"{who} {'left' if guest is None else 'did not answer'} when it was given stage {stage}")
        if guest.phase == "failed":
            raise StageFailed(f"{who} refuses stage {stage}: {guest.error}")
        return guest.phase == "start"

    def _end_seat(self, seat: int) -> None:
        drop_guest(self._redis, self._run.settings.run, seat)
        self._gate.dismiss(self._peers[seat])
        with self._broker():
            self._redis.delete(self._keys.guest(seat), self._keys.guest_lock(seat), self._keys.guest_stage(seat))

    @contextmanager
    def _broker(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as e:
            raise BrokerError(f"the broker was lost: {explain(e)}") from None
