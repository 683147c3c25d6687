"""How a run ends when it does not end by itself: interrupted, killed, or a part of it lost. Nothing of it may stay."""

import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import WaitUntil
from tests.integration.run import Command, Ended, assert_one_line, bound

GONE_S = 10.0  # by then the workers must have noticed that their run is gone
MARGIN_S = 2.0
LONG = ("--raw", "Once upon a time", "--max-tokens", "1500")


def story(folder: Path, model: Path, *argv: str) -> Command:
    """A run that takes half a minute unless something ends it."""
    return Command(folder, "run", *LONG, "--model", str(model), *argv)


def tiny(folder: Path, goldens: Path, *argv: str, **environ: str) -> Command:
    return Command(folder, "run", "-q", "--tokens", "1,2,3", "--model", str(goldens / "llama-tied"), *argv, **environ)


# ---- asked to end ----


def test_sigint_ends_with_the_text_so_far(tmp_path: Path, smollm2_gguf: Path) -> None:
    with story(tmp_path, smollm2_gguf) as command:
        text = b""
        while len(text) < 40:
            text += command.process.stdout.read1()
        ports = command.ports()
        command.signal(signal.SIGINT)
        ended = command.wait()
    assert ended.code == 1
    assert "(cancelled)" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert ended.kept == ()
    assert len(ports) > 0
    assert bound(ports) == set()


def test_sigterm_ends_with_one_json_object_and_no_secret_anywhere(tmp_path: Path, smollm2_gguf: Path) -> None:
    with story(tmp_path, smollm2_gguf, "--json", "--link", "iroh") as command:
        command.wait_for_tokens(10)
        secrets = secrets_of(command)
        arguments = "\n".join(" ".join(p.cmdline()) for p in command.processes())
        logs = "\n".join(command.logs().values())
        ports = command.ports()
        command.signal(signal.SIGTERM)
        ended = command.wait()
    assert ended.code == 1
    report = ended.report
    assert report["finish_reason"] == "cancelled"
    assert len(report["token_ids"]) >= 10
    assert len(report["text"]) > 10
    assert (ended.kept, bound(ports)) == ((), set())
    assert len(ports) >= 4  # the broker, a link for each worker, the link that serves them
    assert len(secrets) == 1 + 1 + 4  # broker, frames, the links' common one and a key for each of three
    for place in (arguments, logs, ended.stdout, ended.stderr):
        assert not [secret for secret in secrets if secret in place]
    assert "celery" in arguments
    assert "link" in logs


def secrets_of(command: Command) -> set[str]:
    """The broker's password, the frames' key and the links' keys, as the processes of the run were told them."""
    environs = command.environs()
    passwords = {re.split("[:@]", e["PP_BROKER"])[2] for e in environs if "PP_BROKER" in e}
    return passwords | {
        e[name] for e in environs for name in ("PP_SECRET", "PP_LINK_SECRET", "PP_LINK_KEY") if name in e
    }


def test_a_signal_again_and_again_does_not_disturb_the_end(tmp_path: Path, smollm2_gguf: Path) -> None:
    with story(tmp_path, smollm2_gguf, "--json", "-q") as command:
        command.wait_for_tokens()
        while command.process.poll() is None:
            command.signal(signal.SIGINT)
            time.sleep(0.1)
        ended = command.wait()
    assert (ended.code, ended.stderr, ended.kept) == (1, "", ())
    assert ended.report["finish_reason"] == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_while_the_stages_start(tmp_path: Path, goldens: Path, number: signal.Signals) -> None:
    with tiny(tmp_path, goldens) as command:
        command.wait_for(lambda: len(command.workers()) == 2, "two workers")
        ports = command.ports()
        command.signal(number)
        ended = command.wait(20)
    assert (ended.code, ended.stdout, ended.stderr, ended.kept) == (1, "", "cancelled\n", ())
    assert bound(ports) == set()


# ---- killed ----


def test_sigkill_while_the_stages_start(tmp_path: Path, goldens: Path, wait_until: WaitUntil) -> None:
    with ExitStack() as stack:
        runs = [stack.enter_context(tiny(tmp_path, goldens, "--link", link)) for link in ("direct", "iroh")]
        for run in runs:
            run.wait_for(lambda run=run: len(run.workers()) == 2, "two workers")
        assert_gone_soon_after_sigkill(runs, wait_until)


