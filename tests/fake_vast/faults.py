"""Scripted faults, and the limits of calls."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

LIMITS_S = {"create": 4.5, "destroy": 3.0, "show": 2.0, "list": 1.0}  # least seconds between two calls of a kind
SEARCHES, SEARCH_WINDOW_S = 10, 60.0


@dataclass
class Fault:
    """What goes wrong with `times` calls of `kind`, after the first `skip` ones.

    kind: search, create, show, list, destroy, logs, result. match: part of the path, "" for any. takes_effect: the call
    is done first. status None: what the call itself would be answered with, late perhaps. body: text as it is, anything
    else as JSON; None for the call's own. drop: the connection is closed without an answer.
    """

    kind: str
    status: int | None = None
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    match: str = ""
    takes_effect: bool = False
    seconds: float = 0.0  # before the answer, or before the connection is closed
    drop: bool = False
    times: int = 1
    skip: int = 0

    def strikes(self, kind: str, path: str) -> bool:
        """Whether it is this call's turn; counts it."""
        if self.kind != kind or self.match not in path or self.times <= 0:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, error: str, msg: str = ""):
        super().__init__(error)
        self.status, self.body = status, {"success": False, "error": error, "msg": msg or error}


class Limits:
    """Counts every call that comes sooner than it may. `scale` makes all limits shorter, for tests that hurry."""

    def __init__(self, scale: float):
        self.scale = scale
        self.too_fast: list[tuple[str, float]] = []  # kind, seconds since the call before
        self._last: dict[str, float] = defaultdict(lambda: float("-inf"))
        self._searches: deque[float] = deque(maxlen=SEARCHES)

    def is_too_fast(self, kind: str, now: float) -> bool:
        gap, self._last[kind] = now - self._last[kind], now
        if kind == "search":
            full = len(self._searches) == SEARCHES and now - self._searches[0] < SEARCH_WINDOW_S * self.scale
            self._searches.append(now)
        else:
            full = gap < LIMITS_S.get(kind, 0.0) * self.scale
        if full:
            self.too_fast.append((kind, gap))
        return full
