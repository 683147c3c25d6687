"""What `--model` may say, as one value each; nothing is opened or asked here.

    smollm2:135m                            an alias (`pp models` lists them)
    owner/name[@revision]                   a repository of the Hugging Face Hub that holds safetensors
    hf:owner/name[@revision]/path/x.gguf    a GGUF file of a repository
    https://host/path/x.gguf                a GGUF file on a web server; http:// only on this machine
    /path, ./path, ../path, ~/path          a .gguf file or a Hugging Face folder

An alias wins over all else. Any other text that names something on the disk is that; to name a repository while a
folder of the same name is there, say `hf:` or go elsewhere. A revision is a branch, a tag, a commit or `refs/pr/N`.

These texts come from anyone and end up in file names and requests, so each part has its own narrow alphabet, and a
refusal shows no more than 60 characters of it and never a password or the query of a URL.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from pptasks.errors import ModelNotFound
from pptasks.remote import wheel

MAX_SPEC = 2048  # characters
MAX_SHOWN = 60

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")  # one half of a repository's name
_REVISION = re.compile(r"refs/pr/[0-9]{1,9}|[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,126}[A-Za-z0-9_])?")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,()~-]{0,199}")  # of a path in a repository, or a URL's last one
_HUB_FILE = re.compile(r"([^/@]+/[^/@]+)(?:@(refs/pr/[0-9]+|[^/]+))?/(.+)")


@dataclass(frozen=True)
class Alias:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class HubRepo:
    repo: str  # "owner/name"
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class HubFile:
    repo: str
    revision: str
    file: str  # path in the repository, ends in .gguf

    def __str__(self) -> str:
        return f"hf:{HubRepo(self.repo, self.revision)}/{self.file}"


@dataclass(frozen=True)
class Url:
    url: str = field(repr=False)  # its query may be a signature: for requests, not for people

    def __str__(self) -> str:
        return self.url

    @property
    def shown(self) -> str:
        """Scheme, host and path: what a message may say."""
        return urlsplit(self.url)._replace(query="").geturl()

    @property
    def file(self) -> str:
        """The last segment of its path, as it stands."""
        return urlsplit(self.url).path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Local:
    path: str

    def __str__(self) -> str:
        return self.path


Spec = Alias | HubRepo | HubFile | Url | Local


@dataclass(frozen=True)
class Known:
    """What an alias stands for: a file that anyone may download, no licence to accept."""

    source: HubRepo | HubFile | wheel.Source
    description: str
    size: str  # of the download, for people


def _gguf(description: str, size: str, repo: str, file: str) -> Known:
    return Known(HubFile(repo, "main", file), description, size)


ALIASES: Mapping[str, Known] = MappingProxyType({
    "smollm2:135m": Known(wheel.ALIASES["smollm2:135m"], "SmolLM2 135M Instruct, Q4_1; a wheel, not the Hub", "93 MB"),
    "qwen2.5:0.5b": _gguf(
        "Qwen2.5 0.5B Instruct, Q8_0", "676 MB",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q8_0.gguf"),
    "qwen3:0.6b": _gguf(
        "Qwen3 0.6B, Q8_0", "639 MB",
        "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
    "gpt2": Known(HubRepo("openai-community/gpt2"), "GPT-2 124M, F32; continues a text, knows no chat", "548 MB"),
    "tinyllama:1.1b": _gguf(
        "TinyLlama 1.1B Chat, Q8_0", "1.2 GB",
        "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF", "tinyllama-1.1b-chat-v1.0.Q8_0.gguf"),
    "llama3.2:1b": _gguf(
        "Llama 3.2 1B Instruct, Q8_0", "1.3 GB",
        "bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q8_0.gguf"),
    "llama3.2:3b": _gguf(
        "Llama 3.2 3B Instruct, Q4_K_M", "2.0 GB",
        "bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
    "mistral:7b": _gguf(
        "Mistral 7B Instruct v0.3, Q4_K_M", "4.4 GB",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Mistral-7B-Instruct-v0.3-Q4_K_M.gguf"),
    "llama3.1:8b": _gguf(
        "Llama 3.1 8B Instruct, Q4_K_M", "4.9 GB",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
})  # fmt: skip


def parse(text: str, exists: Callable[[str], bool] = os.path.exists) -> Spec:
    """The spec that `text` is. ModelNotFound, which says why: it is none of the forms, or one with a forbidden part."""
    if text in ALIASES:
        return Alias(text)
    if "://" in text:
        return _url(text)
    if not text or len(text) > MAX_SPEC or not text.isprintable():
        raise _refusal(text, "is empty, too long, or holds control characters")
    if text.startswith("hf:"):
        return _hub_file(text)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or exists(text):
        return Local(text)
    repo, at, revision = text.partition("@")
    if "/" not in repo or repo.endswith(".gguf"):
        raise _refusal(text, f"is not a known name ({', '.join(ALIASES)}), and no such file or folder is here")
    return HubRepo(_repo(repo, text), _revision(revision, text) if at else "main")


def _hub_file(text: str) -> HubFile:
    match = _HUB_FILE.fullmatch(text.removeprefix("hf:"))
    if match is None:
        raise _refusal(text, "does not say hf:owner/name[@revision]/file.gguf")
    repo, revision, file = match.groups()
    segments = file.split("/")
    if len(segments) > 8 or not all(_SEGMENT.fullmatch(segment) and ".." not in segment for segment in segments):
        raise _refusal(text, "has a path that no file of a repository has here")
    if not file.endswith(".gguf"):
        raise _refusal(text, "does not name a .gguf file; give owner/name for safetensors")
    return HubFile(_repo(repo, text), "main" if revision is None else _revision(revision, text), file)


def _repo(repo: str, text: str) -> str:
    owner, _, name = repo.partition("/")
    if not _NAME.fullmatch(owner) or not _NAME.fullmatch(name):
        raise _refusal(text, "is not owner/name: both are letters, digits, '-', '_' and '.'")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise _refusal(text, "is no repository's name on the Hugging Face Hub") from None
    return repo


def _revision(revision: str, text: str) -> str:
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise _refusal(text, "has a malformed revision; give a branch, a tag, a commit hash or refs/pr/N")
    return revision


def _url(text: str) -> Url:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ModelNotFound("a model's URL is malformed") from None
    if len(text) > MAX_SPEC or not text.isascii() or not text.isprintable() or set(' \\"<>') & set(text):
        raise ModelNotFound(f"a model's URL is longer than {MAX_SPEC}, or holds a character that no URL has")
    if not host or port == 0:
        raise ModelNotFound("a model's URL names no host")
    if "@" in parts.netloc + parts.path:  # in the path: a URL with a password behind another one
        raise ModelNotFound(f"the model's URL at {host[:MAX_SHOWN]!r} holds a user or a password: give one without")
    shown = _cut(f"{parts.scheme}://{parts.netloc}{parts.path}")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise ModelNotFound(f"model {shown}: only https:// is read, and http:// from this machine")
    file = parts.path.rsplit("/", 1)[-1]
    if parts.fragment or not file.endswith(".gguf") or not _SEGMENT.fullmatch(file.replace("%", "_")):
        raise ModelNotFound(f"model {shown}: a URL must end in the name of a .gguf file")
    return Url(text)


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, no port) is this machine by its very name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _refusal(text: str, why: str) -> ModelNotFound:
    return ModelNotFound(f"model {_cut(text)} {why}")


def _cut(text: str) -> str:
    return repr(text) if len(text) <= MAX_SHOWN else repr(text[:MAX_SHOWN]) + "..."