def test_sigkill_mid_decode(tmp_path: Path, smollm2_gguf: Path, redis_url: str, wait_until: WaitUntil) -> None:
    """A given Redis lives on, so there the workers must see that nobody renews the lease."""
    ways = (("--link", "direct"), ("--link", "iroh"), ("--link", "direct", "--broker", redis_url))
    with ExitStack() as stack:
        runs = [stack.enter_context(story(tmp_path, smollm2_gguf, *way)) for way in ways]
        for run in runs:
            run.wait_for_tokens()
        assert_gone_soon_after_sigkill(runs, wait_until)


def assert_gone_soon_after_sigkill(runs: list[Command], wait_until: WaitUntil) -> None:
    ports = set().union(*(run.ports() for run in runs))
    for run in runs:
        assert len(run.processes()) >= 3
        run.process.kill()
        run.process.wait()
    wait_until(lambda: not any(run.left_over() for run in runs), GONE_S + MARGIN_S, "the end of their processes")
    assert bound(ports) == set()


# ---- a part is lost ----


def test_a_worker_that_dies_mid_decode(tmp_path: Path, smollm2_gguf: Path) -> None:
    with ExitStack() as stack:
        runs = [stack.enter_context(story(tmp_path, smollm2_gguf, "-q", "--link", link)) for link in ("direct", "iroh")]
        for stage, run in enumerate(runs):
            run.wait_for_tokens()
            run.workers()[stage].kill()
        for stage, run in enumerate(runs):
            assert_a_lost_stage(run.wait(20), stage)


def test_a_worker_that_dies_while_it_loads(tmp_path: Path, goldens: Path) -> None:
    with tiny(tmp_path, goldens) as command:
        command.wait_for(lambda: command.logs().get("stage1.log"), "the first words of stage 1")
        command.workers()[1].kill()
        ended = command.wait(20)
    assert ended.stdout == ""
    assert_a_lost_stage(ended, 1)


def assert_a_lost_stage(ended: Ended, stage: int) -> None:
    assert ended.code == 1
    assert_one_line(ended.stderr, f"stage {stage}", "SIGKILL")
    shown = [line.removeprefix("  | ") for line in ended.stderr.splitlines() if line.startswith("  | ")]
    log = next(path for path in ended.kept if path.name == f"stage{stage}.log").read_text().splitlines()
    assert shown == log[-20:]
    assert len(shown) > 0


def test_a_worker_that_refuses_to_start_says_why(tmp_path: Path, goldens: Path) -> None:
    with tiny(tmp_path, goldens, CC="/no/such/compiler") as command:
        ended = command.wait()
    assert ended.code == 1
    assert_one_line(ended.stderr, "stage ", "CC=/no/such/compiler")


def test_an_embedded_broker_that_dies_mid_decode(tmp_path: Path, smollm2_gguf: Path) -> None:
    with story(tmp_path, smollm2_gguf, "-q") as command:
        command.wait_for_tokens()
        (broker,) = (process for process in command.processes() if process.name() == "valkey-server")
        broker.kill()
        ended = command.wait(20)
    assert ended.code == 1
    assert_one_line(ended.stderr, "broker")


def test_stages_that_are_not_ready_in_time(tmp_path: Path, goldens: Path) -> None:
    with tiny(tmp_path, goldens, "--timeout", "0.2") as command:
        ended = command.wait(20)
    assert ended.code == 1
    assert_one_line(ended.stderr, "stage 0", "stage 1", "0.2 s", "--timeout")
    folder = re.search(r"look at (\S+),", ended.stderr)[1]
    assert [str(path) for path in ended.kept] == [folder, f"{folder}/stage0.log", f"{folder}/stage1.log"]


def test_a_reader_that_goes_away(tmp_path: Path, smollm2_gguf: Path) -> None:
    """As in `pp run ... | head -c 1`."""
    with story(tmp_path, smollm2_gguf, "-q") as command:
        assert command.process.stdout.read(1)
        command.process.stdout.close()
        command.process.stdout = None
        ended = command.wait(20)
    assert ended.code != 0
    assert "Traceback" not in ended.stderr
