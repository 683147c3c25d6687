"""One repository of the Hugging Face Hub at one commit: what it holds, and its files in our cache.

    <cache>/models/hub/<owner>--<name>/<commit>/...     the files
    <cache>/models/hub/<owner>--<name>/<revision>.json  which commit that was, and its files; the same as <commit>.json

The list of a commit never changes, so with a commit as revision it is asked for once. A branch is asked for each time;
when the Hub cannot be reached, what it was last time is taken, with a warning. A file that huggingface_hub's own cache
holds whole at that commit is linked to and not downloaded.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import httpx

from pptasks import stfile
from pptasks.config import Hub
from pptasks.errors import DownloadError, ModelError, ModelNotFound, NeedsToken
from pptasks.remote.journal import replacing
from pptasks.remote.ranges import CHUNK, start_digest, storing
from pptasks.remote.webfile import MAX_FILE, Access, Patience, Transient, Tries, WebFile, retry_after

LIST_PATIENCE_S = 5.0  # when there is a list from last time
MAX_FILES = 1 << 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listed:
    size: int  # bytes, -1 when the server did not say
    digest: str  # "sha256:<hex>", "git-sha1:<hex>", or "" when the server did not say


@dataclass(frozen=True)
class Repo:
    name: str  # "owner/name"
    commit: str  # its hash; letters and digits, as it names a folder
    files: Mapping[str, Listed]
    folder: Path
    access: Access
    home: Path  # of huggingface_hub
    patience: Patience

    def listed(self, file: str) -> Listed:
        if file not in self.files:
            raise ModelNotFound(f"{self.name} has no file {file!r} at commit {self.commit[:8]}")
        return self.files[file]

    def web(self, client: httpx.Client, file: str) -> WebFile:
        from huggingface_hub import hf_hub_url

        listed = self.listed(file)
        url = hf_hub_url(self.name, file, revision=self.commit, endpoint=self.access.endpoint)
        name, remedy = f"{self.name}@{self.commit}/{file}", _remedy(self.name, self.access)
        web = WebFile(url, name, listed.size, self.access, self.patience, remedy)
        return web if listed.size >= 0 else replace(web, size=web.probe(client, Event())[0])

    def whole(self, client: httpx.Client, file: str, limit: int) -> Path:
        """A file of at most `limit` bytes in our folder, all of it, its digest checked. Raises as `WebFile.read`."""
        listed, path = self.listed(file), self.folder / file
        self.link(file)
        if listed.digest and _is(path, listed):
            return path
        web = self.web(client, file)
        if web.size > limit:
            raise DownloadError(f"{web.name}: {web.size} bytes; the limit is {limit}")
        digest, told = start_digest(listed.digest, web.size)
        with storing(path, web.size), replacing(path) as new, new.open("wb") as f:
            for piece in web.read(client, 0, web.size, Event()):
                digest.update(piece)
                f.write(piece)
            if told and digest.hexdigest() != told:
                raise DownloadError(f"{web.name}: is not what the server's digest says; start again")
        return path

    def link(self, file: str) -> bool:
        """Whether our file is a link to a whole one in huggingface_hub's cache; made now where ours is missing.

        A link to a file that is gone, or has another size than the Hub says, is removed.
        """
        from huggingface_hub import try_to_load_from_cache

        listed, path = self.listed(file), self.folder / file
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() and not _has_size(path, listed):
                path.unlink()
            if not os.path.lexists(path):
                found = try_to_load_from_cache(self.name, file, cache_dir=self.home / "hub", revision=self.commit)
                if isinstance(found, str) and _has_size(Path(found), listed):
                    with suppress(FileExistsError):  # another process was faster
                        path.symlink_to(Path(found).resolve())
            return path.is_symlink()


def open_repo(name: str, revision: str, cache: Path, hub: Hub, patience: Patience) -> Repo:
    """The repository, from the Hub or as it was last time.

    ModelNotFound: no such repository or revision. NeedsToken: it is private, or there is none such. DownloadError: the
    Hub cannot be reached, or answers with what is no list.
    """
    home, access = home_of(hub), access_of(hub)
    folder = cache / "models" / "hub" / name.replace("/", "--")
    kept = folder / f"{quote(revision, safe='')}.json"
    last = _kept(kept)
    if last is None or last[0] != revision:
        try:
            short = replace(patience, total_s=min(LIST_PATIENCE_S, patience.total_s))
            last = _ask(name, revision, access, patience if last is None else short)
            with storing(kept):
                _keep(kept, *last)
                _keep(kept.with_name(f"{last[0]}.json"), *last)
        except (NeedsToken, ModelNotFound):
            raise
        except DownloadError as e:
            if last is None:
                raise
            log.warning("%s; taking %s as it was last time, commit %s", e, name, last[0][:8])
    commit, files = last
    return Repo(name, commit, files, folder / commit, access, home, patience)


def home_of(hub: Hub) -> Path:
    """The folder of huggingface_hub."""
    from huggingface_hub import constants

    return (hub.home or Path(constants.HF_HOME)).expanduser()


def access_of(hub: Hub) -> Access:
    """With the token that was given, else the one that `hf auth login` left, else none."""
    token = hub.token
    if not token:
        with suppress(OSError, UnicodeDecodeError):
            token = (home_of(hub) / "token").read_text().strip()
    return Access(hub.endpoint.rstrip("/"), token)


def _remedy(name: str, access: Access) -> str:
    licence = f"accept its licence at {access.endpoint}/{name} where it asks for that"
    return f"{licence}, and set HF_TOKEN to {'another' if access.token else 'a'} token that may read it"


def _ask(name: str, revision: str, access: Access, patience: Patience) -> tuple[str, dict[str, Listed]]:
    """(commit, its files) as the Hub says."""
    import httpx2  # what huggingface_hub speaks HTTP with
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    token = access.token if access.headers(httpx.URL(access.endpoint)) else False
    api = HfApi(endpoint=access.endpoint, token=token, library_name="pptasks")
    tries = Tries(name, patience, Event())
    while True:
        try:
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=patience.silence_s)
            return _checked(info)
        except OfflineModeIsEnabled:
            raise DownloadError(f"{name}: huggingface_hub is set to be offline; unset HF_HUB_OFFLINE") from None
        except RevisionNotFoundError:
            raise ModelNotFound(f"{name} has no revision {revision!r}") from None
        except HfHubHTTPError as e:
            status = e.response.status_code
            if isinstance(e, GatedRepoError) or status in (401, 403):
                raise NeedsToken(
                    f"{name}: is gated, private, or not there ({status}); {_remedy(name, access)}"
                ) from None
            if status == 404:
                raise ModelNotFound(f"no repository {name} at {access.endpoint}, and no such folder here") from None
            if status not in (408, 425, 429) and status < 500:
                raise DownloadError(f"{name}: {access.endpoint} answers with status {status}") from None
            tries.again(Transient(f"{access.endpoint} answers with status {status}", retry_after(e.response.headers)))
        except httpx2.HTTPError as e:
            tries.again(Transient(f"{access.endpoint} cannot be reached: {e or type(e).__name__}"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DownloadError(f"{name}: {access.endpoint} answers with what is no list of a repository") from None


def _checked(info: Any) -> tuple[str, dict[str, Listed]]:
    """The commit and the files of huggingface_hub's ModelInfo, each part checked: they name files on our disk."""
    files = {s.rfilename: Listed(s.size, f"sha256:{s.lfs.sha256}" if s.lfs else f"git-sha1:{s.blob_id}")
             for s in (info.siblings or [])[:MAX_FILES]}  # fmt: skip
    return _valid(info.sha, {file: asdict(listed) for file, listed in files.items()})


