"""llama.cpp's tokenizer cases: small GGUF files that hold a vocabulary alone, texts, and the ids that llama.cpp makes.

They are published in the source distribution of llama-cpp-python, which `pip download` would begin to build. So pip
only finds it and opens the connection (in a process of its own: it promises nothing to those who import it), and we
read the archive as it comes and keep a few of its members, in `<cache>/tests`.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

PROJECT, SDIST = "llama-cpp-python", "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"
NAMES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
MEMBERS = {f"{FOLDER}ggml-vocab-{name}.gguf{ending}" for name in NAMES for ending in ("", ".inp", ".out")}
SEPARATOR = "\n__ggml_vocab_test__\n"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Cases:
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]  # of each text, without bos


def fetch(cache: Path) -> Path:
    """The folder that holds the files, downloaded once. RuntimeError, in one line, if they cannot be had."""
    folder = cache / "tests" / f"ggml-vocab-{SHA256[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():  # it gets its name last
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            command = [sys.executable, __file__, str(partial)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired as e:
                raise RuntimeError(f"{SDIST} did not come within {e.timeout} s") from None
            if done.returncode != 0:
                last = (done.stderr.splitlines() or ["no output"])[-1]
                raise RuntimeError(re.sub(r"://[^/@\s]*@", "://", last)[:300])
            partial.rename(folder)
    return folder


def read(folder: Path, name: str) -> Cases:
    stem = f"ggml-vocab-{name}.gguf"
    texts = (folder / f"{stem}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    lines = (folder / f"{stem}.out").read_text().removesuffix("\n").split("\n")
    return Cases(tuple(texts), tuple(tuple(map(int, line.split())) for line in lines))


class _Digested:
    """A stream of bytes that is hashed as it is read."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.digest.update(data)
        return data


def _keep(stream: BinaryIO, folder: Path) -> None:
    """Write the members of the archive that we want into `folder`; SystemExit unless the archive is the pinned one."""
    archive = _Digested(stream)
    with tarfile.open(fileobj=archive, mode="r|gz") as tar:  # it needs `read` alone
        for member in tar:
            if member.name in MEMBERS and (source := tar.extractfile(member)):
                (folder / Path(member.name).name).write_bytes(source.read())
    while archive.read(1 << 20):
        pass
    kept = len(list(folder.iterdir()))
    if archive.digest.hexdigest() != SHA256 or kept != len(MEMBERS):
        sys.exit(f"{SDIST} that pip found is not the pinned one ({kept} of {len(MEMBERS)} files are in it)")


def _download(folder: Path) -> None:
    """Find and read the archive as `pip download` would, with the user's indexes, certificates and proxies."""
    from pip._internal.commands import create_command

    pip = create_command("download")
    options, _ = pip.parse_args(["--no-cache-dir", "--no-input", "--retries", "2"])
    with pip.main_context():
        session = pip.get_default_session(options)
        found = pip._build_package_finder(options, session).find_all_candidates(PROJECT)
        link = next((c.link for c in found if c.link.filename == SDIST), None)
        if link is None:
            sys.exit(f"pip finds no {SDIST}: check the network and pip's index settings")
        response = session.get(link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"})
        response.raise_for_status()
        _keep(response.raw, folder)


if __name__ == "__main__":
    _download(Path(sys.argv[1]))
