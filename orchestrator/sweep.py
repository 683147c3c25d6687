"""What is left of runs that have ended, and its end: one home for every command's teardown, `pp sweep` and `pp down`.

Which machines are ours is decided by `leftovers`, from the ledger and from what the providers list. Nothing else is
ever ended, whatever its label looks like.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from orchestrator import labels
from orchestrator.ledger import Ledger, Rental
from orchestrator.provider import Instance, Instances, Provider
from orchestrator.run import is_live
from pptasks.errors import BadKey, PPError, ProviderError, StillBilling, StorageError

THREADS = 8
PATIENCE_S = 20.0  # a machine whose create was lost comes up within that, or never
LOOK_S = 2.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Leftover:
    """A machine of ours that is to be ended, or may be there."""

    provider: str
    instance_id: str | None  # None: only its label is known
    label: str
    run: str
    stage: int
    price_usd_hour: float | None  # None: not listed
    deadline: float  # Unix time; 0: none
    why: str
    listed: bool = False  # the provider showed this id with this label
    started_at: float | None = None  # Unix time, where it is known


def leftovers(
    rows: Iterable[Rental],
    listed: Mapping[str, Instances],
    owner: str,
    is_live: Callable[[str], bool],
    now: float,
    *,
    all_: bool = False,
    run: str | None = None,
) -> list[Leftover]:
    """What is ours to end. Pure. listed: by provider, complete lists only.

    Ours is what the ledger holds open, and what carries a label of this owner, once its run is not live or its deadline
    has passed; and what carries anybody's label, once its deadline has passed. `all_`: what living runs of this owner
    use too. `run`: that run's alone, live or not. An id that is listed with another label than the ledger's is another
    machine now, and nothing is known of the ledger's.
    """
    book = [row for row in rows if row.destroyed_at is None]
    by_label = {(row.provider, row.label): row for row in book}
    alive: dict[str, bool] = {}

    def why(of_run: str, deadline: float, ours: bool) -> str:
        """Empty: leave it."""
        if run is not None:
            return "of this run" if ours and of_run == run else ""
        if 0 < deadline < now:
            return "past its deadline"
        if not ours:
            return ""
        if of_run not in alive:
            alive[of_run] = is_live(of_run)
        if not alive[of_run]:
            return "its run has ended"
        return "its run is alive" if all_ else ""

    found = []
    for provider, instances in listed.items():
        for instance in instances:
            kept, label = by_label.get((provider, instance.label)), labels.Label.parse(instance.label)
            origin = kept or label
            if origin is None:
                continue
            ours = kept is not None or (label is not None and label.owner == owner)
            if reason := why(origin.run, origin.deadline, ours):
                found.append(_of_listed(provider, instance, origin, reason))
    for row in book:
        if not _is_listed(row, listed.get(row.provider, [])) and (reason := why(row.run, row.deadline, True)):
            found.append(_of_row(row, reason))
    return found


def _is_listed(row: Rental, instances: Instances) -> bool:
    """Whether the list decides about a row: its machine is in it, or its id is another machine's."""
    if row.instance_id is None:
        return any(instance.label == row.label for instance in instances)
    return any(instance.id == row.instance_id for instance in instances)


def _of_listed(provider: str, shown: Instance, origin: Rental | labels.Label, why: str) -> Leftover:
    about = origin.run, origin.stage, shown.price_usd_hour, float(origin.deadline), why
    return Leftover(provider, shown.id, shown.label, *about, listed=True, started_at=shown.started_at)


def _of_row(row: Rental, why: str) -> Leftover:
    return Leftover(row.provider, row.instance_id, row.label, row.run, row.stage, None, row.deadline, why)


@dataclass(frozen=True)
class Survey:
    """All that is known of machines at some moment."""

    rows: list[Rental]  # open ones
    listed: dict[str, Instances]  # by provider, under our prefix
    errors: dict[str, PPError]  # of providers that give no list, and of the "ledger"
    found: list[Leftover]  # at the providers that were asked
    beyond: list[Leftover]  # at others, by the ledger alone


def survey(
    ledger: Ledger,
    providers: Iterable[Provider],
    *,
    owner: str | None = None,
    is_live: Callable[[str], bool] = is_live,
    now: float | None = None,
    all_: bool = False,
    run: str | None = None,
) -> Survey:
    """Ask the ledger and every provider; see `leftovers`. Their errors are part of what is returned."""
    listed: dict[str, Instances] = {}
    errors: dict[str, PPError] = {}
    rows: list[Rental] = []
    names = set()
    for provider in providers:
        names.add(provider.name)
        try:
            listed[provider.name] = provider.list(labels.PREFIX)
        except PPError as error:
            errors[provider.name] = error
        except OSError as error:
            errors[provider.name] = ProviderError(f"{provider.name} cannot be asked: {error}")
    try:
        rows = ledger.open_rows(run)
    except StorageError as error:
        errors["ledger"] = error
    owner, now = owner or labels.owner(), time.time() if now is None else now
    left = leftovers(rows, listed, owner, is_live, now, all_=all_, run=run)
    beyond = [replace(x, why=f"{x.why}; {_why_not(x.provider)}") for x in left if x.provider not in names]
    return Survey(rows, listed, errors, [x for x in left if x.provider in names], beyond)


