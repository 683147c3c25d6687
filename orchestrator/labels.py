"""The label of a rented machine: whose it is, of which run, which stage, and when it is to be gone.

    pptasks-<owner, 8 hex>-<run without "run-", hex>-<stage>-<deadline, Unix s, 0: none>-<nonce, 4 hex>

A machine is ended for its label alone, so what is not exactly of this form is not a label of ours.
"""

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.folders import own_folder, state_folder
from pptasks.errors import ConfigError, StorageError

PREFIX = "pptasks-"
_RUN = "run-"
_FORM = re.compile(
    r"pptasks-([0-9a-f]{8})-([0-9a-f]{1,32})-(0|[1-9][0-9]{0,3})-(0|[1-9][0-9]{0,10})-([0-9a-f]{4})", re.ASCII
)
_OWNER = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True)
class Label:
    """Raises ConfigError for parts that make no label which could be read again."""

    owner: str
    run: str
    stage: int
    deadline: int  # Unix s; 0: none
    nonce: str

    def __post_init__(self) -> None:
        if not self.run.startswith(_RUN) or not _FORM.fullmatch(str(self)):
            raise ConfigError(f"no label can be made for run {self.run!r}, stage {self.stage} of {self.owner!r}")

    def __str__(self) -> str:
        return f"{of_run(self.owner, self.run)}{self.stage}-{self.deadline}-{self.nonce}"

    @staticmethod
    def parse(text: str) -> "Label | None":
        """None for what is no label of this form, to the letter."""
        match = _FORM.fullmatch(text)
        if match is None:
            return None
        owner, run, stage, deadline, nonce = match.groups()
        return Label(owner, _RUN + run, int(stage), int(deadline), nonce)


def of_owner(owner: str) -> str:
    """What all labels of an owner begin with."""
    return f"{PREFIX}{owner}-"


def of_run(owner: str, run: str) -> str:
    """What all labels of a run begin with."""
    return f"{of_owner(owner)}{run.removeprefix(_RUN)}-"


def fresh(owner: str, run: str, stage: int, deadline: int) -> Label:
    """A label for one more machine. A label that was asked for once is never used again."""
    return Label(owner, run, stage, deadline, secrets.token_hex(2))


def owner() -> str:
    """This user on this machine, 8 hex digits, made at the first call. Raises StorageError."""
    path = state_folder() / "owner"
    try:
        with suppress(FileNotFoundError):
            return _read(path)
        _make(path)
        return _read(path)
    except OSError as e:
        raise StorageError(f"cannot use {path}: {e.strerror}; set XDG_STATE_HOME to a folder of yours") from None


def _read(path: Path) -> str:
    with path.open("rb") as file:
        text = file.read(64).decode(errors="replace").strip()
    if not _OWNER.fullmatch(text):
        raise StorageError(f"{path} is damaged: remove it, then end with pp sweep what the ledger knows")
    return text


def _make(path: Path) -> None:
    """Whole or not at all, and the first of several processes wins."""
    own_folder(path.parent)
    new = path.with_name(f"owner.{secrets.token_hex(4)}.new")
    try:
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(4))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
