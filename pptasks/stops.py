"""Stop texts: an answer ends before the first of them, wherever the borders of its tokens are.

The first is the one that is complete first; of those that end at one place, the longest.
"""

from collections.abc import Sequence


class StopFilter:
    """Text in pieces, less a stop text and all after it. What may yet become one is held back."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.is_hit = False

    def push(self, text: str) -> str:
        """What can be shown now."""
        if not self._stops or self.is_hit:
            return "" if self.is_hit else text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.is_hit, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(self._overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The answer ended otherwise: what was held back is no stop text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that a stop text begins with."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
