"""The ground that all fault scenarios stand on, and the table of what they came to."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from orchestrator import fleet, sweep, vast, vastcalls
from pptasks.config import Settings
from tests.fake_hub import FakeHub
from tests.fake_vast.machine import Start
from tests.faults.scene import SCALE, Figures, Ground, Scene, image

MODEL = "golden/llama-tied"
FIGURES = pytest.StashKey[list[Figures]]()
Open = Callable[..., AbstractContextManager[Scene]]


def warm(cache_home: Path) -> Path:
    """A cache with this user's compiled kernels, and no model."""
    cache = cache_home / "pptasks"
    cache.mkdir(parents=True)
    for name in ("compilers", "kernels"):
        there = Settings.of_this_machine().cache.resolve() / name
        there.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(there)
    return cache_home


@pytest.fixture(scope="session")
def ground(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with FakeHub({MODEL: goldens / "llama-tied"}) as hub:
        yield Ground(hub, MODEL, warm(tmp_path_factory.mktemp("faults") / "cache"))


@pytest.fixture(scope="session")
def node(ground: Ground) -> Start:
    """Starts the real program on an instance."""
    return image(ground.cache_home)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of the client and of the teardown that are as short as the fake's limits."""
    for name, value in (("FIRST_WAIT_S", 0.02), ("MOST_WAIT_S", 0.1), ("PATIENCE_S", 0.4), ("TIMEOUT", 1.0)):
        monkeypatch.setattr(vastcalls, name, value)
    monkeypatch.setattr(vast, "CREATE_WAIT_S", 0.1)
    monkeypatch.setattr(fleet, "POLL_S", 0.05)
    for kind, gap in vast.GAPS_S.items():
        monkeypatch.setitem(vast.GAPS_S, kind, SCALE * gap)
    monkeypatch.setattr(sweep, "LOOK_S", 0.1)
    monkeypatch.setitem(sweep.end.__kwdefaults__, "patience_s", 0.5)


@pytest.fixture
def scene(
    ground: Ground, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Open:
    """`with scene(mode, start, n=6, ...) as it`: one injection, counted under `mode`; see Scene.open."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    shared = ground

    def open_(
        mode: str,
        start: Start | None = None,
        n: int = 6,
        *,
        ground: Ground = shared,
        state: Path = tmp_path / "state",
        **fake: object,
    ) -> AbstractContextManager[Scene]:
        figures = Figures(mode)
        request.config.stash.setdefault(FIGURES, []).append(figures)
        return Scene.open(ground, figures, state, start, n, **fake)

    return open_


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if all_ := config.stash.get(FIGURES, []):
        terminalreporter.section("fault injections")
        for line in table(all_):
            terminalreporter.write_line(line)


def table(all_: list[Figures]) -> list[str]:
    """Markdown: a line for each failure mode, and the sums."""
    modes = list(dict.fromkeys(figures.mode for figures in all_))
    lines = [
        "| failure mode | injections | billing after the command | after pp sweep | not ours, ended | too fast |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*modes, "all"):
        of = [figures for figures in all_ if name in (figures.mode, "all")]
        swept = [figures.swept for figures in of if figures.swept is not None]
        after = str(sum(swept)) if swept else "-"
        counts = sum(f.billing for f in of), after, sum(f.foreign_ended for f in of), sum(f.too_fast for f in of)
        lines.append(f"| {name} | {len(of)} | {' | '.join(map(str, counts))} |")
    return lines
