"""The worker's one compute thread. Its loop is a sentence: drain the inbox, schedule, step, send.

Only this thread touches tinygrad, the KV cache and the scheduler's state. Celery's loop stays free: it answers pings
while a step computes, and puts what arrives into the inbox.
"""

import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pptasks.config import Settings
from pptasks.errors import AuditFailed, BrokerError, ConfigError, PPError, RequestError, RequestFailed, WireError
from pptasks.keys import stage_queue
from pptasks.membership import Membership
from pptasks.plan import Plan
from pptasks.routing import HEAD, route
from pptasks.sender import HopSender
from pptasks.tasks import Hop, Submit
from pptasks.wire import ErrorCode, Frame, Kind, encode, key_id, short_id
from workers.head import Head
from workers.loader import Loader, choose_compiler
from workers.reporter import Reporter
from workers.session import is_id, reply_of
from workers.stage import Stage
from workers.verify import Verification, verify

if TYPE_CHECKING:
    from pptasks.text import Text

log = logging.getLogger(__name__)

TICK_S = 0.25  # how soon a revoke or a late lap is noticed
RETRY_S = 0.5  # between two tries to connect
IDLE_S = 0.002  # an empty inbox for that long


class Stop:
    """Put into the inbox: leave the loop."""


@dataclass(frozen=True)
class Restarted:
    """Put into the head's inbox: the worker of a stage is a new one."""

    stage: int


Item = Hop | Submit | Restarted | Stop


