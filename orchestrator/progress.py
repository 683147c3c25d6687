"""What a person sees on stderr while a run comes up: one line per stage, bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pptasks.members import Member

_BYTES = ("download", "check", "load")


class Display:
    """A context manager. `quiet` shows nothing at all."""

    def __init__(self, console: Console, *, quiet: bool = False):
        self._console, self._quiet = console, quiet
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The terminal belongs to whoever asks a question."""
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def progress(self, phase: str, done: int, total: int, who: str = "model") -> None:
        """`done` of `total` of `phase`: bytes of a download or a load, else a count."""
        amount = f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if phase in _BYTES else f"{done}/{total}" if total else ""
        if who not in self._tasks:
            self._tasks[who] = self._bars.add_task(who, total=None, amount="")
        self._bars.update(
            self._tasks[who], description=f"{who}: {phase}", completed=done, total=total or None, amount=amount
        )
        if not self._bars.disable or self._quiet or self._said.get(who) == phase:
            return
        self._said[who] = phase
        self._console.print(f"{who}: {phase}", highlight=False, markup=False)

    def members(self, members: Mapping[int, Member]) -> None:
        """The stages' own words, as often as they are read."""
        for stage, member in sorted(members.items()):
            span = f" [{member.span[0]}, {member.span[1]})" if member.span else ""
            done, total = (1, 1) if member.state == "ready" else (member.done, member.total)
            phase = "ready" if member.state == "ready" else member.phase
            self.progress(f"{phase}{span}" if phase == "ready" else phase, done, total, who=f"stage {stage}")