def find(
    ledger: Ledger,
    providers: Iterable[Provider],
    say: Say,
    *,
    owner: str | None = None,
    is_live: Callable[[str], bool] = is_live,
    now: float | None = None,
    all_: bool = False,
    run: str | None = None,
) -> list[Leftover]:
    """What is left at these providers, see `leftovers`.

    Where a list fails, `say` tells, and what the ledger knows is returned; it also tells of machines at other
    providers. Raises ProviderError or StorageError only if nothing at all can be known.
    """
    seen = survey(ledger, providers, owner=owner, is_live=is_live, now=now, all_=all_, run=run)
    if seen.errors and not seen.listed and not seen.found:
        raise next(iter(seen.errors.values()))
    for error in seen.errors.values():
        say(f"{error}; going on with what is known")
    for line in no_access(seen.beyond):
        say(line)
    return seen.found


def no_access(beyond: Iterable[Leftover]) -> list[str]:
    """A line for each provider to which there is no access."""
    counts = Counter(leftover.provider for leftover in beyond)
    return [f"{n} machine{'s' * (n > 1)} at {name} cannot be looked at: {_why_not(name)}" for name, n in counts.items()]


def _why_not(provider: str) -> str:
    return "there is no key, give VAST_API_KEY" if provider == "vast" else f"there is no access to {provider}"


def end(
    found: Sequence[Leftover],
    providers: Iterable[Provider],
    ledger: Ledger,
    say: Say,
    *,
    patience_s: float = PATIENCE_S,
) -> list[Leftover]:
    """Destroy them, several at once, and return those whose end is not confirmed, with why.

    What is confirmed is told and goes into the ledger. A leftover without an id is looked for by its label for
    `patience_s`; if a complete list does not show it then, it never was. Raises nothing of a provider's or the disk's.
    """
    if not found:
        return []
    ending = _Ending({provider.name: provider for provider in providers}, ledger, say, patience_s)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="end") as pool:
        futures = [pool.submit(ending.end, leftover) for leftover in found]  # an interrupt waits for all of them
    return [leftover for future in futures if (leftover := future.result()) is not None]


class _Ending:
    """One round of ending machines; its methods run in several threads."""

    def __init__(self, providers: Mapping[str, Provider], ledger: Ledger, say: Say, patience_s: float):
        self._providers, self._ledger, self._patience_s = providers, ledger, patience_s
        self._say, self._saying = say, threading.Lock()
        self._refused: dict[str, str] = {}  # by provider, once it refuses our key: no more calls

    def end(self, leftover: Leftover) -> Leftover | None:
        """None: confirmed to be gone, or not ours any more."""
        provider = self._providers.get(leftover.provider)
        if provider is None:
            return replace(leftover, why=_why_not(leftover.provider))
        if leftover.provider in self._refused:
            return replace(leftover, why=self._refused[leftover.provider])
        try:
            outcome = self._destroy(leftover, provider)
        except BadKey as error:
            self._refused[leftover.provider] = str(error)
            return replace(leftover, why=str(error))
        except PPError as error:
            return replace(leftover, why=str(error))
        except Exception as error:  # whatever is wrong with one must not save it, nor the others
            return replace(leftover, why=f"{type(error).__name__} while it was ended")
        self.say(f"{leftover.label} ({leftover.provider} {leftover.instance_id or 'without an id'}): {outcome}")
        return None

    def say(self, line: str) -> None:
        with self._saying, suppress(OSError, ValueError, SystemExit):  # whoever read it has gone
            self._say(line)

    def _destroy(self, leftover: Leftover, provider: Provider) -> str:
        """How it came out. Raises PPError while its end is not confirmed."""
        instance_id = leftover.instance_id or self._look_up(leftover.label, provider)
        if instance_id is None:
            self._record(leftover.label, None)
            return "never came up"
        if leftover.instance_id is not None and not leftover.listed:
            there = provider.get(instance_id)  # nobody has compared its label yet
            if there is not None and there.label != leftover.label:
                raise ProviderError(f"it has the label {there.label[:80]!r} now, so it may be another's: not ended")
        provider.destroy(instance_id)
        self._record(leftover.label, instance_id)
        return "ended"

    def _look_up(self, label: str, provider: Provider) -> str | None:
        deadline = time.monotonic() + self._patience_s
        while True:
            for instance in provider.list(label):
                if instance.label == label:
                    return instance.id
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(LOOK_S, left))

    def _record(self, label: str, instance_id: str | None) -> None:
        try:
            if instance_id is not None:
                self._ledger.destroyed(instance_id)
            self._ledger.refused(label)  # where the ledger knows the label alone
        except StorageError as error:
            self.say(f"{error}; {label} is ended all the same")


def how_to_end(leftover: Leftover) -> str:
    """The command for a person."""
    if leftover.provider != "vast":
        return "pp sweep"
    if leftover.instance_id is None:
        return f"pp sweep, or look for the label {leftover.label} at https://cloud.vast.ai/instances/"
    return f"vastai destroy instance {leftover.instance_id}"


def still_billing(unconfirmed: Sequence[Leftover]) -> StillBilling:
    """The error for machines whose end is not confirmed: each one's id, why, and the command that ends it."""
    told = [
        f"{x.provider} {x.instance_id or x.label} ({x.why.rstrip('.')}; end it with: {how_to_end(x)})"
        for x in unconfirmed
    ]
    n = f"{len(told)} machines" if len(told) > 1 else "a machine"
    return StillBilling(f"{n} may bill on: {', '.join(told)}", tuple(x.instance_id or x.label for x in unconfirmed))
