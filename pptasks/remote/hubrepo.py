"""One repository of the Hugging Face Hub at one commit: what it holds, and its files in our cache.

    <cache>/models/hub/<owner>--<name>/<commit>/...     the files
    <cache>/models/hub/<owner>--<name>/<revision>.json  which commit that was, and its files; the same as <commit>.json

The list of a commit never changes, so with a commit as revision it is asked for once. A branch is asked for each time;
when the Hub cannot be reached, what it was last time is taken, with a warning. A file that huggingface_hub's own cache
holds whole at that commit is linked to and not downloaded. It is hashed before, and `<file>.linked` says what it was.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from pptasks import stfile
from pptasks.config import Hub
from pptasks.errors import DownloadError, ModelError, ModelNotFound, NeedsToken
from pptasks.remote.jobs import Meter
from pptasks.remote.journal import replacing
from pptasks.remote.line import Access, Line, Patience, Transient, Tries
from pptasks.remote.ranges import CHUNK, start_digest, storing
from pptasks.remote.webfile import MAX_FILE, WebFile

LIST_PATIENCE_S = 5.0  # when there is a list from last time
MAX_FILES = 1 << 16
MAX_LIST = 32_000_000  # bytes

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

    def listed(self, file: str) -> Listed:
        if file not in self.files:
            raise ModelNotFound(f"{self.name} has no file {file!r} at commit {self.commit[:8]}")
        return self.files[file]

    def web(self, line: Line, file: str) -> WebFile:
        from huggingface_hub import hf_hub_url

        listed = self.listed(file)
        url = hf_hub_url(self.name, file, revision=self.commit, endpoint=self.access.endpoint)
        name, remedy = f"{self.name}@{self.commit}/{file}", _remedy(self.name, self.access)
        web = WebFile(url, name, listed.size, self.access, remedy)
        return web if listed.size >= 0 else replace(web, size=web.probe(line)[0])

    def whole(self, line: Line, file: str, limit: int, meter: Meter) -> Path:
        """A file of at most `limit` bytes in our folder, all of it, its digest checked. Raises as `WebFile.read`."""
        listed, path = self.listed(file), self.folder / file
        self.link(file)
        if listed.digest and _is(path, listed):
            meter.add(path.stat().st_size)
            return path
        web = self.web(line, file)
        if web.size > limit:
            raise DownloadError(f"{web.name}: {web.size} bytes; the limit is {limit}")
        digest, told = start_digest(listed.digest, web.size)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with storing(path, web.size), replacing(path) as new, new.open("wb") as f:
            for piece in web.read(line, 0, web.size):
                digest.update(piece)
                f.write(piece)
                meter.add(len(piece))
            if told and digest.hexdigest() != told:
                raise DownloadError(f"{web.name}: is not what the server's digest says; start again")
        return path

    def link(self, file: str) -> bool:
        """Whether our file is a link to a whole one in huggingface_hub's cache; made now where ours is missing.

        A link to a file that is gone, or is not what the Hub says, is removed.
        """
        from huggingface_hub import try_to_load_from_cache

        listed, path = self.listed(file), self.folder / file
        with storing(path):
            if path.is_symlink() and not _is_known(path, path, listed):
                path.unlink()
            if not os.path.lexists(path):
                found = try_to_load_from_cache(self.name, file, cache_dir=self.home / "hub", revision=self.commit)
                if isinstance(found, str) and _has_size(Path(found), listed):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if not _is_known(Path(found), path, listed):
                        log.warning("%s: is not what the Hub says that it is; not used", found)
                        return False
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
    last = before = _kept(kept)
    if last is None or last[0] != revision:
        if last is not None:
            wait = min(LIST_PATIENCE_S, patience.total_s)
            patience = replace(patience, total_s=wait, silence_s=min(wait, patience.silence_s), connect_s=wait)
        try:
            with Line(patience) as line:
                last = _ask(line, name, revision, access)
        except (NeedsToken, ModelNotFound):
            raise
        except DownloadError as e:
            if last is None:
                raise
            log.warning("%s; taking %s as it was last time, commit %s", e, name, last[0][:8])
        if last != before:
            with storing(kept):
                _keep(kept, *last)
                _keep(kept.with_name(f"{last[0]}.json"), *last)
    commit, files = last
    return Repo(name, commit, files, folder / commit, access, home)


def home_of(hub: Hub) -> Path:
    """The folder of huggingface_hub."""
    from huggingface_hub import constants

    return (hub.home or Path(constants.HF_HOME)).expanduser()


def access_of(hub: Hub) -> Access:
    """With the token that was given, else the one that `hf auth login` left, else none."""
    token = hub.token.strip()
    if not token:
        with suppress(OSError, UnicodeDecodeError):
            token = (home_of(hub) / "token").read_text().strip()
    return Access(hub.endpoint.rstrip("/"), token)


def _remedy(name: str, access: Access) -> str:
    licence = f"accept its licence at {access.endpoint}/{name} where it asks for that"
    return f"{licence}, and set HF_TOKEN to {'another' if access.token else 'a'} token that may read it"


def _ask(line: Line, name: str, revision: str, access: Access) -> tuple[str, dict[str, Listed]]:
    """(commit, its files) as the Hub says: https://huggingface.co/docs/hub/api, /api/models/{repo}/revision/{rev}."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise DownloadError(f"{name}: huggingface_hub is set to be offline; unset HF_HUB_OFFLINE")
    url = httpx.URL(f"{access.endpoint}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true")
    tries = Tries(line, name)
    while True:
        try:
            with line.get(url, name, {}, access) as response:
                _check_status(response, name, revision, access)
                return _parsed(_body(response))
        except (Transient, httpx.TransportError) as e:
            tries.again(e)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DownloadError(f"{name}: {access.endpoint} answers with what is no list of a repository") from None


