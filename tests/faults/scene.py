"""A market with other people's machines in it, a state folder of its own, and what a fault left behind at its end.

A scenario puts a fault into `scene.fake`, goes through a run, and says what must come of it. When the scene is left, it
asserts what must hold in every one: nothing of ours bills, what is not ours lives, no limit of the API was passed, and
no secret was said or written.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import psutil
from click.testing import CliRunner
from rich.console import Console

from orchestrator.board import Board
from orchestrator.fleet import Fleet
from orchestrator.job import Job
from orchestrator.ledger import Ledger
from orchestrator.manage import sweep
from orchestrator.offers import choose
from orchestrator.provider import Need
from orchestrator.renting import Terms
from orchestrator.run import Options, Run
from orchestrator.vast import Vast
from orchestrator.watch import Patience
from pptasks.config import Settings
from pptasks.errors import PPError
from pptasks.modelinfo import Model
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.request import Request
from tests.fake_hub import FakeHub
from tests.fake_vast import NEVER_RUNS, FakeVast, Machine, Started, offers, run_args
from tests.fake_vast.machine import Start

ROOT = Path(__file__).parents[2]
NEED = Need(min_vram_bytes=8 * 10**9)
SCALE = 0.02  # of the API's limits
HASTY = Patience(start_s=0.8, step_s=0.4, lost_s=0.4)  # where nothing is to become ready
WORKING = Patience(start_s=40.0, step_s=40.0, lost_s=8.0)  # where real workers start
NODE = "exec python -m workers.node"
SLEEP = "exec sleep 600"
ANSWER_S = 40.0
_SECRETS = ("PP_SECRET", "PP_LINK_KEY", "PP_LINK_SECRET", "PP_LINK_TICKET")


@dataclass
class Figures:
    """What one injection came to."""

    mode: str
    billing: int = 0  # of ours, after the command
    swept: int | None = None  # of ours, after one `pp sweep`; None: there was no need of one
    foreign_ended: int = 0
    too_fast: int = 0


@dataclass(frozen=True)
class Ground:
    """What all scenes share: a Hub, its model, and caches that are warm after the first."""

    hub: FakeHub
    model: str  # as the Hub names it
    cache_home: Path  # of instances and of ours: XDG_CACHE_HOME

    @property
    def cache(self) -> Path:
        return self.cache_home / "pptasks"


def image(cache_home: Path, program: Path = ROOT, script: str = "", **environ: str) -> Start:
    """What starts an instance: the image holds `program`, a copy of this one, and a cache.

    script: for a shell, in place of what was ordered. environ: in place of what the instance was told.
    """
    inside = {"PYTHONPATH": str(program), "HOME": str(cache_home), "XDG_CACHE_HOME": str(cache_home)}
    inside |= {"CC": os.environ["CC"]} if os.environ.get("CC") else {}
    inside["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(machine: Machine) -> Started:
        args = ["-c", f"cd {program} && {script or machine.args[-1]}"]  # where Python looks for modules first
        return run_args(replace(machine, args=args, env={**inside, **machine.env, **environ}))

    return start


def by_stage(*images: Start) -> Start:
    """Another image for each stage."""
    return lambda machine: images[int(machine.env["STAGE"])](machine)


def first_only(bad: Start, good: Start) -> Start:
    """`bad` for the first machine that starts as stage 1, `good` for all others."""
    seen: list[int] = []

    def start(machine: Machine) -> Started:
        if machine.env["STAGE"] == "1" and not seen:
            seen.append(machine.id)
            return bad(machine)
        return good(machine)

    return start


@dataclass
class Scene:
    """A context manager. `state`: the state folder's parent, for XDG_STATE_HOME. `said`: all that was told."""

    ground: Ground
    figures: Figures
    state: Path
    fake: FakeVast
    said: list[str] = field(default_factory=list)
    foreign: list[Machine] = field(default_factory=list)
    may_bill: bool = False  # the command is to fail to end what it rented

    @classmethod
    @contextmanager
    def open(
        cls, ground: Ground, figures: Figures, state: Path, start: Start | None, n: int,
        **fake: object,
    ) -> Iterator["Scene"]:  # fmt: skip
        """n: offers that are left for us."""
        others = ("somebody's", None, "pptasks", "pptasks-evil", "pptasks-0badcafe-abcdef012345-0-99999999999-beef")
        with FakeVast(offers(n + len(others)), start=start, scale=SCALE, **fake) as market:  # type: ignore[arg-type]
            dearest = sorted(market.offers, key=int, reverse=True)
            kept = {key: market.offers.pop(key) for key in dearest[len(others) :]}
            foreign = [market.rent_as_another(label) for label in others]
            for machine in foreign:
                machine.life = NEVER_RUNS  # no process of it is needed
            market.offers.update(kept)
            with cls(ground, figures, state, market, foreign=foreign) as scene:
                yield scene

    def __enter__(self) -> "Scene":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.count()
        if kind is None:
            assert self.figures.foreign_ended == 0
            assert self.fake.too_fast == []
            assert self.may_bill or self.ours == []
            self.assert_no_secret()

    def count(self, *, swept: bool = False) -> None:
        """Note what bills now."""
        self.figures.foreign_ended = sum(not machine.bills for machine in self.foreign)
        self.figures.too_fast = len(self.fake.too_fast)
        if swept or self.figures.swept is not None:
            self.figures.swept = len(self.ours)
        else:
            self.figures.billing = len(self.ours)

    @property
    def ours(self) -> list[Machine]:
        """What we rented and bills."""
        return [machine for machine in self.fake.billing if machine not in self.foreign]

    @property
    def rented(self) -> list[Machine]:
        """All that we ever rented, in that order."""
        return [machine for machine in self.fake.instances.values() if machine not in self.foreign]

    @property
    def told(self) -> str:
        return "\n".join(self.said)

    def sweep(self) -> None:
        """`pp sweep --yes`, with the account's key. What bills is counted then, and must be nothing."""
        self.count()
        environ = {"VAST_API_KEY": self.fake.key, "PP_VAST_URL": self.fake.url, "XDG_STATE_HOME": str(self.state)}
        done = CliRunner().invoke(sweep, ["--yes"], env=environ)
        self.said.append(done.output)
        self.count(swept=True)
        assert done.exit_code == 0, (done.output, done.exception)
        assert self.ours == []

    def vast(self) -> Vast:
        return Vast(self.fake.key, self.fake.url, gaps_s=self.fake.gaps_s)

    @contextmanager
    def fleet(
        self, patience: Patience = HASTY, *, command: str = NODE, linked: bool = False, n: int = 2,
        deadline_s: float = 60.0, budget_usd: float | None = None, max_price: float = NEED.max_price_usd_hour,
    ) -> Iterator[Fleet]:  # fmt: skip
        """Search, rent, wait; ready inside. What it says and what it raises goes into `said`."""
        console = Console(file=StringIO(), width=200, no_color=True)
        try:
            with self.vast() as vast:
                settings, opened = self.settings(n)
                need = replace(NEED, max_price_usd_hour=max_price)
                choice = choose(vast.search(need), need, n)
                deadline, ledger = time.time() + deadline_s, self.ledger()
                terms = Terms("image", command, deadline, budget_usd, patience=patience, look_s=0.1)
                plan, options = make_plan(opened, settings), Options(link="iroh" if linked else "direct")
                with (
                    Board(console) as board,
                    Run(settings, options) as run,
                    Fleet(run, plan, terms, choice, vast, ledger, board, linked=linked) as fleet,
                ):
                    self.assert_no_secret_in_processes()
                    yield fleet
        except PPError as error:
            self.said.append("".join(traceback.format_exception(error)) + repr(vars(error)))
            raise
        finally:
            self.said.append(console.file.getvalue())  # type: ignore[attr-defined]

    def settings(self, n: int) -> tuple[Settings, Model]:
        """Small and exact: the Hub's golden model, one slot."""
        hub, cache = self.ground.hub.url, self.ground.cache
        small = Settings(hf_endpoint=hub, cache=cache, num_stages=n, wire="f32", slots=1, lap_deadline_s=3.0)
        opened = open_model(self.ground.model, cache, lambda *_: None, small.hub)
        return replace(small, model=opened.spec), opened

    def ledger(self) -> Ledger:
        return Ledger(self.state / "pptasks" / "rentals.sqlite")

    def ask(self, fleet: Fleet, on_text: Callable[[str], None] = lambda text: None, n: int = 200) -> dict[str, object]:
        return Job(fleet, ANSWER_S).run(Request(prompt="Say hello", max_tokens=n), on_text)

    def secrets(self) -> set[str]:
        """The account's key, and all that any machine of ours was told."""
        envs: list[Mapping[str, str]] = [machine.env for machine in self.rented]
        passwords = {urlsplit(env["PP_BROKER"]).password for env in envs if "PP_BROKER" in env}
        told = {env[name] for env in envs for name in _SECRETS if name in env}
        return {secret for secret in {self.fake.key, *told, *passwords} if secret}

    def assert_no_secret_in_processes(self) -> None:
        lines = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        self.assert_hidden("argv", "\n".join(lines))

    def assert_no_secret(self) -> None:
        """In what was told, and in every file of the state folder but the records of clusters, which hold a run's."""
        self.assert_hidden("output", "\n".join(self.said))
        for path in self.state.rglob("*"):
            if path.is_file() and path.parent.name != "clusters":
                with suppress(FileNotFoundError):
                    self.assert_hidden(str(path), path.read_bytes().decode(errors="replace"))

    def assert_hidden(self, where: str, text: str, secrets: Collection[str] = ()) -> None:
        """secrets: these; all of them where none is given."""
        assert [secret[:4] + "..." for secret in secrets or self.secrets() if secret in text] == [], where
