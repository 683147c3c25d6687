"""What `pp ps` and `pp sweep` show: the entries are what `--json` prints, the tables are for people. Pure."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from orchestrator.clusters import Record
from orchestrator.labels import Label
from orchestrator.sweep import Leftover, Survey
from pptasks.shown import line

Entry = dict[str, Any]
_MONEY = {"$/h": "price_usd_hour", "$ so far": "cost_usd"}
CLUSTERS = {
    "name": "name", "model": "model", "where": "where", "stages": "stages", "state": "state", "since": "since",
    "until": "deadline", **_MONEY,
}  # fmt: skip
MACHINES = {
    "label": "label", "at": "provider", "id": "id", "state": "state", "since": "since", **_MONEY, "use": "use",
}  # fmt: skip
LEFTOVERS = {"label": "label", "at": "provider", "id": "id", "why": "why", "since": "since", **_MONEY}


def clusters(records: Sequence[Record], is_live: Callable[[str], bool], now: float) -> list[Entry]:
    """No secret of a record is in its entry."""
    return [
        {
            "name": record.name,
            "run": record.run,
            "model": record.model,
            "where": record.where,
            "stages": record.settings.get("NUM_STAGES"),
            "state": "gone" if not is_live(record.run) else "starts" if record.ready_s is None else "ready",
            "since": record.started_at,
            "deadline": record.deadline or None,
            **_money(record.price_usd_hour, record.started_at, now),
        }
        for record in records
    ]


def machines(seen: Survey, owner: str, now: float) -> list[Entry]:
    """What is listed under our prefix, whosever, and what the ledger holds open beside that."""
    left = {(x.provider, x.instance_id, x.label): x.why for x in seen.found + seen.beyond}
    rows = {(row.provider, row.label): row for row in seen.rows}
    entries = []
    for provider, instances in seen.listed.items():
        for shown in instances:
            row, label = rows.pop((provider, shown.label), None), Label.parse(shown.label)
            origin = row or label
            ours = row is not None or (label is not None and label.owner == owner)
            entries.append(
                {
                    "label": shown.label,
                    "provider": provider,
                    "id": shown.id,
                    "state": shown.status,
                    "since": shown.started_at,
                    **_money(shown.price_usd_hour, shown.started_at, now),
                    "run": origin.run if origin else None,
                    "yours": ours,
                    "use": _use(left.get((provider, shown.id, shown.label)), ours),
                }
            )
    for (provider, text), row in rows.items():
        listed = seen.listed.get(provider)
        reused = any(shown.id == row.instance_id for shown in listed or ())
        entries.append(
            {
                "label": text,
                "provider": provider,
                "id": row.instance_id,
                "state": "another has its id" if reused else "not asked" if listed is None else "not listed",
                "since": row.intended_at,
                **_money(None, row.intended_at, now),
                "run": row.run,
                "yours": True,
                "use": "unknown" if reused else _use(left.get((provider, row.instance_id, text)), True),
            }
        )
    return entries


def leftovers(found: Sequence[Leftover], now: float) -> list[Entry]:
    return [
        {
            "label": x.label,
            "provider": x.provider,
            "id": x.instance_id,
            "run": x.run,
            "stage": x.stage,
            "why": x.why,
            "since": x.started_at,
            **_money(x.price_usd_hour, x.started_at, now),
        }
        for x in found
    ]


def cost_text(ended: Sequence[Leftover], now: float) -> str:
    """What they have cost, as far as their prices were listed."""
    costs = [entry["cost_usd"] for entry in leftovers(ended, now)]
    known = [cost for cost in costs if cost is not None]
    some = "" if len(known) == len(costs) else f"; of {len(costs) - len(known)} it is not known"
    return f"they cost ${sum(known):.4f}{some}"


def table(title: str, columns: Mapping[str, str], entries: Sequence[Entry]) -> Table:
    """columns: what is at the head of each, and the entries' field that is in it."""
    made = Table(title=title, title_justify="left")
    for head, name in columns.items():
        made.add_column(head, no_wrap=name in ("id", *_MONEY.values()), overflow="fold")
    for entry in entries:
        made.add_row(*(Text(_text(name, entry[name])) for name in columns.values()))
    return made


def _money(price: float | None, since: float | None, now: float) -> Entry:
    cost = None if price is None or since is None else price * max(0.0, now - since) / 3600
    return {"price_usd_hour": price, "cost_usd": cost}


def _use(left: str | None, ours: bool) -> str:
    return f"left over: {left}" if left else "live" if ours else "not yours"


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    try:
        if name in ("since", "deadline"):
            return time.strftime("%m-%d %H:%M", time.localtime(value))
        if name in ("price_usd_hour", "cost_usd"):
            return f"{value:.3f}" if name == "price_usd_hour" else f"{value:.4f}"
    except (ValueError, OverflowError, OSError):  # no time of a calendar, or beyond a float
        return "?"
    return line(str(value))
