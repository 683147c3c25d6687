"""Every queue name and Redis key of a run, and nowhere else.

All of them carry the run's prefix: kombu puts it before queues, bindings, results and channels (`global_keyprefix`),
`Keys` before our own.
"""

from dataclasses import dataclass

ENTRY, EXIT = "pp-entry", "pp-exit"


def stage_queue(stage: int) -> str:
    """Name of a stage's queue as Celery knows it, without the prefix: what `-Q` takes."""
    return f"stage{stage}"


def stage_name(stage: int) -> str:
    """Name of a stage in the directory; also the first part of its Celery node name."""
    return f"pp-stage-{stage}"


def names_of(stage: int, n_stages: int) -> tuple[str, ...]:
    """All names that a stage goes by: its own, and pp-entry or pp-exit at the ends."""
    entry = (ENTRY,) if stage == 0 else ()
    exit_ = (EXIT,) if stage == n_stages - 1 else ()
    return (stage_name(stage), *entry, *exit_)


ALL_OWNERS = "pp:*:owner"  # what SCAN matches for every run's `Keys.owner`


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    return key.split(":")[1]


@dataclass(frozen=True)
class Keys:
    """Full Redis keys of the run `run`."""

    run: str

    @property
    def prefix(self) -> str:
        return f"pp:{self.run}:"

    @property
    def lease(self) -> str:
        """Held by whoever started the run; workers leave when it is gone."""
        return f"{self.prefix}lease"

    @property
    def owner(self) -> str:
        """Who started the run, for as long as it has keys: marks a run that an orchestrator may clean up after."""
        return f"{self.prefix}owner"

    def lock(self, stage: int) -> str:
        """Held by the one worker that serves a stage."""
        return f"{self.prefix}lock:{stage}"

    def member(self, stage: int) -> str:
        """What the worker of a stage says of itself, with a TTL."""
        return f"{self.prefix}member:{stage}"

    def name(self, name: str) -> str:
        """Who answers to a name such as pp-entry, with a TTL."""
        return f"{self.prefix}name:{name}"

    def stream(self, request_id: str) -> str:
        """The tokens of a request as they come: a Redis stream."""
        return f"{self.prefix}stream:{request_id}"

    def log(self, stage: int) -> str:
        """The last lines that the machine of a stage wrote: a list, see workers/node.py."""
        return f"{self.prefix}log:{stage}"

    def guest(self, seat: int) -> str:
        """What the machine on a seat says of itself before it has a stage, with a TTL: see guests.py."""
        return f"{self.prefix}guest:{seat}"

    def guest_lock(self, seat: int) -> str:
        """Held by the one machine that has taken a seat."""
        return f"{self.prefix}guest-lock:{seat}"

    def guest_stage(self, seat: int) -> str:
        """The assignment of the machine on a seat: only it may read that."""
        return f"{self.prefix}guest-stage:{seat}"

    @property
    def guests(self) -> str:
        """How many seats are taken by machines that are ready, and how many there are: "2/3"."""
        return f"{self.prefix}guests"