def _check_status(response: httpx.Response, name: str, revision: str, access: Access) -> None:
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        raise ModelNotFound(f"{name} has no revision {revision!r}")
    if status in (401, 403) or code == "GatedRepo":
        raise NeedsToken(f"{name}: is gated, private, or not there ({status}); {_remedy(name, access)}")
    if status == 404:
        raise ModelNotFound(f"no repository {name} at {access.endpoint}, and no such folder here")
    if status != 200:
        raise DownloadError(f"{name}: {access.endpoint} answers with status {status}")


def _body(response: httpx.Response) -> bytes:
    """ValueError: it is longer than a list may be."""
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_LIST:
            raise ValueError("too long")
    return bytes(body)


def _parsed(body: bytes) -> tuple[str, dict[str, Listed]]:
    """The commit and the files of the Hub's answer, each part checked: they name files on our disk."""
    info = json.loads(body)
    files: dict[str, Any] = {}
    for s in info["siblings"][:MAX_FILES]:
        lfs = s.get("lfs")
        digest = f"sha256:{lfs['sha256']}" if lfs else f"git-sha1:{s.get('blobId')}"
        files[s["rfilename"]] = {"size": s.get("size"), "digest": digest}
    return _valid(info["sha"], files)


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


def _is_known(path: Path, ours: Path, listed: Listed) -> bool:
    """As `_is`, but what was right once is not hashed again while its size and date stay (`ours`.linked)."""
    if not listed.digest:
        return _has_size(path, listed)
    try:
        stat = path.stat()
    except OSError:
        return False
    record = ours.with_name(f"{ours.name}.linked")
    seen = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "digest": listed.digest}
    with suppress(ModelError):
        if stfile.read_json(record) == seen:
            return True
    if not _is(path, listed):
        return False
    with suppress(OSError), replacing(record) as new:  # a cache that cannot be written: hashed each time
        new.write_text(json.dumps(seen))
    return True
