"""Labels: read again exactly, refused if they are of any other form; one owner, whoever asks first."""

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import labels
from orchestrator.labels import Label
from pptasks.errors import ConfigError, StorageError

LABEL = Label("0123abcd", "run-0123456789ab", 2, 1790000000, "beef")
TEXT = "pptasks-0123abcd-0123456789ab-2-1790000000-beef"


def test_a_label_and_its_text() -> None:
    assert str(LABEL) == TEXT
    assert Label.parse(TEXT) == LABEL
    assert TEXT.startswith(labels.PREFIX)
    assert TEXT.startswith(labels.of_owner("0123abcd"))
    assert TEXT.startswith(labels.of_run("0123abcd", "run-0123456789ab"))
    assert not TEXT.startswith(labels.of_run("0123abcd", "run-0123456789a"))


@pytest.mark.parametrize(
    "text",
    [
        "", "pptasks", "pptasks-", "pptasks-evil", TEXT[:-1], TEXT + "0", TEXT + "\n", " " + TEXT, TEXT.upper(),
        TEXT.replace("beef", "bee\u0660"), TEXT.replace("-2-", "--"), TEXT.replace("-2-", "-02-"),
        TEXT.replace("-2-", "-\u0662-"), TEXT.replace("1790000000", "1790000000.5"),
        TEXT.replace("1790000000", "-1"), TEXT.replace("1790000000", "01"), TEXT.replace("0123abcd", "0123abc"),
        TEXT.replace("0123456789ab", "run-0123456789ab"), TEXT.replace("pptasks", "pptaskz"), "x" + TEXT,
        TEXT.replace("0123456789ab", "***"),
    ],
)  # fmt: skip
def test_what_is_no_label(text: str) -> None:
    assert Label.parse(text) is None


@pytest.mark.parametrize(
    "change",
    [{"owner": "me"}, {"run": "default"}, {"run": "0123456789ab"}, {"run": "run-"}, {"run": "run-xyz"}, {"stage": -1},
     {"deadline": -1}, {"nonce": "beef-"}, {"stage": 10000}],
)  # fmt: skip
def test_a_label_that_could_not_be_read_again_is_not_made(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(LABEL, **change)


def test_fresh_labels_differ_in_their_nonce_alone() -> None:
    made = [labels.fresh("0123abcd", "run-0123456789ab", 1, 0) for _ in range(8)]
    assert len(set(made)) > 1
    assert {replace(label, nonce="beef") for label in made} == {replace(LABEL, stage=1, deadline=0)}
    assert all(Label.parse(str(label)) == label for label in made)


def test_the_owner_is_made_once_whoever_asks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ask = "from orchestrator import labels; print(labels.owner())"
    asking = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0].strip() for process in asking}
    assert answers == {labels.owner()}
    folder = tmp_path / "pptasks"
    assert [path.name for path in folder.iterdir()] == ["owner"]
    assert stat.S_IMODE((folder / "owner").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_owner_that_is_damaged_or_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "pptasks").mkdir()
    (tmp_path / "pptasks" / "owner").write_text("root\n")
    with pytest.raises(StorageError, match="damaged"):
        labels.owner()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "pptasks" / "owner"))
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        labels.owner()
