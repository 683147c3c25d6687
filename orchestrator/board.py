"""What a person sees while machines are rented and made ready: a table that lives on a terminal, plain lines elsewhere.

On stderr, as all progress: stdout is for answers.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pptasks import shown

PAUSE_S = 10.0  # between two plain lines about the bytes of one stage
REFRESH_HZ = 4.0
GONE = (OSError, ValueError, SystemExit)  # a terminal or a reader: of no account to who must end machines
_BYTES = ("download", "check", "load")  # states whose progress is counted in bytes


@dataclass(frozen=True)
class Row:
    """How one stage stands."""

    stage: int
    offer: str  # what was rented, for a person: GPU and place
    price_usd_hour: float
    state: str  # asked, creating, loading, running, hello, probe, download, load, ready, lost, ...
    done: int = 0  # of `total`: bytes of a download or a load, else a count
    total: int = 0  # 0: not known
    rtt_ms: float | None = None
    note: str = ""


class Board:
    """A context manager. `deadline`: Unix time, 0 for none. `quiet` shows nothing at all.

    On a terminal it leaves the last table behind when it ends without an error.
    """

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        *,
        deadline: float = 0.0,
        clock: Callable[[], float] = time.time,
    ):
        self._console, self._quiet, self._deadline, self._clock = console, quiet, deadline, clock
        self._rows: Sequence[Row] = ()
        self._spent = 0.0
        self._budget: float | None = None
        self._began = clock()
        self._said: dict[int, tuple[tuple[str, str], float]] = {}  # by stage: offer and state, and when they were told
        self._live = (
            Live(console=console, get_renderable=self._picture, refresh_per_second=REFRESH_HZ, transient=True)
            if console.is_terminal and not console.is_dumb_terminal and not quiet
            else None
        )

    def __enter__(self) -> "Board":
        self._began = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            with suppress(*GONE):
                self._live.stop()
                if kind is None and self._rows:
                    self._console.print(self._picture())

    def show(self, rows: Sequence[Row], spent_usd: float, budget_usd: float | None) -> None:
        """How it stands now; as often as anybody knows better."""
        self._rows, self._spent, self._budget = tuple(rows), spent_usd, budget_usd
        if self._live or self._quiet:
            return
        for row in self._rows:
            if self._is_news(row):
                self.say(_line(row, spent_usd))

    def settle(self) -> None:
        """The table stays as it is now: what follows on the terminal is an answer. Changes are told in plain lines."""
        if self._live:
            with suppress(*GONE):
                self._live.stop()
                self._console.print(self._picture())
            self._live = None
            for row in self._rows:
                self._is_news(row)

    def say(self, line: str) -> None:
        """One line that stays, above the table."""
        if not self._quiet:
            with suppress(*GONE):
                self._console.print(Text(shown.line(line)), soft_wrap=True)

    def _is_news(self, row: Row) -> bool:
        """Another state, or more bytes after a while. Notes what was told."""
        now, state = self._clock(), (row.offer, row.state)
        told, at = self._said.get(row.stage, (None, now))
        if told == state and not (row.state in _BYTES and now - at >= PAUSE_S):
            return False
        self._said[row.stage] = state, now
        return True

    def _picture(self) -> Group:
        return Group(table(self._rows), Text(self._footer(), style="dim"))

    def _footer(self) -> str:
        now = self._clock()
        per_hour = sum(row.price_usd_hour for row in self._rows)
        parts = []
        if self._spent or per_hour:
            of_budget = f" of {_dollars(self._budget)}" if self._budget else ""
            parts += [f"{_dollars(self._spent)} so far{of_budget}", f"{_dollars(per_hour)} per hour"]
        parts.append(_span(now - self._began))
        if self._deadline:
            parts.append(f"ends in {_span(self._deadline - now)}")
        return ", ".join(parts)


def table(rows: Sequence[Row]) -> Table:
    """One line for each stage."""
    made = Table("stage", "offer", "$ per hour", "state", "progress", "round trip", "note")
    for row in rows:
        trip = "" if row.rtt_ms is None else f"{row.rtt_ms:.1f} ms"
        texts = str(row.stage), row.offer, f"{row.price_usd_hour:.3f}", row.state, _amount(row), trip, row.note
        made.add_row(*(Text(shown.line(text)) for text in texts))
    return made


def _line(row: Row, spent_usd: float) -> str:
    about = ", ".join(text for text in (row.offer, _amount(row), row.note) if text)
    money = f"; {_dollars(spent_usd)} so far" if spent_usd or row.price_usd_hour else ""
    return f"stage {row.stage}: {row.state}{f' ({about})' if about else ''}{money}"


def _amount(row: Row) -> str:
    """Empty where there is nothing to count."""
    if row.state not in _BYTES:
        return f"{row.done}/{row.total}" if row.total else ""
    if not row.total:
        return f"{row.done / 1e6:.0f} MB" if row.done else ""
    return f"{row.done / 1e6:.0f}/{row.total / 1e6:.0f} MB ({100 * row.done // row.total} %)"


def _dollars(usd: float) -> str:
    return f"${usd:.4f}" if usd < 1 else f"${usd:.2f}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
