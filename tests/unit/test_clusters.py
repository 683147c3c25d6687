"""Named clusters: written whole, for their owner alone, and never a surprise to read."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.clusters import MAX_BYTES, Clusters, Record
from pptasks.errors import NoSuchCluster, StorageError, UsageError

RECORD = Record(
    "blue", "run-01", 77, "vast", "m", 100.0, 0, 0.5, None, {"PP_BROKER": "redis://:pw@h/0", "PP_SECRET": "5e"}
)


@pytest.fixture
def clusters(tmp_path: Path) -> Clusters:
    return Clusters(tmp_path / "state" / "clusters")


def test_written_and_read(clusters: Clusters) -> None:
    clusters.write(RECORD)
    assert clusters.read("blue") == RECORD
    ready = replace(RECORD, ready_s=1.5)
    clusters.write(ready)
    clusters.write(replace(RECORD, name="ant"))
    assert clusters.all() == [replace(RECORD, name="ant"), ready]
    assert clusters.pick("blue") == ready
    assert "pw" not in repr(RECORD)
    assert "5e" not in repr(RECORD)


def test_only_its_owner_may_read_it(clusters: Clusters) -> None:
    clusters.write(RECORD)
    assert stat.S_IMODE(clusters.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in clusters.folder.iterdir()] == [0o600]


def test_none_and_one_and_several(clusters: Clusters) -> None:
    assert clusters.all() == []
    with pytest.raises(NoSuchCluster, match="pp up"):
        clusters.pick(None)
    clusters.write(RECORD)
    assert clusters.pick(None) == RECORD
    clusters.write(replace(RECORD, name="ant"))
    with pytest.raises(NoSuchCluster, match="ant, blue"):
        clusters.pick(None)
    with pytest.raises(NoSuchCluster, match="named red; there is ant, blue"):
        clusters.read("red")


def test_a_cluster_is_removed_by_its_own_run_alone(clusters: Clusters) -> None:
    clusters.write(RECORD)
    clusters.remove("blue", "run-02")
    assert clusters.all() == [RECORD]
    clusters.remove("blue", "run-01")
    clusters.remove("blue", "run-01")
    assert clusters.all() == []


@pytest.mark.parametrize("name", ["", "../owner", "a/b", ".hidden", "a.json", "x" * 65, "-n", "a\n", "\u00e9"])
def test_what_is_no_name(clusters: Clusters, name: str) -> None:
    for use in (clusters.read, clusters.pick, lambda n: clusters.write(replace(RECORD, name=n))):
        with pytest.raises(UsageError, match="no name"):
            use(name)


def damaged() -> list[bytes]:
    whole = {**RECORD.__dict__}
    wrong = [{"pid": "77"}, {"pid": True}, {"where": "moon"}, {"where": []}, {"deadline": None}, {"run": 1},
             {"started_at": float("inf")}, {"ready_s": "soon"}, {"settings": {"a": 1}}, {"settings": []},
             {"name": "red"}, {"more": 1}]  # fmt: skip
    texts = [json.dumps(whole | change) for change in wrong]
    texts += [json.dumps({k: v for k, v in whole.items() if k != "run"}), "", "[]", "{", "[" * 30000, '"' + "x" * 99]
    return [text.encode() for text in texts] + [b"\xff\xfe\x00", b" " * MAX_BYTES + json.dumps(whole).encode()]


@pytest.mark.parametrize("data", damaged())
def test_a_damaged_file_is_named(clusters: Clusters, data: bytes) -> None:
    clusters.write(RECORD)
    (clusters.folder / "blue.json").write_bytes(data)
    for use in (lambda: clusters.read("blue"), clusters.all, lambda: clusters.remove("blue", "run-01")):
        with pytest.raises(StorageError, match=r"blue\.json is damaged: remove it"):
            use()


def test_what_else_lies_in_the_folder_is_passed_over(clusters: Clusters) -> None:
    clusters.write(RECORD)
    for name in ("blue.1234.new", "note.txt", ".x.json"):
        (clusters.folder / name).write_text("{")
    assert clusters.all() == [RECORD]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clusters = Clusters(tmp_path / "file" / "clusters")
    for use in (lambda: clusters.write(RECORD), lambda: clusters.read("blue")):
        with pytest.raises(StorageError, match="XDG_STATE_HOME"):
            use()
