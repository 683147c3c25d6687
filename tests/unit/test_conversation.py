"""A conversation, and the files that keep one."""

import json
import os
from pathlib import Path

import pytest

from orchestrator.conversation import Conversation, load, save, save_as
from pptasks.errors import StorageError, UsageError
from pptasks.request import Request

TALK = Conversation().led_by("Be brief.").asked("Hi").answered("Hello.").asked("Who?").answered("Me.")


def test_its_parts() -> None:
    assert TALK.system == "Be brief."
    assert [message["role"] for message in TALK.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert Request(messages=TALK.messages)
    assert TALK.led_by(None).messages == TALK.said == TALK.messages[1:]
    assert TALK.led_by("x").led_by("Be brief.") == TALK
    assert TALK.cleared() == Conversation().led_by("Be brief.")
    assert Conversation().system is None


def test_what_came_before_the_last_question() -> None:
    before = Conversation(TALK.messages[:3])
    assert TALK.before_last() == (before, "Who?")
    assert before.asked("And?").before_last() == (before, "And?")  # one that was not answered yet
    assert TALK.cleared().before_last() is None


@pytest.mark.parametrize("text", ["é 你好\n🤖", 'a "quoted" \\ one', "\x1b[2J\x9b31m\u202e"])
def test_a_file_holds_it_as_it_is_and_commands_no_terminal(tmp_path: Path, text: str) -> None:
    talk, file = Conversation().asked(text).answered(text), tmp_path / "talk.json"
    save(file, talk)
    assert load(file) == talk
    assert not set("\x1b\x9b\u202e") & set(file.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_not_there_or_empty_begins_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert load(file) == Conversation()
    save(file, Conversation())
    assert (json.loads(file.read_text()), load(file)) == ([], Conversation())


def test_the_file_that_a_link_names_is_written(tmp_path: Path) -> None:
    file, link = tmp_path / "talk.json", tmp_path / "link.json"
    link.symlink_to(file)
    save(link, TALK)
    assert link.is_symlink()
    assert load(file) == load(link) == TALK


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# a text\n", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"role": "user"}', "no conversation"),
        ('["x"]', "message 0"),
        ('[{"role": "teacher\\u001b", "content": "x"}]', "teacher"),
        ('[{"role": "user", "content": "\\ud800"}]', "surrogate"),
    ],
)
def test_what_is_no_conversation_is_refused_and_left(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "other"
    file.write_text(content)
    with pytest.raises(UsageError, match=words) as caught:
        load(file)
    assert "\x1b" not in str(caught.value)
    with pytest.raises(StorageError, match="left as it is"):
        save_as(file, TALK)
    assert file.read_text() == content


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="no file"):
            load(path)
        with pytest.raises(StorageError, match="no file"):
            save_as(path, TALK)
    with pytest.raises(StorageError, match="No such file"):
        save(tmp_path / "no" / "such", TALK)


def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    save(file, TALK)

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StorageError, match="No space left"):
        save(file, TALK.cleared())
    assert load(file) == TALK
    assert list(tmp_path.iterdir()) == [file]
