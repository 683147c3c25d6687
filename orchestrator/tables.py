"""What the commands show to people, as tables and lines; the rows are what `--json` prints. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from orchestrator.offers import Choice
from orchestrator.provider import Offer
from pptasks.modelinfo import Model, memory_bytes, nbytes
from pptasks.plan import Plan, cache_bytes, stage_bytes
from pptasks.remote.wheel import Source as Wheel
from pptasks.shown import line
from pptasks.spec import ALIASES

Row = dict[str, Any]


def plan_rows(model: Model, plan: Plan) -> list[Row]:
    return [_stage_row(model, plan, stage) for stage in range(plan.n_stages)]


def _stage_row(model: Model, plan: Plan, stage: int) -> dict[str, Any]:
    span, readout = plan.spans[stage], stage == plan.readout_stage
    tensors = model.stage_tensors(span.lo, span.hi, embedding=stage == 0, readout=readout)
    also = [*(["embedding"] if stage == 0 else []), *(["read-out"] if readout else [])]
    return {
        "stage": stage,
        "span": [span.lo, span.hi],
        "also": ", ".join(also),
        "tensors": len(tensors),
        "bytes": nbytes(tensors),
        "memory_bytes": memory_bytes(tensors, plan.weights),
        "kv_bytes": len(span) * cache_bytes(model, plan.slots, plan.context),
    }


def plan_table(rows: Sequence[Row], title: str) -> Table:
    table = Table(
        "stage", "blocks", "also", "MB to load", "MB of weights", "MB of KV cache", "MB in all", title=_title(title)
    )
    for row in rows:
        sizes = row["bytes"], row["memory_bytes"], row["kv_bytes"], row["memory_bytes"] + row["kv_bytes"]
        _add(table, str(row["stage"]), _span(row["span"]), row["also"], *(f"{size / 1e6:,.1f}" for size in sizes))
    return table


def offer_rows(choice: Choice, model: Model, plan: Plan) -> list[Row]:
    def row(offer: Offer, stage: int | None) -> Row:
        return {
            "stage": stage,
            "offer": offer.id,
            "machine": offer.machine_id,
            "gpu": offer.gpu_name,
            "vram_gb": round(offer.vram_bytes / 1e9, 1),
            "needs_gb": None if stage is None else round(stage_bytes(model, plan, stage) / 1e9, 1),
            "place": offer.geolocation,
            "down_mbps": offer.down_mbps,
            "reliability": offer.reliability,
            "usd_hour": offer.price_usd_hour,
        }

    spares = [row(offer, None) for offer in choice.spares]
    return [row(offer, stage) for stage, offer in enumerate(choice.stages)] + spares


def offers_table(rows: Sequence[Row], price_usd_hour: float) -> Table:
    table = Table(
        "stage", "offer", "GPU", "GB", "needs", "place", "Mbit/s down", "reliable", "$ an hour",
        title=f"${price_usd_hour:.3f} an hour in all", title_justify="left",
    )  # fmt: skip
    for row in rows:
        needs = "-" if row["needs_gb"] is None else str(row["needs_gb"])
        _add(
            table, "spare" if row["stage"] is None else str(row["stage"]), row["offer"], row["gpu"],
            str(row["vram_gb"]), needs, row["place"], f"{row['down_mbps']:.0f}", f"{row['reliability']:.1%}",
            f"{row['usd_hour']:.3f}",
        )  # fmt: skip
    return table


def known_models() -> list[Row]:
    def source(found: Any) -> str:
        return f"wheel {found.requirement}" if isinstance(found, Wheel) else str(found)

    return [
        {"name": name, "size": known.size, "description": known.description, "source": source(known.source)}
        for name, known in ALIASES.items()
    ]


def models_table(rows: Sequence[Row]) -> Table:
    table = Table("name", "download", "what", "from")
    for row in rows:
        _add(table, *(row[column] for column in ("name", "size", "description", "source")))
    return table


def summary(reports: Sequence[Row]) -> Row:
    """The last of several reports of one cluster, its timings the medians of all; `runs` has each one's."""
    timings = {k: _median([r["timings"][k] for r in reports]) for k in reports[0]["timings"]}
    return reports[-1] | {"timings": timings, "runs": [r["timings"] for r in reports]}


def bench_table(summary: Row, column: str, title: str) -> Table:
    table = Table("figure", column, title=_title(title))
    for name, value in summary["timings"].items():
        digits = 3 if name.endswith("_s") and name != "tokens_per_s" else 1
        _add(table, name, "-" if value is None else f"{value:,.{digits}f}")
    for stage in summary["stages"]:
        _add(table, f"stage {stage['stage']} weights_bytes", f"{stage['weights_bytes']:,}")
    return table


def verification_table(report: Mapping[str, Any]) -> Table:
    found = report["verification"]
    table = Table("stage", "blocks", "device", "values differ", "by at most", "from position")
    there = {stage["stage"]: stage for stage in report["stages"]}
    for check in found["stages"]:
        stage = there.get(check["stage"], {"span": (), "device": "gone", "kernels": "-"})
        first = "-" if check["first_position"] is None else str(check["first_position"])
        largest = "not a number" if check["max_abs_diff"] is None else f"{check['max_abs_diff']:.3g}"
        figures = f"{check['values_differ']:,}", largest, first
        _add(table, str(check["stage"]), _span(stage["span"]), f"{stage['device']} ({stage['kernels']})", *figures)
    return table


def closing_line(report: Mapping[str, Any]) -> str:
    timings, n = report["timings"], len(report["token_ids"])
    speed = f", {timings['tokens_per_s']:.1f} tok/s" if timings["tokens_per_s"] else ""
    return f"{n} tokens ({report['finish_reason']}), ready in {timings['ready_s']:.1f} s{speed}"


def turn_line(answer: Mapping[str, Any], context: int) -> str:
    """How an answer of a chat went. `context`: positions that a conversation may take."""
    n, speed = answer["completion_tokens"], answer["timings"]["tokens_per_s"]
    if answer["finish_reason"] == "cancelled":
        return f"{n} tokens (stopped)"
    parts = [f"{n} tokens ({answer['finish_reason']})", f"{speed:.1f} tok/s" if speed else ""]
    cached, taken = answer["cached_tokens"], min(answer["prompt_tokens"] + n, context)
    parts += [f"{cached} cached" if cached else "", f"context {taken} of {context}"]
    return ", ".join(filter(None, parts))


def _span(span: Sequence[int]) -> str:
    return "[{}, {})".format(*span) if span else "-"


def _title(text: str) -> Text:
    """As rich shows a title, but for what is in brackets."""
    return Text(line(text), style="table.title")


def _add(table: Table, *cells: str) -> None:
    """A row whose texts come from elsewhere: a bracket is no markup, and no character a command."""
    table.add_row(*(Text(line(cell)) for cell in cells))


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
