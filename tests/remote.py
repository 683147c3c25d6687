"""What the tests of models from a Hub share: a GGUF file to serve, opening with little patience, comparing bytes."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf as gguf_writer
import numpy as np

from pptasks import gguf, stfile
from pptasks.config import Hub
from pptasks.modelinfo import TensorRef
from pptasks.remote.hub import Patience, Remote, open_remote
from pptasks.spec import HubFile, HubRepo, Url, parse
from tests.fake_hub import FakeHub

TIED, SHARDED = "golden/llama-tied", "golden/llama-untied-sharded-bf16"  # two repositories of the tests
QUICK = Patience(total_s=1.0, first_s=0.01, most_s=0.05, connect_s=1.0, silence_s=0.5)
WORDS = 3000  # a vocabulary whose header takes several steps to read


def quiet(phase: str, done: int, total: int) -> None:
    """A progress that nobody looks at."""


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray], **metadata: int) -> None:
    """`metadata`: u16 values; "split_no" is spelled "split.no"."""
    w = gguf_writer.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        w.add_uint16(key.replace("_", "."), value)
    w.add_token_list([f"word{i}" * (i % 7) for i in range(WORDS)])
    for name, tensor in tensors.items():
        w.add_tensor(name, tensor)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_repo(folder: Path) -> Path:
    """x.gguf: 6 tensors of 512 KiB and a small one; parts/: the same in three files."""
    random = np.random.default_rng(1)
    tensors = {f"blk.{i}.x.weight": random.random((512, 256), np.float32) for i in range(6)}
    tensors["output_norm.weight"] = random.random(512, np.float32)
    write_gguf(folder / "x.gguf", tensors)
    names = list(tensors)
    (folder / "parts").mkdir()
    for i in range(3):
        part = {name: tensors[name] for name in names[2 * i : 2 * i + 2]}
        write_gguf(folder / "parts" / f"x-0000{i + 1}-of-00003.gguf", part, split_no=i, split_count=3)
    return folder


def open_it(server: FakeHub, spec: str, cache: Path, client: str = "", token: str = "") -> Remote:
    parsed = parse(spec)
    assert isinstance(parsed, HubRepo | HubFile | Url)
    endpoint = server.url_of(client) if client else server.url
    return open_remote(parsed, cache, Hub(endpoint, token, cache.parent / "home"), quiet, QUICK)


def spec_of(server: FakeHub, spec: str) -> str:
    """ "url" stands for x.gguf on an ordinary web server."""
    return server.plain("o/q", "x.gguf") if spec == "url" else spec


def tensors_of(remote: Remote) -> list[TensorRef]:
    """All tensors of what was opened."""
    if remote.path.is_dir():
        stored = stfile.read_tensors(remote.path)
        return [TensorRef(name, t.file, t.offset, t.nbytes, t.dtype, t.shape) for name, t in stored.items()]
    count = gguf.read_header(remote.path).metadata.get("split.count", 1)
    paths = gguf.split_paths(remote.path, count) if count > 1 else (remote.path,)
    return [
        TensorRef(t.name, path, t.offset, t.nbytes, t.dtype, t.shape)
        for path in paths
        for t in gguf.read_header(path).tensors
    ]


def header_bytes(refs: Iterable[TensorRef]) -> int:
    begins: dict[Path, int] = {}
    for ref in refs:
        begins[ref.file] = min(ref.offset, begins.get(ref.file, ref.offset))
    return sum(begins.values())


def nbytes(refs: Iterable[TensorRef]) -> int:
    return sum(ref.nbytes for ref in refs)


def is_here(server: FakeHub, ref: TensorRef) -> bool:
    """Whether our file holds the bytes of this tensor that the server's has."""
    for repo in server.repos.values():
        if repo.commit in ref.file.parts:
            served = repo.files[ref.file.as_posix().split(f"{repo.commit}/")[1]]
            break
    else:  # from a plain URL
        served = server.repos["o/q"].files[ref.file.name]
    with ref.file.open("rb") as f:
        f.seek(ref.offset)
        return f.read(ref.nbytes) == served[ref.offset : ref.offset + ref.nbytes]


def assert_here(server: FakeHub, refs: Iterable[TensorRef]) -> None:
    assert [ref.name for ref in refs if not is_here(server, ref)] == []
