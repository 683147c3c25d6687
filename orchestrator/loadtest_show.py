"""What `pp bench serve` found, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from orchestrator.loadtest import QUANTILES, is_late
from pptasks.errors import StorageError, UsageError
from pptasks.shown import line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
_LATENCIES = (("ttft_s", "time to first token"), ("inter_token_s", "between tokens"))


def table(rows: Rows, title: str) -> Table:
    """Fits a terminal of 80 columns."""
    shown = Table(
        "req/s", "sent", "done", "first token", "inter-token", "whole answer", "tok/s", "errors",
        title=Text(line(title), style="table.title"), caption="times: p50/p95/p99 in ms", caption_justify="left",
        padding=(0, 0, 0, 1),
    )  # fmt: skip
    for found in rows:
        times = (_ms(found[name]) for name in ("ttft_s", "inter_token_s", "e2e_s"))
        cells = (f"{found['rate']:g}", str(found["sent"]), str(found["answered"]), *times)
        shown.add_row(*cells, f"{found['tokens_per_s']:.1f}", Text(_errors(found)))
    return shown


def warnings(rows: Rows) -> list[str]:
    """What a reader must know to trust the figures."""
    return [
        f"at {found['rate']:g}/s this machine sent requests up to {found['late_max_s'] * 1000:.0f} ms late: "
        "it is too busy to measure that"
        for found in rows
        if is_late(dict(found))
    ]


def _ms(figures: Mapping[str, float] | None) -> str:
    return "-" if figures is None else "/".join(f"{figures[f'p{q}'] * 1000:.0f}" for q in QUANTILES)


def _errors(found: Mapping[str, Any]) -> str:
    errors = [f"{n}x {line(kind, 40)}" for kind, n in sorted(found["errors"].items())]
    return ", ".join(errors + ([f"{found['unfinished']} unfinished"] if found["unfinished"] else [])) or "-"


def check_png(file: Path) -> None:
    """Raises UsageError, before anything is measured, if no picture could be written in the end."""
    if not file.parent.is_dir():
        raise UsageError(f"--png {file}: {file.parent} is no folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'pptasks[plot]', or leave --png out") from None


def write_png(file: Path, rows: Rows, title: str) -> None:
    """Latency and throughput against load. Raises StorageError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    figure.suptitle(line(title, 120), parse_math=False)
    drawn = [found for found in rows if found["answered"]]
    axes = figure.subplots(1, 3)
    for axis, (name, label) in zip(axes, _LATENCIES, strict=False):
        for q in QUANTILES:
            points = [(found["rate"], found[name][f"p{q}"] * 1000) for found in drawn if found[name]]
            axis.plot(*_columns(points), marker="o", label=f"p{q}")
        _label(axis, f"{label}, ms")
    axes[2].plot(
        *_columns([(found["rate"], found["tokens_per_s"]) for found in drawn]), marker="o", label="whole answers"
    )
    _label(axes[2], "tokens a second")
    try:
        figure.savefig(file, format="png")
    except OSError as e:
        raise StorageError(f"cannot write {file}: {e.strerror or e}") from None


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _label(axis: "Axes", what: str) -> None:
    axis.set_xlabel("requests a second")
    axis.set_ylabel(what)
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    axis.legend()
