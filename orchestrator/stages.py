"""What the stages of a run say of themselves, as a cluster and whoever uses one see it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import redis

from pptasks.config import Settings
from pptasks.connect import explain
from pptasks.errors import BrokerError, NotReady
from pptasks.keys import ENTRY, EXIT, Keys, stage_name
from pptasks.members import Member, check_ready, read_members, resolve
from pptasks.plan import Plan
from pptasks.shown import MAX_LINE, line
from pptasks.wire import key_id

# The last ARGV[1] elements of a list, each cut to ARGV[2] bytes, one at a time: whoever wrote them chose their size.
_TAIL = """
local tail = {}
for i = -ARGV[1], -1 do
    local element = redis.call('LINDEX', KEYS[1], i)
    if element then tail[#tail + 1] = string.sub(element, 1, ARGV[2]) end
end
return tail
"""

Progress = tuple[tuple[int, str, int], ...]


class Stages:
    """`members`: as they were at the last `refresh`."""

    def __init__(self, client: redis.Redis, plan: Plan, settings: Settings):
        self.plan, self.members = plan, dict[int, Member]()
        self._redis, self._keys, self._key_id = client, Keys(settings.run), key_id(settings.secret_bytes)

    def refresh(self) -> dict[int, Member]:
        """What they say now. Raises BrokerError."""
        try:
            self.members = read_members(self._redis, self._keys, self.plan.n_stages)
        except redis.RedisError as e:
            raise BrokerError(f"the broker was lost: {explain(e)}") from None
        return self.members

    def forget(self, stage: int) -> None:
        """What a stage said last: whoever said it has been replaced."""
        self.members = {i: member for i, member in self.members.items() if i != stage}

    def progress(self) -> Progress:
        """How far each is in what it does, read anew; changes while one fetches or loads."""
        try:
            return progress_of(self.refresh())
        except BrokerError:  # whoever waits for tokens will notice
            return ()

    def are_ready(self) -> bool:
        """Whether all of `members` are one pipeline that can be found by name. Raises as `check_ready`."""
        return check_ready(self.members, self.plan, self._key_id) and self._names_resolve()

    def late(self) -> str:
        """Which are not ready, and what they do instead."""
        members, n_stages = self.members, self.plan.n_stages
        late = [i for i in range(n_stages) if i not in members or members[i].state != "ready"]
        phases = [f"stage {i} ({members[i].phase if i in members else 'never said hello'})" for i in late]
        return f"{', '.join(phases)} {'was' if len(late) == 1 else 'were'} not ready"

    def log(self, stage: int, lines: int) -> tuple[str, ...]:
        """The last lines that the machine of a stage sent (workers/node.py), oldest first, as they may be shown; none
        if there are none."""
        try:
            raw = self._redis.eval(_TAIL, 1, self._keys.log(stage), lines, MAX_LINE)
        except redis.RedisError:
            return ()
        return tuple(line(sent.decode(errors="replace")) for sent in raw)

    def _names_resolve(self) -> bool:
        try:
            names = [ENTRY, EXIT, *(stage_name(i) for i in range(self.plan.n_stages))]
            return all(resolve(self._redis, self._keys, name) for name in names)
        except NotReady:
            return False
        except redis.RedisError as e:
            raise BrokerError(f"the broker was lost: {explain(e)}") from None


def progress_of(members: Mapping[int, Member]) -> Progress:
    return tuple((stage, member.phase, member.done) for stage, member in sorted(members.items()))


class Cluster(Protocol):
    """A pipeline that is ready, whoever put it up. `settings` say how to reach it, `folder` has its logs."""

    @property
    def settings(self) -> Settings: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def stages(self) -> Stages: ...
    @property
    def folder(self) -> Path: ...
    @property
    def ready_s(self) -> float: ...

    def check(self) -> None:
        """Raises StageFailed, LinkError or BrokerError if a part of it has ended."""
