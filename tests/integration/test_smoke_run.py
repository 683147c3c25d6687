"""`pp-smoke-run --vastai` as a user runs it, against the fake of vast.ai with its limits: rent, answer, end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.ledger import Ledger
from tests.conftest import WaitUntil
from tests.fake_vast import FakeVast, Machine, Started, offers, run_args
from tests.integration.run import ROOT, SMOKE_RUN, Command, Ended, assert_one_line

RENT = ("--vastai", "--yes", "--relay", "none", "--model", "smollm2:135m")
SMOKE_S = 60.0  # what the smoke run may take where everything is cached


@pytest.fixture
def fake(smollm2_gguf: Path) -> Iterator[FakeVast]:
    """Its instances are of an image that holds this program, the model in its cache, and nothing of ours."""
    with FakeVast(offers(4), start=image(), scale=1.0) as fake:
        yield fake


def image() -> Callable[[Machine], Started]:
    inside = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "CC") if name in os.environ}
    inside |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return lambda machine: run_args(replace(machine, env={**inside, **machine.env}))


def smoke_run(folder: Path, fake: FakeVast, *argv: str, stdin: bytes = b"") -> Command:
    return Command(
        folder, *argv, stdin=stdin, program=SMOKE_RUN, VAST_API_KEY=fake.key, PP_VAST_URL=fake.url
    )  # fmt: skip


def ended(folder: Path, fake: FakeVast, *argv: str) -> Ended:
    with smoke_run(folder, fake, *argv) as command:
        return command.wait()


def test_it_rents_answers_and_leaves_nothing_that_bills(fake: FakeVast, tmp_path: Path) -> None:
    began = time.monotonic()
    with smoke_run(tmp_path, fake, *RENT) as command:
        command.wait_for(lambda: len(fake.billing) == 2 and all(m.process for m in fake.billing), "two machines")
        hidden = hidden_from(fake)
        arguments = "\n".join(" ".join(argv_of(process)) for process in psutil.process_iter())
        done = command.wait()
    took = time.monotonic() - began
    assert done.code == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert took < SMOKE_S
    assert (len(fake.instances), fake.billing, fake.too_fast) == (2, [], [])
    assert len({machine.offer["machine_id"] for machine in fake.instances.values()}) == 2
    assert all(f"stage {stage}: ready (machine" in done.stderr for stage in range(2)), done.stderr
    assert done.kept == ()
    for place in (arguments, done.stdout, done.stderr, *command.logs().values()):
        assert not [secret for secret in hidden if secret in place]
    ledger = command.state / "pptasks" / "rentals.sqlite"
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert Ledger(ledger).open_rows() == []


def hidden_from(fake: FakeVast) -> set[str]:
    """The key, and what each machine was told."""
    told = {m.env[name] for m in fake.billing for name in ("PP_SECRET", "PP_LINK_KEY", "PP_LINK_SECRET")}
    return told | {re.split("[:@]", m.env["PP_BROKER"])[2] for m in fake.billing} | {fake.key}


def argv_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_each_machine_has_its_own_way_in(fake: FakeVast, tmp_path: Path) -> None:
    fake._start = None  # they are not needed
    with smoke_run(tmp_path, fake, *RENT) as command:
        command.wait_for(lambda: len(fake.billing) == 2, "two machines")
        first, second = (machine.env for machine in sorted(fake.billing, key=lambda machine: machine.id))
    shared = {name for name in first if first[name] == second[name]}
    assert {"PP_LINK_KEY", "PP_BROKER", "STAGE"} == first.keys() - shared
    assert first.keys() == second.keys()
    assert not {"VAST_API_KEY", "HF_TOKEN", "PP_CACHE", "CC", "HF_HOME"} & first.keys()
    assert float(first["PP_DEADLINE"]) - time.time() == pytest.approx(300, abs=30)


def test_dry_run_asks_nothing_that_costs(fake: FakeVast, tmp_path: Path) -> None:
    done = ended(tmp_path, fake, "--dry-run", "--json", "--vastai", "--model", "smollm2:135m", "--stages", "3")
    assert done.code == 0, done.stderr
    report = done.report
    assert [offer["stage"] for offer in report["offers"]] == [0, 1, 2, None]
    assert report["price_usd_hour"] == pytest.approx(sum(o["usd_hour"] for o in report["offers"][:3]))
    assert {request.kind for request in fake.log} == {"search", "list"}


def test_without_yes_and_nobody_to_ask_nothing_is_rented(fake: FakeVast, tmp_path: Path) -> None:
    done = ended(tmp_path, fake, "--vastai", "--model", "smollm2:135m")
    assert done.code == 2
    assert_one_line(done.stderr, "--yes")
    assert fake.calls("create") == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--vastai", "--hosts", "a,b"), ("--vastai", "--hosts")),
        (("--vastai", "--yes", "--region", "atlantis"), ("atlantis", "europe")),
        (("--vastai", "--yes", "--model", "/tmp/x.gguf"), ("/tmp/x.gguf",)),
        (("--vastai", "--yes", "--min-vram", "80"), ("2 machines are needed", "--min-vram")),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_rented(
    fake: FakeVast, tmp_path: Path, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    fake.limits.scale = 0.0
    model = () if "--model" in argv else ("--model", "smollm2:135m")
    done = ended(tmp_path, fake, *argv, *model)
    assert done.code in (1, 2)
    assert_one_line(done.stderr, *words)
    assert fake.calls("create") == []


def test_a_file_of_this_machine_is_not_for_rented_ones(fake: FakeVast, tmp_path: Path, goldens: Path) -> None:
    done = ended(tmp_path, fake, "--vastai", "--yes", "--model", str(goldens / "llama-tied"))
    assert done.code == 2
    assert_one_line(done.stderr, "cannot read", "pp models")


def test_without_a_key_it_says_how_to_give_one(tmp_path: Path) -> None:
    with Command(tmp_path, *RENT, program=SMOKE_RUN, VAST_API_KEY="") as command:
        done = command.wait()
    assert done.code == 2
    assert_one_line(done.stderr, "VAST_API_KEY")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_or_a_terminal_that_is_gone_saves_no_machine(
    fake: FakeVast, tmp_path: Path, wait_until: WaitUntil, terminal: bool
) -> None:
    fake.limits.scale, fake._start = 0.0, None  # no machine is needed to answer
    reader, writer = os.openpty() if terminal else os.pipe()
    env = dict(os.environ) | {"VAST_API_KEY": fake.key, "PP_VAST_URL": fake.url, "XDG_STATE_HOME": str(tmp_path)}
    command = subprocess.Popen(
        [sys.executable, *SMOKE_RUN, *RENT], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    try:
        os.close(writer)
        wait_until(lambda: len(fake.billing) == 2, 60, "two machines")
        os.close(reader)
        command.send_signal(signal.SIGHUP)
        assert command.wait(60) != 0
    finally:
        command.kill()
    assert fake.billing == []
