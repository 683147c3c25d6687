"""Models on the Hugging Face Hub or another web server: their headers first, a span's tensors when asked for.

`open_remote` fetches what says which model it is, JSON files and headers, and no weights; then its `Remote` fetches the
tensors that a stage holds. Where they end up is an ordinary model folder or .gguf file, sparse.

    <cache>/models/hub/<owner>--<name>/<commit>/...      see hubrepo.py
    <cache>/models/url/<digest of the URL>/<digest of the version>/x.gguf
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from pptasks import gguf, stfile
from pptasks.config import Hub
from pptasks.errors import ModelFileError, ModelNotFound, Unsupported
from pptasks.modelinfo import OnProgress, TensorRef
from pptasks.remote.hubrepo import Repo, access_of, open_repo
from pptasks.remote.jobs import Job, Meter, at_once
from pptasks.remote.line import Line, Patience
from pptasks.remote.ranges import Layout, SparseFile, fetch
from pptasks.remote.webfile import WebFile
from pptasks.spec import HubFile, HubRepo, Url

__all__ = ["Hub", "Patience", "Remote", "open_remote"]

CONFIG = "config.json"
QUIET_S = 1.0  # before which an opening that fetches nothing shows nothing
GGUF = Layout(gguf.header_end, lambda path: (t.offset for t in gguf.read_header(path).tensors))
SAFETENSORS = Layout(stfile.header_end, lambda path: (t.offset for t in stfile.read_header(path).values()))
TEXT_FILES: Mapping[str, int] = {  # and the most bytes that we take
    "tokenizer.json": 256_000_000,
    "tokenizer_config.json": stfile.MAX_JSON,
    "generation_config.json": stfile.MAX_JSON,
    "chat_template.jinja": stfile.MAX_JSON,
}


@dataclass(frozen=True)
class Remote:
    """A model whose headers are here. A `modelinfo.Source`."""

    path: Path  # a Hugging Face folder, or the (first) .gguf file
    pinned: str  # a spec that names this very version, for other processes and machines
    _files: Mapping[Path, SparseFile | None]  # None: the whole file is here
    _patience: Patience
    _repo: Repo | None = None  # where the text files come from

    def fetch(self, refs: Sequence[TensorRef], on_progress: OnProgress) -> None:
        """Make the bytes of these tensors present, each unit of the file checked once by this process.

        NeedsToken: access is refused. DownloadError: network, server, disk; what came until then stays.
        """
        wanted: dict[SparseFile, list[tuple[int, int]]] = {}
        for ref in refs:
            if ref.file not in self._files:
                raise ModelFileError(f"{ref.file}: is no file of {self.pinned}")
            file = self._files[ref.file]
            if file is not None:
                wanted.setdefault(file, []).append((ref.offset, ref.offset + ref.nbytes))
        with Line(self._patience) as line:
            fetch(wanted, line, on_progress)

    def fetch_text(self, on_progress: OnProgress) -> None:
        """Make the tokenizer's files present, those that the repository has. Raises as `fetch`."""
        if self._repo is None:  # a GGUF file holds its own
            return
        names = [name for name in TEXT_FILES if name in self._repo.files]
        total = sum(max(0, self._repo.files[name].size) for name in names)
        with Line(self._patience) as line:
            jobs = [partial(_whole, self._repo, line, name) for name in names]
            at_once(jobs, lambda done: on_progress("download", done, total), line.stop)


def open_remote(
    spec: HubRepo | HubFile | Url, cache: Path, hub: Hub, on_progress: OnProgress, patience: Patience | None = None
) -> Remote:
    """Fetch the headers of a model into `cache`, unless they are there.

    How long headers are shows when they are read, so the progress has no total: it is what has come.

    ModelNotFound: no such repository, revision or file. Unsupported: no weights that we read in it. ModelFileError: a
    header that is none. NeedsToken: a licence to accept, or a token to give. DownloadError: network, server, disk.
    """
    patience = patience or Patience()
    started = time.monotonic()

    def report(done: int) -> None:
        if done or time.monotonic() > started + QUIET_S:
            on_progress("download", done, done)

    with Line(patience) as line:
        opening = _Opening(line, report)
        if isinstance(spec, Url):
            return _open_url(spec, cache, hub, patience, opening)
        repo = open_repo(spec.repo, spec.revision, cache, hub, patience)
        pinned = str(replace(spec, revision=repo.commit))
        if isinstance(spec, HubFile):
            files = opening.gguf(spec.file, partial(_in_repo, repo, line))
            return Remote(repo.folder / spec.file, pinned, files, patience)
        return Remote(repo.folder, pinned, _open_folder(repo, opening), patience, repo)


