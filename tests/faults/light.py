"""A stage that computes nothing, as a thread: it says hello, and that it is ready, as a worker does.

For scenes that fail before anybody asks a stage for anything: it starts in a fraction of a worker's time.
"""

import threading
from contextlib import suppress

from pptasks.config import Settings
from pptasks.errors import BrokerError
from pptasks.keys import Keys
from pptasks.membership import Membership
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.probe import expected
from pptasks.wire import key_id
from tests.fake_vast import Machine


class Nameless(Membership):
    """Answers to no name."""

    def _names(self) -> list[str]:
        return []


class Light:
    """What an instance runs, as the fake has it: a process that runs until it is told to stop.

    probe: what it says its device computed. phase: it stays in that one, and is never ready.
    """

    def __init__(
        self, machine: Machine, *, probe: str = "", phase: str = "", membership: type[Membership] = Membership
    ):
        self._settings = Settings.from_env(machine.env)
        self._probe, self._phase, self._membership = probe or expected(), phase, membership
        self._told, self._hushed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def terminate(self) -> None:
        self._told.set()
        self._hushed.set()

    kill = terminate

    def hush(self) -> None:
        """Run on, and say nothing any more."""
        self._hushed.set()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def _run(self) -> None:
        settings, stage = self._settings, self._settings.stage or 0
        model = open_model(settings.model, settings.cache, lambda *_: None, settings.hub)
        plan = make_plan(model, settings)
        span = plan.spans[stage].lo, plan.spans[stage].hi
        about = {"key_id": key_id(settings.secret_bytes), "digest": plan.digest.hex(), "probe": self._probe}
        with suppress(BrokerError), self._membership(  # the run may be over already
            settings.broker, Keys(settings.run), stage, settings.num_stages,
            node=f"light-{stage}", watch_lease=False, on_gone=lambda _: self.terminate(),
        ) as membership:  # fmt: skip
            state = {"phase": self._phase, "total": 10**9} if self._phase else {"state": "ready", "phase": "ready"}
            membership.update(span=span, **about, **state)
            self._hushed.wait()
        self._told.wait()
