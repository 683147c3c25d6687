"""A cluster that another process holds (`pp up`), as one that uses it sees it."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from orchestrator.clusters import Record
from orchestrator.folders import state_folder
from orchestrator.run import is_live
from orchestrator.stages import Stages
from pptasks.config import Settings
from pptasks.connect import connect
from pptasks.errors import NoSuchCluster, NotReady, StageFailed
from pptasks.plan import Plan

LOST_S = 20.0  # a stage may be silent for so long: whoever holds the cluster may replace it
CHECK_S = 1.0


class Attached:
    """A context manager. Leaving it ends nothing. Raises NoSuchCluster if nobody holds the cluster any more, NotReady
    while it starts."""

    def __init__(self, record: Record, settings: Settings, plan: Plan):
        self.settings, self.plan, self.ready_s = settings, plan, record.ready_s or 0.0
        self.folder: Path = state_folder() / "runs" / record.run
        self._record, self._stack = record, ExitStack()
        self._checked_at, self._heard = 0.0, dict[int, float]()

    def __enter__(self) -> "Attached":
        with ExitStack() as stack:
            client = stack.enter_context(connect(self.settings.broker))
            self.stages = Stages(client, self.plan, self.settings)
            self.stages.refresh()
            if not self.stages.are_ready():
                raise NotReady(f"cluster {self._record.name}: {self.stages.late()}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises NoSuchCluster if its holder has gone, StageFailed for a stage that has failed or is silent."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_S:
            return
        self._checked_at = now
        if not is_live(self._record.run):
            raise NoSuchCluster(f"cluster {self._record.name} is gone: pp up holds it no more")
        members = self.stages.refresh()
        for stage in range(self.plan.n_stages):
            member = members.get(stage)
            if member is not None and member.state == "failed":
                raise StageFailed(f"stage {stage} failed: {member.error}", self.stages.log(stage, 20))
            if member is not None or stage not in self._heard:
                self._heard[stage] = now
            elif now - self._heard[stage] > LOST_S:
                raise StageFailed(f"stage {stage} was lost: it is silent", self.stages.log(stage, 20))


def settings_of(record: Record) -> Settings:
    """How to reach the cluster. Raises NoSuchCluster, NotReady."""
    if not is_live(record.run):
        raise NoSuchCluster(f"cluster {record.name} is gone: pp up holds it no more; pp down {record.name} tidies up")
    if record.ready_s is None:
        raise NotReady(f"cluster {record.name} starts: wait until pp up says that it is ready")
    mine = Settings.of_this_machine()
    return replace(Settings.from_env(dict(record.settings)), hf_token=mine.hf_token, hf_home=mine.hf_home)