Files = dict[Path, SparseFile | None]  # None: it is there, whole
Place = Callable[[str], tuple[Path, SparseFile | None]]  # of a file, by its name on the server


@dataclass(frozen=True)
class _Opening:
    """Fetches the headers of files, a few at once."""

    line: Line
    report: Callable[[int], None]

    def run(self, jobs: Iterable[Job]) -> None:
        at_once(jobs, self.report, self.line.stop)

    def files(self, names: Iterable[str], place: Place, layout: Layout) -> Files:
        files = dict(map(place, names))
        self.run(partial(file.open, self.line, layout) for file in files.values() if file is not None)
        return files

    def gguf(self, name: str, place: Place) -> Files:
        """A GGUF file; all parts of it, if it is the first of several."""
        files = self.files([name], place, GGUF)
        count = gguf.read_header(next(iter(files))).metadata.get("split.count", 1)
        if count not in (0, 1):
            parts = gguf.split_paths(Path(name), count)[1:]
            files |= self.files([part.as_posix() for part in parts], place, GGUF)
        return files


def _in_repo(repo: Repo, line: Line, file: str) -> tuple[Path, SparseFile | None]:
    path = repo.folder / file
    return path, None if repo.link(file) else SparseFile(path, repo.web(line, file), repo.files[file].digest)


def _whole(repo: Repo, line: Line, file: str, meter: Meter) -> None:
    repo.whole(line, file, TEXT_FILES.get(file, stfile.MAX_JSON), meter)


def _open_folder(repo: Repo, opening: _Opening) -> Files:
    if stfile.SINGLE in repo.files:
        shards = [stfile.SINGLE]
    elif stfile.INDEX in repo.files:
        opening.run([partial(_whole, repo, opening.line, stfile.INDEX)])
        shards = sorted(set(stfile.read_weight_map(repo.folder / stfile.INDEX).values()))
    else:
        raise _no_safetensors(repo)
    opening.run([partial(_whole, repo, opening.line, CONFIG)])
    return opening.files(shards, partial(_in_repo, repo, opening.line), SAFETENSORS)


def _no_safetensors(repo: Repo) -> Unsupported | ModelNotFound:
    ggufs = sorted(file for file in repo.files if file.endswith(".gguf") and file.isprintable())
    if ggufs:
        shown = ", ".join(ggufs[:8]) + (", ..." if len(ggufs) > 8 else "")
        return ModelNotFound(f"{repo.name} holds GGUF files ({shown}): give one, as hf:{repo.name}/{ggufs[0]}")
    if any(file.endswith((".bin", ".pt", ".pth")) for file in repo.files):
        return Unsupported(f"{repo.name} holds pickled weights only (.bin, .pt); supported: safetensors and GGUF")
    return ModelNotFound(f"{repo.name} holds no weights; supported: safetensors and GGUF")


def _open_url(spec: Url, cache: Path, hub: Hub, patience: Patience, opening: _Opening) -> Remote:
    access = access_of(hub)
    remedy = f"set HF_TOKEN to a token of {access.endpoint} that may read it"
    if not access.knows(httpx.URL(spec.url)):
        remedy = ""
    home = cache / "models" / "url" / _short(spec.shown)

    def place(file: str) -> tuple[Path, SparseFile]:
        parts = urlsplit(spec.url)
        url = parts._replace(path=parts.path.removesuffix(spec.file) + file).geturl()
        web = WebFile(url, Url(url).shown, 0, access, remedy)
        size, etag, modified = web.probe(opening.line)
        versions.append(_short(f"{size} {etag or modified or parts.query}"))
        path = home / versions[0] / file
        return path, SparseFile(path, replace(web, size=size, etag=etag, modified=modified), "")

    versions: list[str] = []  # of the parts; the first one's names the folder of all
    files = opening.gguf(spec.file, place)
    return Remote(next(iter(files)), str(spec), files, patience)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
