"""`pp chat` at a real terminal and from a script: memory, Ctrl-C, the ways to end it, and the file that keeps it."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from pptasks.keys import Keys
from pptasks.members import read_members
from tests.integration.run import Command, Ended, assert_one_line, pp
from tests.integration.terminal import CTRL_C, CTRL_D, Terminal

PROMPT = r"\n>>> $"
CLOSING = r"(\d+) tokens \((stop|length)\)(?:, [\d.]+ tok/s)?(?:, (\d+) cached)?, context (\d+) of (\d+)"


def figures(said: str) -> dict[str, int]:
    """What the closing line of a turn tells."""
    found = re.fullmatch(CLOSING, said.splitlines()[-1])
    assert found, said
    n, _, cached, context, most = found.groups()
    return {"tokens": int(n), "cached": int(cached or 0), "context": int(context), "most": int(most)}


def cancelled(command: Command) -> int:
    """Requests that its head was told to stop, and has stopped."""
    environ = command.wait_for_worker()
    with redis.Redis.from_url(environ["PP_BROKER"]) as client:
        return read_members(client, Keys(environ["PP_RUN"]), 2)[0].cancelled


@pytest.fixture(scope="module")
def held(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of those who may use a tiny cluster, "tiny", that stays up."""
    folder = tmp_path_factory.mktemp("held")
    with Command(folder, "up", "--name", "tiny", "--model", str(goldens / "llama-tied"), "--wire", "f32") as up:
        assert b"tiny is ready" in up.process.stdout.readline(), up.stderr
        yield {"XDG_STATE_HOME": str(up.state)}
        up.signal(signal.SIGTERM)
        assert up.wait().code == 0


HELD = ("chat", "--cluster", "tiny", "-q", "--max-tokens", "6")


# ---- at a terminal ----


def test_a_chat_remembers_is_stopped_and_goes_on(tmp_path: Path, smollm2_gguf: Path) -> None:
    kept = tmp_path / "kept.json"
    argv = ("chat", "--model", str(smollm2_gguf), "--history", str(kept), "--max-tokens", "1500")
    with Terminal(tmp_path, *argv) as chat:
        chat.wait_for_text(r"\n[^\n]* 2 stages; /help .*" + PROMPT)
        first = figures(chat.ask("My name is Ada. Say only: hello Ada."))
        assert first["most"] == 2048
        second = figures(chat.ask("What is my name?"))
        assert second["context"] > first["context"] + second["tokens"]  # the prompt held the first turn
        assert second["cached"] > 0

        since = chat.type("Write a long story about a lighthouse.\r")
        chat.wait_for_text(r"lighthouse\.\n.{80}", since)
        chat.type(CTRL_C)
        chat.wait_for_text(r"\n\d+ tokens \(stopped\)" + PROMPT, since)
        chat.wait_for(lambda: cancelled(chat) == 1, "the end of what was stopped", 10)

        pasted = "\x1b[200~Here are two lines.\rSay only: ok.\x1b[201~"
        third = figures(chat.ask(pasted))
        assert third["context"] > second["context"]
        chat.type(CTRL_D)
        ended = chat.wait()
    assert (ended.code, ended.kept) == (0, ())
    assert "Traceback" not in chat.screen
    said = json.loads(kept.read_text())
    assert [message["role"] for message in said] == ["user", "assistant"] * 4
    assert said[6]["content"] == "Here are two lines.\nSay only: ok."
    assert 80 <= len(said[5]["content"]) < 6000  # what had come of the story when it was stopped
    assert kept.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_at_the_prompt(tmp_path: Path, held: dict[str, str]) -> None:
    """It throws away what was typed; a second one where nothing was typed ends the chat, and is no failure."""
    with Terminal(tmp_path, *HELD, **held) as chat:
        chat.wait_for_text(r">>> $")
        for begun in ("not to be sent", "\\\r"):
            since = chat.type(begun)
            chat.wait_for_text(r"\n\.\.\. $" if begun == "\\\r" else begun, since)
            since = chat.type(CTRL_C)
            chat.wait_for_text(PROMPT, since)
        since = chat.type(CTRL_C)
        chat.wait_for_text(r"Ctrl-C again, .*" + PROMPT, since)
        chat.ask("Hi")  # so it is a first one again
        since = chat.type(CTRL_C)
        chat.wait_for_text(r"Ctrl-C again, .*" + PROMPT, since)
        assert "Ctrl-C again" not in chat.screen[: since - 10].rpartition("Hi")[2]
        chat.type(CTRL_C)
        ended = chat.wait()
    assert (ended.code, ended.kept) == (0, ())
    assert "Traceback" not in chat.screen


def test_sigterm_in_an_answer_ends_it(tmp_path: Path, smollm2_gguf: Path) -> None:
    kept = tmp_path / "kept.json"
    argv = ("chat", "--model", str(smollm2_gguf), "--history", str(kept), "-q", "--max-tokens", "1500")
    with Terminal(tmp_path, *argv) as chat:
        chat.wait_for_text(r">>> $")
        since = chat.type("Write a long story about a lighthouse.\r")
        chat.wait_for_text(r"lighthouse\.\n.{40}", since)
        chat.signal(signal.SIGTERM)
        ended = chat.wait()
    assert (ended.code, ended.kept) == (1, ())
    assert chat.screen.splitlines()[-1] == "cancelled"
    assert len(json.loads(kept.read_text())) == 2  # what had come


