"""Whether a machine that was asked for gets on with becoming a stage: data in, data out.

A rented machine goes through steps: it is made and its image pulled (`start`), its container runs but says nothing yet
(`hello`), and then the phases that its worker tells: probe, download, load, compile, ready. A step that takes too long
is stuck. A download may take as long as it needs, but must stay above a floor of bytes per minute.
"""

from dataclasses import dataclass, replace

from orchestrator.provider import IMAGE_FAULTS, Instance, State
from pptasks.members import Member
from pptasks.probe import expected

START, HELLO, READY = "start", "hello", "ready"
IN_BYTES = ("download", "check")
MB = 10**6
OF_THE_MACHINE = ("ProbeFailed", "AuditFailed")  # what a worker says of its device, not of the run


@dataclass(frozen=True)
class Patience:
    """What is too long, seconds."""

    start_s: float = 240.0  # an image has a few GB
    step_s: float = 120.0  # for anything else, without any change
    lost_s: float = 15.0  # a stage that was there is silent: longer than its link may take to come back
    floor_mb_min: float = 30.0  # of a download

    @classmethod
    def of(cls, timeout_s: float) -> "Patience":
        """With the default of --timeout, the defaults above."""
        return cls(start_s=2 * timeout_s, step_s=timeout_s, lost_s=min(15.0, timeout_s))


@dataclass(frozen=True)
class Watch:
    """What is remembered of one machine. Times are one monotonic clock's."""

    step: str
    since: float  # when the step, or a count in it, last changed
    done: int = 0
    mark: int = 0  # bytes at the start of the window that a download is measured over
    mark_at: float = 0.0
    heard_at: float | None = None  # when its worker was last heard
    shown: bool = False  # its provider has shown it, once
    began: float = 0.0  # when it was asked for

    def seen(self, instance: Instance | None, member: Member | None, now: float, window_s: float) -> "Watch":
        """After another look. `instance`: as the provider shows it; `member`: what its worker says."""
        shown = self.shown or instance is not None
        if member is None:
            running = instance is not None and instance.state is State.RUNNING
            step = self.step if self.heard_at is not None else HELLO if running else START
            return replace(self, shown=shown) if step == self.step else Watch(step, now, shown=shown, began=self.began)
        step = READY if member.state == "ready" else member.phase
        if step != self.step or self.heard_at is None:
            return Watch(step, now, member.done, member.done, now, heard_at=now, shown=shown, began=self.began)
        since = now if member.done != self.done else self.since
        mark, mark_at = (member.done, now) if now - self.mark_at >= window_s else (self.mark, self.mark_at)
        return Watch(step, since, member.done, mark, mark_at, heard_at=now, shown=shown, began=self.began)


@dataclass(frozen=True)
class Trouble:
    """Why a machine must be given up. replaceable: another one may do better."""

    why: str
    replaceable: bool = True


def trouble(
    watch: Watch, instance: Instance | None, member: Member | None, now: float, patience: Patience
) -> Trouble | None:
    """None while there is hope. `watch`: as it was before this look, whose end closes the window of a download."""
    if member is not None and member.state == "failed":
        return Trouble(f"failed: {member.error}", member.error_type in OF_THE_MACHINE)
    if member is not None and (member.probe or member.state == "ready") and member.probe != expected():
        return Trouble(f"{member.device or 'its device'} multiplies matrices wrongly (probe)")
    if instance is not None and instance.state is State.ENDED:
        fault = any(text in instance.status.lower() for text in IMAGE_FAULTS)
        return Trouble(f"its machine has ended ({instance.status})", replaceable=not fault)
    if instance is None and watch.shown:
        return Trouble("its machine is gone: its provider does not list it any more")
    if member is None:
        why = _silent(watch, instance, now, patience)
    else:
        why = None if member.state == "ready" else _stuck(watch, member, now, patience)
    return None if why is None else Trouble(why)


def _silent(watch: Watch, instance: Instance | None, now: float, patience: Patience) -> str | None:
    if watch.heard_at is not None:
        return "was lost: it is silent" if now - watch.heard_at > patience.lost_s else None
    waited = now - watch.since
    if now - watch.began > patience.start_s + patience.step_s:  # one that runs and ends, again and again
        return f"its machine says no hello in {patience.start_s + patience.step_s:.0f} s in all"
    if watch.step == HELLO:
        return f"its machine runs, but says no hello in {patience.step_s:.0f} s" if waited > patience.step_s else None
    said = f" ({instance.status})" if instance else ""
    return f"its machine does not come up in {patience.start_s:.0f} s{said}" if waited > patience.start_s else None


def _stuck(watch: Watch, member: Member, now: float, patience: Patience) -> str | None:
    if member.phase != watch.step:
        return None
    if now - watch.since > patience.step_s and member.done == watch.done:
        return f"is stuck in {watch.step}: nothing for {patience.step_s:.0f} s"
    window = now - watch.mark_at
    if watch.step in IN_BYTES and window >= patience.step_s and member.done < member.total:
        rate = (member.done - watch.mark) / MB / window * 60
        if rate < patience.floor_mb_min:
            return f"is stuck in {watch.step}: {rate:.1f} MB a minute, less than {patience.floor_mb_min:.0f}"
    return None
