"""Folders that are their owner's alone, whatever the umask."""

import os
from pathlib import Path

import platformdirs

from pptasks.errors import StorageError


def state_folder() -> Path:
    """What outlives a command: rented machines, named clusters, logs of failed runs."""
    return platformdirs.user_state_path("pptasks", appauthor=False)


def own_folder(path: Path) -> Path:
    """`path`, which is `state_folder()` or below it, made if it is not there. Raises OSError, or StorageError for one
    that is another user's."""
    ours = [folder for folder in (path, *path.parents) if folder.is_relative_to(state_folder())]
    state_folder().parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(ours):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid():
            raise StorageError(f"{folder} is another user's: set XDG_STATE_HOME to a folder of yours")
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    return path