def test_sigterm_at_the_prompt_ends_it(tmp_path: Path, held: dict[str, str]) -> None:
    with Terminal(tmp_path, *HELD, **held) as chat:
        chat.wait_for_text(r">>> $")
        chat.signal(signal.SIGTERM)
        ended = chat.wait()
    assert (ended.code, ended.kept) == (1, ())
    assert chat.screen.splitlines()[-1] == "cancelled"


def test_a_stage_that_dies_ends_it_with_the_stages_own_words(tmp_path: Path, smollm2_gguf: Path) -> None:
    with Terminal(tmp_path, "chat", "--model", str(smollm2_gguf), "-q", "--max-tokens", "1500") as chat:
        chat.wait_for_text(r">>> $")
        since = chat.type("Write a long story about a lighthouse.\r")
        chat.wait_for_text(r"lighthouse\.\n.{40}", since)
        chat.workers()[1].kill()
        ended = chat.wait(20)
    assert ended.code == 1
    assert_one_line(chat.screen, "stage 1", "SIGKILL")
    assert len([line for line in chat.screen.splitlines() if line.startswith("  | ")]) > 0
    assert any(path.name == "stage1.log" for path in ended.kept)


# ---- from a script ----


def from_script(folder: Path, held: dict[str, str], *lines: str, argv: tuple[str, ...] = ()) -> Ended:
    return pp(folder, *HELD, *argv, stdin="".join(f"{line}\n" for line in lines).encode(), **held)


def test_a_script_gets_answers_and_nothing_else(tmp_path: Path, held: dict[str, str]) -> None:
    kept, saved = tmp_path / "kept.json", tmp_path / "saved.json"
    ended = from_script(
        tmp_path, held, "Hi", "", "two\\", "lines", "/retry", f"/save {saved}", argv=("--history", str(kept))
    )
    assert (ended.code, ended.stderr) == (0, f"4 messages are in {saved}\n")
    messages = json.loads(kept.read_text())
    assert json.loads(saved.read_text()) == messages
    assert [message["content"] for message in messages[::2]] == ["Hi", "two\nlines"]
    first, second = (message["content"] for message in messages[1::2])
    assert ended.stdout == "".join(text if text.endswith("\n") else f"{text}\n" for text in (first, second, second))

    # Read again, it is a conversation as any other: the next answer is what `pp run --chat` gives.
    again = from_script(tmp_path, held, "/system Be\\", "brief.", " /And?", argv=("--history", str(kept)))
    assert again.code == 0
    then = json.loads(kept.read_text())
    assert then[:6] == [{"role": "system", "content": "Be\nbrief."}, *messages, {"role": "user", "content": " /And?"}]
    (tmp_path / "chat.json").write_text(json.dumps(then[1:6]))
    argv = ("--chat", str(tmp_path / "chat.json"), "--system", "Be\nbrief.", "--json")
    whole = pp(tmp_path, "run", *HELD[1:], *argv, **held)
    assert whole.report["text"] == then[6]["content"]


def test_a_conversation_that_outgrows_the_context(tmp_path: Path, held: dict[str, str]) -> None:
    """The chat goes on, and its exit code tells that a question got no answer."""
    ended = from_script(tmp_path, held, "Hi", "many words " * 100, "/clear", "Hi", "/exit", "never asked")
    assert ended.code == 1
    assert_one_line(ended.stderr, "tokens", "256", "/clear")
    first, again = ended.stdout[: len(ended.stdout) // 2], ended.stdout[len(ended.stdout) // 2 :]
    assert first == again != ""


def test_what_cannot_be_done_is_told(tmp_path: Path, held: dict[str, str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("not to be lost")
    ended = from_script(tmp_path, held, "/sing", "/retry", "/clear all", f"/save {other}", "/save", "/help")
    assert (ended.code, ended.stdout) == (1, "")
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    for error, words in zip(errors, ("/sing", "nothing was asked", "/clear", str(other), "/save FILE"), strict=True):
        assert words in error
    assert "/retry " in ended.stderr
    assert other.read_text() == "not to be lost"


def test_a_history_that_is_none_is_refused_before_anything_starts(tmp_path: Path, goldens: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('[{"role": "teacher", "content": "x"}]')
    for file, code, words in ((wrong, 2, "teacher"), (tmp_path / "no" / "such.json", 1, "No such file")):
        with Command(tmp_path, "chat", "--model", str(goldens / "llama-tied"), "--history", str(file)) as command:
            ended = command.wait()
            assert not command.state.exists()
        assert ended.code == code
        assert_one_line(ended.stderr, str(file), words)
    assert wrong.read_text() == '[{"role": "teacher", "content": "x"}]'
