"""Models from a Hub on this machine: what is fetched, what is refused, and who gets to see the token."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pptasks import gguf, stfile
from pptasks.config import Hub
from pptasks.errors import DownloadError, ModelError, ModelFileError, ModelNotFound, NeedsToken, Unsupported
from pptasks.models import open_model
from tests.fake_hub import FakeHub, Fault
from tests.remote import SHARDED, TIED, assert_here, header_bytes, is_here, nbytes, open_it, quiet, spec_of, tensors_of

SPECS = [TIED, SHARDED, "hf:o/q/x.gguf", "hf:o/q/parts/x-00001-of-00003.gguf", "url"]


# --- What is fetched --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_stage_fetches_its_tensors_and_the_headers(server: FakeHub, cache: Path, spec: str) -> None:
    remote = open_it(server, spec_of(server, spec), cache)
    refs = tensors_of(remote)
    opened = server.sent(".safetensors") + server.sent(".gguf")
    headers = header_bytes(refs)
    total = nbytes(refs)
    assert headers <= opened <= headers + 1024 * len({ref.file for ref in refs}) + total // 380
    mine = [ref for i, ref in enumerate(refs) if i % 3 == 1]
    remote.fetch(mine, quiet)
    assert_here(server, mine)
    fetched = server.sent(".safetensors") + server.sent(".gguf") - opened
    assert fetched <= 1.02 * nbytes(mine)
    others = [ref for ref in refs if ref not in mine and ref.nbytes >= 4096]
    assert not any(is_here(server, ref) for ref in others)
    for ref in refs:  # sparse: the holes take no space
        assert ref.file.stat().st_size == len(ref.file.read_bytes())
    remote.fetch(mine, quiet)
    assert server.sent(".safetensors") + server.sent(".gguf") == opened + fetched


@pytest.mark.parametrize("spec", SPECS)
def test_stages_with_a_cache_each_fetch_the_file_once_in_all(server: FakeHub, tmp_path: Path, spec: str) -> None:
    for stage in range(3):
        remote = open_it(server, spec_of(server, spec), tmp_path / str(stage) / "cache", client=f"stage{stage}")
        refs = tensors_of(remote)
        remote.fetch(refs[stage::3], quiet)
        assert_here(server, refs[stage::3])
    weights = server.sent(".safetensors") + server.sent(".gguf")
    headers = header_bytes(refs)
    sizes = sum(file.stat().st_size for file in {r.file for r in refs})
    assert weights - 2 * headers <= 1.02 * sizes


def test_holes_take_no_space(server: FakeHub, cache: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    assert remote.path.stat().st_blocks * 512 < remote.path.stat().st_size // 4


@pytest.mark.parametrize("spec", SPECS)
def test_pinned_names_the_same_version(server: FakeHub, cache: Path, spec: str) -> None:
    remote = open_it(server, spec_of(server, spec), cache)
    if spec != "url":
        assert server.repos[spec.removeprefix("hf:").split("/x")[0].removesuffix("/parts")].commit in remote.pinned
    n = len(server.log)
    again = open_it(server, remote.pinned, cache)
    assert (again.path, again.pinned) == (remote.path, remote.pinned)
    assert len(server.log) - n <= (spec == "url")  # a commit's list never changes: nothing is asked again


def test_the_text_files_come_when_they_are_asked_for(server: FakeHub, cache: Path, goldens: Path) -> None:
    remote = open_it(server, TIED, cache)
    assert not (remote.path / "tokenizer.json").exists()
    seen: list[tuple[str, int, int]] = []
    remote.fetch_text(lambda *progress: seen.append(progress))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (remote.path / name).read_bytes() == (goldens / "llama-tied" / name).read_bytes()
    assert not (remote.path / "expected.json").exists()
    total = sum(map(server.sent, ("tokenizer.json", "tokenizer_config.json", "generation_config.json")))
    assert seen[-1] == ("download", total, total)
    n = len(server.log)
    open_it(server, remote.pinned, cache).fetch_text(quiet)
    assert len(server.log) == n


def test_progress(server: FakeHub, cache: Path) -> None:
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    refs = tensors_of(remote)[:3]
    total = nbytes(refs)
    seen: list[tuple[str, int, int]] = []
    remote.fetch(refs, lambda *progress: seen.append(progress))
    assert seen[-1] == ("download", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    seen.clear()
    open_it(server, "hf:o/q/x.gguf", cache).fetch(refs, lambda *progress: seen.append(progress))
    assert seen[-1] == ("check", total, total)


def test_an_exception_from_the_progress_ends_the_work(server: FakeHub, cache: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    server.faults.append(Fault("slow", "x.gguf", times=100, seconds=0.01))
    server.faults[0].times = 0
    remote = open_it(server, "hf:o/q/x.gguf", cache)
    server.faults[0].times = 100
    with pytest.raises(KeyboardInterrupt):
        remote.fetch(tensors_of(remote), interrupt)
    server.faults.clear()
    remote.fetch(tensors_of(remote), quiet)
    assert_here(server, tensors_of(remote))


def test_a_list_without_sizes(goldens: Path, cache: Path) -> None:
    with FakeHub({TIED: goldens / "llama-tied"}, sizes=False) as server:
        remote = open_it(server, TIED, cache)
        remote.fetch(tensors_of(remote), quiet)
        assert_here(server, tensors_of(remote))


def test_weights_that_are_no_lfs_files(goldens: Path, cache: Path) -> None:
    with FakeHub({TIED: goldens / "llama-tied"}, lfs=(".none",)) as server:
        remote = open_it(server, TIED, cache)
        remote.fetch(tensors_of(remote), quiet)  # all of it: the git digest is verified
        assert_here(server, tensors_of(remote))
        assert "verified" in (remote.path / "model.safetensors.ranges").read_text()


def test_the_cache_of_huggingface_hub_is_used(server: FakeHub, cache: Path, goldens: Path) -> None:
    commit = server.repos[TIED].commit
    snapshot = cache.parent / "home" / "hub" / "models--golden--llama-tied" / "snapshots" / commit
    shutil.copytree(goldens / "llama-tied", snapshot)
    remote = open_it(server, TIED, cache)
    remote.fetch(tensors_of(remote), quiet)
    remote.fetch_text(quiet)
    assert {request.path.split("?")[0] for request in server.log} == {f"/api/models/{TIED}/revision/main"}
    assert_here(server, tensors_of(remote))
    (snapshot / "model.safetensors").unlink()
    remote = open_it(server, TIED, cache)
    remote.fetch(tensors_of(remote), quiet)
    assert_here(server, tensors_of(remote))


@pytest.mark.parametrize("where", ["its cache", "ours"])
def test_a_link_to_what_the_hub_does_not_hold_is_not_used(
    server: FakeHub, cache: Path, goldens: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit = server.repos[TIED].commit
    folder = cache.parent / "home" / "hub" / "models--golden--llama-tied" / "snapshots" / commit
    if where == "ours":
        folder = cache.parent / "planted"
    shutil.copytree(goldens / "llama-tied", folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    if where == "ours":
        ours = cache / "models" / "hub" / "golden--llama-tied" / commit / "model.safetensors"
        ours.parent.mkdir(parents=True)
        ours.symlink_to(folder / "model.safetensors")
    remote = open_it(server, TIED, cache)
    remote.fetch(tensors_of(remote), quiet)
    assert_here(server, tensors_of(remote))
    assert not (remote.path / "model.safetensors").is_symlink()
    assert (where == "ours") or "is not what the Hub says" in caplog.text


def test_a_link_whose_file_changes_is_hashed_again(server: FakeHub, cache: Path, goldens: Path) -> None:
    commit = server.repos[TIED].commit
    snapshot = cache.parent / "home" / "hub" / "models--golden--llama-tied" / "snapshots" / commit
    shutil.copytree(goldens / "llama-tied", snapshot)
    assert (open_it(server, TIED, cache).path / "model.safetensors").is_symlink()
    with (snapshot / "model.safetensors").open("r+b") as f:
        f.write(b"?")
    assert not (open_it(server, TIED, cache).path / "model.safetensors").is_symlink()


def test_white_space_around_the_token(server: FakeHub, cache: Path) -> None:
    open_it(server, TIED, cache, token=f" {TOKEN}\n")
    assert server.log[0].authorization == f"Bearer {TOKEN}"


# --- What is refused --------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_named(server: FakeHub, cache: Path) -> None:
    for spec, said in {
        "golden/none": "golden/none",
        f"{TIED}@v9": "no revision 'v9'",
        f"hf:{TIED}/none.gguf": "no file 'none.gguf'",
        server.plain("o/q", "none.gguf"): "no such file",
    }.items():
        with pytest.raises((ModelNotFound, NeedsToken), match=said):
            open_it(server, spec, cache)


def test_a_repository_without_safetensors(server: FakeHub, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"x\.gguf.*give one, as hf:o/q/"):
        open_it(server, "o/q", cache)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"")
    with FakeHub({"o/bin": tmp_path / "bin"}) as other, pytest.raises(Unsupported, match="pickled weights only"):
        open_it(other, "o/bin", cache)


def test_a_part_that_is_not_the_first(server: FakeHub, cache: Path) -> None:
    with pytest.raises(ModelFileError, match="give the first"):
        open_it(server, "hf:o/q/parts/x-00002-of-00003.gguf", cache)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", "a\\b.safetensors", "\x1b[2J.safetensors"],
)
def test_an_index_that_climbs_out(goldens: Path, tmp_path: Path, cache: Path, file: str) -> None:
    evil = tmp_path / "evil"
    shutil.copytree(goldens / "llama-untied-sharded-bf16", evil)
    (evil / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with (
        FakeHub({"o/evil": evil}) as server,
        pytest.raises(ModelFileError, match=r"which is no \.safetensors file") as caught,
    ):
        open_it(server, "o/evil", cache)
    assert str(caught.value).isprintable()


def test_a_header_that_claims_more_than_there_is(tmp_path: Path, cache: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "config.json").write_text("{}")
    (evil / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    (evil / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + (1 << 60).to_bytes(8, "little") * 2 + bytes(100))
    with FakeHub({"o/evil": evil}) as server:
        for spec in ("o/evil", "hf:o/evil/x.gguf"):
            with pytest.raises(ModelFileError, match=r"truncated|damaged"):
                open_it(server, spec, cache)


def test_an_empty_file(tmp_path: Path, cache: Path) -> None:
    for name, data in {"config.json": b"{}", "model.safetensors": b"", "x.gguf": b""}.items():
        (tmp_path / name).write_bytes(data)
    with FakeHub({"o/empty": tmp_path}) as server:
        for spec in ("o/empty", "hf:o/empty/x.gguf"):
            with pytest.raises(ModelFileError, match="truncated"):
                open_it(server, spec, cache)


def test_an_architecture_that_we_do_not_know_costs_no_weights(
    server: FakeHub, goldens: Path, tmp_path: Path, cache: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(goldens / "llama-tied", other, copy_function=shutil.copyfile)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with FakeHub({"o/mamba": other}) as mamba:
        with pytest.raises(Unsupported, match="mamba"):
            open_model("o/mamba", cache, hub=Hub(mamba.url))
        assert mamba.sent("model.safetensors") == stfile.header_end(other / "model.safetensors", 8)
    with pytest.raises(ModelError):  # its tensors are no llama's
        open_model("hf:o/q/x.gguf", cache, hub=Hub(server.url))
    assert server.sent("x.gguf") < gguf.read_header(server.repos["o/q"].folder / "x.gguf").data_start + 4096


# --- Who may read -----------------------------------------------------------------------------------------------------

TOKEN = "hf_a1b2c3d4e5f6"


@pytest.fixture
def gated(goldens: Path) -> Iterator[FakeHub]:
    repos = {TIED: goldens / "llama-tied", "golden/private": goldens / "gpt2"}
    with FakeHub(repos, gated={TIED}, private={"golden/private"}, tokens={TOKEN}) as server:
        yield server


@pytest.mark.parametrize("repo", [TIED, "golden/private"])
@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_access_is_refused(gated: FakeHub, cache: Path, repo: str, token: str) -> None:
    with pytest.raises(NeedsToken, match=f"{repo}.*HF_TOKEN") as caught:
        open_it(gated, repo, cache, token=token)
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize("repo", [TIED, "golden/private"])
def test_the_token_goes_to_the_endpoint_alone(
    gated: FakeHub, cache: Path, repo: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    remote = open_it(gated, repo, cache, token=TOKEN)
    remote.fetch(tensors_of(remote), quiet)
    remote.fetch_text(quiet)
    assert {r.authorization for r in gated.log if r.host == "127.0.0.1"} == {f"Bearer {TOKEN}"}
    assert {r.authorization for r in gated.log if r.host == "localhost"} == {""}
    assert not any(TOKEN in request.path for request in gated.log)
    assert TOKEN not in caplog.text + repr(remote)
    for path in cache.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_the_token_in_the_home_of_huggingface_hub(gated: FakeHub, cache: Path) -> None:
    home = cache.parent / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN + "\n")
    open_it(gated, TIED, cache)


def test_a_url_elsewhere_gets_no_token(server: FakeHub, cache: Path) -> None:
    url = server.plain("o/q", "x.gguf").replace("127.0.0.1", "localhost")
    open_it(server, url, cache, token=TOKEN)
    assert {request.authorization for request in server.log} == {""}


def test_no_signature_is_kept_or_told(server: FakeHub, cache: Path) -> None:
    url = server.plain("o/q", "x.gguf") + "?Signature=hunter2"
    remote = open_it(server, url, cache)
    assert remote.pinned == url
    server.faults.append(Fault("status", "x.gguf", times=100, status=403))
    with pytest.raises(DownloadError) as caught:
        remote.fetch(tensors_of(remote), quiet)
    assert "hunter2" not in str(caught.value)
    assert not any(b"hunter2" in path.read_bytes() for path in cache.rglob("*") if path.is_file())