def _valid(commit: Any, files: Mapping[str, Any]) -> tuple[str, dict[str, Listed]]:
    """The same, as what it must be. ValueError: no commit. A size or digest that is none counts as not told."""
    if not isinstance(commit, str) or not re.fullmatch("[0-9A-Za-z]{1,64}", commit):
        raise ValueError("no commit")
    return commit, {file: _listed(**entry) for file, entry in files.items()}


def _listed(size: Any, digest: Any) -> Listed:
    told = isinstance(digest, str) and re.fullmatch("sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}", digest)
    return Listed(size if type(size) is int and 0 <= size <= MAX_FILE else -1, digest if told else "")


def _kept(path: Path) -> tuple[str, dict[str, Listed]] | None:
    """What `_keep` left at `path`, or None."""
    try:
        value = stfile.read_json(path)
        return _valid(value["commit"], value["files"])
    except (ModelError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(path: Path, commit: str, files: Mapping[str, Listed]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"commit": commit, "files": {file: asdict(listed) for file, listed in files.items()}}
    with replacing(path) as new:
        new.write_text(json.dumps(value))


def _has_size(path: Path, listed: Listed) -> bool:
    return path.is_file() and listed.size in (-1, path.stat().st_size)


def _is(path: Path, listed: Listed) -> bool:
    """Whether `path` is that very file."""
    if not _has_size(path, listed):
        return False
    digest, told = start_digest(listed.digest, path.stat().st_size)
    with path.open("rb") as f:
        while data := f.read(CHUNK):
            digest.update(data)
    return digest.hexdigest() == told
