"""Which sequence owns a slot of the KV cache, and how far it has come. The tensors themselves belong to `model.Slice`.

KV is addressed by position, so computing a position again writes the same values: a frame that comes twice does no
harm. The table makes it cheap as well, and keeps late frames of a sequence that ended from touching a slot that has a
new owner. Freeing a slot needs no message: position 0 of another request takes it over, or a lane that shares the first
positions of a sequence whose slot is still as it was.
"""

from dataclasses import dataclass
from enum import Enum

from pptasks.wire import Lane


class Place(Enum):
    RUN = "run"  # compute it
    DROP = "drop"  # done already, or of an older attempt, or of a sequence that has ended: its lap is an old one
    MISS = "miss"  # earlier positions are not in this cache


@dataclass(frozen=True)
class Owner:
    """The sequence in a slot. `next` is the first position that is not in the cache; `step` the last lap that wrote to
    it."""

    request: bytes
    step: int
    next: int


class SlotTable:
    """One stage's slots. A head numbers its laps in rising order, so whatever comes with an old step is late or
    doubled."""

    def __init__(self, n_slots: int, context: int):
        self._owners: list[Owner | None] = [None] * n_slots
        self._context = context

    def place(self, lane: Lane, step: int) -> Place:
        """Decide about a lane of lap `step`, and record it if it is to run. Then what it shares must be copied first.

        A slot or position that the cache does not have is a MISS: the head's plan and ours would differ, and the head
        must know.
        """
        end = lane.position + lane.length
        if lane.slot >= len(self._owners) or end > self._context:
            return Place.MISS
        owner = self._owners[lane.slot]
        if owner is not None and step <= owner.step:
            return Place.DROP
        held = owner.next if owner is not None and owner.request == lane.request else 0
        if lane.shared is not None:
            held = max(held, self._held(lane.shared.request, lane.shared.slot))
        if lane.position > held:
            return Place.MISS
        self._owners[lane.slot] = Owner(lane.request, step, end)
        return Place.RUN

    def forget(self, slot: int) -> None:
        """The computation of this slot failed half-way: its owner must start again."""
        self._owners[slot] = None

    def _held(self, request: bytes, slot: int) -> int:
        """Positions of a request that a slot holds."""
        owner = self._owners[slot] if slot < len(self._owners) else None
        return owner.next if owner is not None and owner.request == request else 0
