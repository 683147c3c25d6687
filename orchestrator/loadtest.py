"""An open-loop load, in numbers: when requests are due, what is asked, what the answers come to. Pure.

Open loop: requests come when they come (a Poisson process), whether or not earlier ones were answered, as those of many
people do. A closed loop, which waits for an answer before it asks again, hides how long a crowded server lets people
wait. Times are counted from when a request was due, so that a generator which is late itself hides nothing either.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pptasks.errors import UsageError

MAX_REQUESTS = 50_000  # of a rate
LATE_S = 0.01  # a generator that is later than that in one of a hundred requests measures itself
QUANTILES = (50, 95, 99)
# Words that byte-level vocabularies have as one token, with the space before them.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force"
)
_WORDS = _TEXT.split()

Figures = dict[str, float]


@dataclass(frozen=True)
class Load:
    """What is asked of a server: for each of `rates` (requests a second), requests for `duration_s`."""

    rates: tuple[float, ...]
    duration_s: float
    prompt_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    timeout_s: float  # for an answer, from when it was asked for

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """A request that has ended. Seconds count from the start of its rate; `pieces_s`: when each piece of text came."""

    due_s: float
    sent_s: float
    end_s: float
    pieces_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""  # why there is no whole answer: an HTTP status or a few words


def arrivals(rate: float, duration_s: float, seed: int) -> tuple[float, ...]:
    """When requests are due, in seconds: the same for the same numbers. Raises UsageError for more than can be kept."""
    if rate * duration_s > MAX_REQUESTS:
        raise UsageError(
            f"{rate:g} requests a second for {duration_s:g} s are more than {MAX_REQUESTS}: lower --rate or --duration"
        )
    draw, due, now = random.Random(f"{seed} {rate!r}"), list[float](), 0.0
    while (now := now + draw.expovariate(rate)) < duration_s and len(due) < 2 * MAX_REQUESTS:
        due.append(now)
    return tuple(due)


def prompt(words: int, seed: int, index: int) -> str:
    """Text with so many random words, each a token or so; another for each index, so that what a server has cached of
    one is of no use to the next. Asks for an answer that does not end soon."""
    draw = random.Random(f"{seed} {index}")
    return f"Tell a long story with these words: {' '.join(draw.choice(_WORDS) for _ in range(words))}"


def percentiles(values: Sequence[float]) -> Figures | None:
    """p50, p95 and p99, interpolated between the two nearest; None of nothing."""
    if not values:
        return None
    return {f"p{q}": float(value) for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def row(rate: float, sent: int, calls: Sequence[Call]) -> dict[str, Any]:
    """What the `calls` that ended, of `sent`, come to; times in seconds.

    `ttft_s`: from when a request was due to its first text. `inter_token_s`: between two pieces of its text, which is
    between two tokens unless the server joins some. `late_s`: by how much the generator sent requests late.
    `tokens_per_s`: of whole answers, from the first request to the last answer's end.
    """
    answered = [call for call in calls if not call.error]
    tokens = sum(call.tokens for call in answered)
    wall_s = max((call.end_s for call in answered), default=0.0) - min((call.due_s for call in calls), default=0.0)
    gaps = [b - a for call in answered for a, b in zip(call.pieces_s, call.pieces_s[1:], strict=False)]
    late = [call.sent_s - call.due_s for call in calls]
    return {
        "rate": rate,
        "sent": sent,
        "answered": len(answered),
        "errors": dict(Counter(call.error for call in calls if call.error)),
        "unfinished": sent - len(calls),
        "ttft_s": percentiles([call.pieces_s[0] - call.due_s for call in answered if call.pieces_s]),
        "inter_token_s": percentiles(gaps),
        "e2e_s": percentiles([call.end_s - call.due_s for call in answered]),
        "tokens_per_s": tokens / wall_s if answered else 0.0,
        "prompt_tokens": int(np.median([call.prompt_tokens for call in answered])) if answered else 0,
        "completion_tokens": tokens,
        "late_s": percentiles(late),
        "late_max_s": max(late, default=0.0),
    }


def is_late(found: dict[str, Any]) -> bool:
    """Whether a row tells more of the machine that asked than of the server."""
    return found["late_s"] is not None and found["late_s"]["p99"] > LATE_S