class Engine:
    """Loads its stage, then serves it. `inbox` and `refused` are the side that other threads use."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        connect: Callable[[], HopSender],
        reporter: Reporter,
        on_failure: Callable[[BaseException], None],
    ):
        if settings.stage is None:
            raise ConfigError("STAGE is not set: a worker needs the index of its stage")
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.secret = settings.secret_bytes
        self.n_refused = 0
        self._settings, self._index, self._membership = settings, settings.stage, membership
        self._connect, self._reporter, self._on_failure = connect, reporter, on_failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way, then end."""
        self.inbox.put(Stop())
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def refused(self, error: PPError) -> None:
        """Count a message that is not served. Logged at 1, 2, 4, 8, ... so that a flood does not fill the log."""
        self.n_refused += 1
        if self.n_refused & (self.n_refused - 1) == 0:
            log.warning("refused a message (%d so far): %s", self.n_refused, error)

    def _run(self) -> None:
        try:
            stage, head = self._load()
            self._sender = self._open_sender()
            gc.freeze()  # what was loaded stays: a full collection in the middle of a lap would look at all of it
            self._membership.update(state="ready", phase="ready")
            self._say_ready(stage)
            self._serve(stage, head)
        except BaseException as e:
            if not isinstance(e, PPError):  # which says all there is to say
                log.exception("stage %d failed", self._index)
            self._fail_waiting(e)
            self._on_failure(e)

    def _fail_waiting(self, error: BaseException) -> None:
        """Requests that came and were never looked at: they are acknowledged, so nobody else will tell."""
        for item in self._take(0.0):
            if isinstance(item, Submit) and is_id(item.request.id):
                what = RequestFailed(f"stage {self._index} failed before this request began: {_words(error)}")
                self._reporter.failed(item.request, reply_of(item.request), what)

    def _open_sender(self) -> HopSender:
        """The broker may be away for a moment. One that stays away, membership notices too."""
        until = time.monotonic() + self._settings.broker_grace_s
        while True:
            try:
                return self._connect()
            except BrokerError as e:
                if time.monotonic() > until:
                    raise
                log.warning("%s; trying again", e)
                time.sleep(RETRY_S)

    def _say_ready(self, stage: Stage) -> None:
        """For whoever reads the log of a worker: Celery's own "ready" comes before the model is loaded."""
        slice_, span = stage.slice, stage.plan.spans[self._index]
        held = f"{slice_.weights_bytes / 1e6:.0f} MB of weights, {slice_.kernels_used} kernels on {slice_.device}"
        print(f"pptasks: stage {self._index} is ready: blocks {span}, {held}", file=sys.stderr, flush=True)

    def _load(self) -> tuple[Stage, Head | None]:
        settings, index, member = self._settings, self._index, self._membership
        loader = Loader(settings, self._progress)
        plan, clock = loader.plan, member.broker_clock_us()
        self._reporter.start(clock)
        span = plan.spans[index]
        member.update(key_id=key_id(self.secret), digest=plan.digest.hex(), span=(span.lo, span.hi))
        text = self._open_text(loader) if index == HEAD else None  # refused before weights are fetched
        choose_compiler(settings)
        from workers.probe import probe  # imports tinygrad, which takes a second: say hello first

        self._progress("probe", 0, 1)
        member.update(probe=probe(settings.kernels))  # no layer goes to a device that cannot multiply
        slice_ = loader.stage(index)
        member.update(
            device=slice_.device,
            weights_bytes=slice_.weights_bytes,
            kernels=slice_.kernels_used,
            gate_failure=slice_.gate_failure,
            arithmetic=slice_.arithmetic,
            slots=slice_.n_slots,
            kv_bytes=slice_.cache_bytes,
        )
        member.update(compiles=slice_.warm())
        stage = Stage(plan, index, short_id(settings.run), slice_)
        head = self._make_head(stage, loader, text, clock) if text is not None else None
        member.watch_figures(partial(self._figures, stage, head))
        return stage, head

    def _figures(self, stage: Stage, head: Head | None) -> dict[str, Any]:
        """How the worker does, for its record; asked on another thread."""
        return {
            "at_us": time.monotonic_ns() // 1000, "steps": stage.n_steps, "rows": stage.n_rows,
            "lanes": stage.n_lanes, "busy_us": stage.busy_us, "refused": self.n_refused,
            **(head.figures() if head is not None else {}),
        }  # fmt: skip

    def _open_text(self, loader: Loader) -> "Text":
        from pptasks.text import open_text  # only the head opens the tokenizer

        loader.model.source.fetch_text(self._progress)
        return open_text(loader.model)

    def _make_head(self, stage: Stage, loader: Loader, text: "Text", clock: int) -> Head:
        membership, settings = self._membership, self._settings
        membership.watch_restarts(lambda stage: self.inbox.put(Restarted(stage)))
        return Head(
            stage,
            text,
            self._reporter,
            lap_deadline_s=settings.lap_deadline_s,
            vocab_size=loader.model.config.vocab_size,
            first_step=clock,
            max_lanes=settings.lanes,
            in_flight=settings.in_flight or stage.plan.n_stages,
            max_waiting=settings.max_waiting,
            everyone_ready=partial(membership.slots_of_all, stage.plan),
            verify=self._verifies(loader) if settings.verify else None,
        )

    def _verifies(self, loader: Loader) -> Callable[..., Verification]:
        return partial(
            verify,
            loader.model,
            loader.plan,
            open_slice=loader.slice,
            arithmetics=self._membership.arithmetics,
            on_progress=self._progress,
        )

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._membership.update(phase=phase, done=done, total=total)

    def _serve(self, stage: Stage, head: Head | None) -> None:
        try:
            self._serve_until_stopped(stage, head)
        finally:
            if head is not None:
                head.close()

    def _serve_until_stopped(self, stage: Stage, head: Head | None) -> None:
        for items in self._drain():
            for item in items:
                if isinstance(item, Submit):
                    self._submit(item, head)
                elif isinstance(item, Restarted):
                    if head is not None:
                        head.stage_restarted(item.stage)
                elif item.frame.kind is Kind.ACTIVATION and stage.index != HEAD:
                    self._step(stage, item.frame)
                else:
                    self._receive(stage, head, item.frame)
            if head is not None:
                self._schedule(stage, head)

    def _drain(self) -> Iterator[list[Hop | Submit | Restarted]]:
        """All that is in the inbox, as soon as there is something; nothing when a tick passes without."""
        while True:
            items = self._take(IDLE_S)
            if not items:  # time for what no lap waits for
                self._confirm()
                items = self._take(TICK_S)
            yield [item for item in items if not isinstance(item, Stop)]
            if any(isinstance(item, Stop) for item in items):
                return

    def _take(self, timeout_s: float) -> list[Item]:
        items: list[Item] = []
        try:
            items.append(self.inbox.get(timeout=timeout_s))
            while True:
                items.append(self.inbox.get_nowait())
        except queue.Empty:
            return items

    def _submit(self, item: Submit, head: Head | None) -> None:
        if head is not None:
            head.submit(item.request)
        elif is_id(item.request.id):
            self._reporter.failed(
                item.request,
                item.request.id,
                RequestError(f"a request came to {stage_queue(self._index)}: send it to {stage_queue(HEAD)}"),
            )

    def _schedule(self, stage: Stage, head: Head) -> None:
        head.tick()
        while (batch := head.next_batch()) is not None:
            try:
                self._send(stage.plan, stage.start(batch))
            except Exception as e:
                head.fail_lanes(batch.lanes, self._cannot_compute(e))
                self._survive(e, batch.step)
            if not self.inbox.empty():
                return  # what came meanwhile may free a slot or bring tokens: look before the next lap

    def _step(self, stage: Stage, frame: Frame) -> None:
        try:
            frames = stage.step(frame)
        except WireError as e:
            self.refused(e)
            return
        except Exception as e:
            self._send(stage.plan, [stage.error(ErrorCode.FAILED, frame.step, frame.lanes, _words(e))])
            self._survive(e, frame.step)
        else:
            self._send(stage.plan, frames)

    def _receive(self, stage: Stage, head: Head | None, frame: Frame) -> None:
        try:
            stage.check(frame)
            if head is None:
                raise WireError(f"stage {self._index} is not the head, but got a frame of kind {frame.kind.name}")
            head.receive(frame)
        except WireError as e:
            self.refused(e)
        except Exception as e:
            if head is None:
                raise
            head.fail_lanes(frame.lanes, self._cannot_compute(e))
            self._survive(e, frame.step)

    def _survive(self, error: Exception, step: int) -> None:
        """A lap that failed is its requests' loss; a device whose products are wrong must compute no other."""
        if isinstance(error, AuditFailed):
            raise error
        log.error("lap %d failed", step, exc_info=error)

    def _cannot_compute(self, error: Exception) -> RequestFailed:
        return RequestFailed(f"stage {self._index} could not compute: {_words(error)}")

    def _send(self, plan: Plan, frames: list[Frame]) -> None:
        for frame in frames:
            to = route(plan, self._index, frame.kind)
            if to == self._index:
                self.inbox.put(Hop(frame))
                continue
            try:
                self._send_behind(stage_queue(to), encode(frame, self.secret))
            except WireError as e:  # what another stage put into the lap cannot be handed on
                self.refused(e)

    def _send_behind(self, queue_name: str, data: bytes) -> None:
        try:
            self._sender.send(queue_name, data)
        except BrokerError as e:
            log.warning("a frame is lost, its lap will be sent again: %s", e)

    def _confirm(self) -> None:
        """Read the broker's answers to what was sent, so that a dead connection is noticed without the next frame."""
        try:
            self._sender.drain()
        except BrokerError as e:
            log.warning("frames are lost, their laps will be sent again: %s", e)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, PPError) else f"{type(error).__name__}: {error}"
