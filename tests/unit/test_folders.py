"""Folders of the state that are their owner's alone."""

import os
from pathlib import Path

import pytest

from orchestrator.folders import own_folder, state_folder
from pptasks.errors import StorageError


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_every_level_is_the_owners_alone_whatever_the_umask(state: Path) -> None:
    before = os.umask(0)
    try:
        made = own_folder(state_folder() / "runs" / "run-1")
    finally:
        os.umask(before)
    assert made == state / "pptasks" / "runs" / "run-1"
    assert [mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3


def test_what_others_may_write_is_closed_and_what_is_closed_stays(state: Path) -> None:
    folder = state_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert mode(own_folder(folder)) == 0o700
    folder.chmod(0o500)
    assert mode(own_folder(folder)) == 0o500


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(state: Path) -> None:
    folder = own_folder(state_folder() / "runs")
    os.chown(folder, 12345, -1)
    with pytest.raises(StorageError, match="another user"):
        own_folder(folder / "run-1")
