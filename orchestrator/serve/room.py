"""Back-pressure: so much at once, and no more."""

from types import TracebackType

from orchestrator.serve.openai_errors import busy


class Room:
    """For `most` of something. All on one event loop."""

    def __init__(self, most: int, what: str):
        """what: what is said when it is full."""
        self.most, self.used, self._what = most, 0, what

    def take(self, n: int) -> "Taken":
        """Raises ApiError 429 if that is more than is left."""
        if self.used + n > self.most:
            raise busy(f"{self._what}: send it again later")
        self.used += n
        return Taken(self, n)


class Taken:
    """A context manager: gives back what was taken. `more` takes as `Room.take` does."""

    def __init__(self, room: Room, n: int):
        self._room, self._n = room, n

    def more(self, n: int) -> None:
        self._room.take(n)
        self._n += n

    def __enter__(self) -> "Taken":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.used -= self._n
