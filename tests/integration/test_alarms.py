"""The alarms of a real worker: its memory changes under its hands, a token is asked for at a terminal."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.errors import RequestFailed
from pptasks.models import open_model
from pptasks.request import Request
from tests.conftest import WaitUntil
from tests.fake_hub import FakeHub
from tests.integration.hand import by_hand
from tests.integration.run import LONG_S, ROOT, pp

TOKEN = "hf_" + "hunter2" * 4


def overwrite_in_memory(pid: int, old: bytes, new: bytes) -> int:
    """Replace `old` wherever the process has it in writable memory; how often that was."""
    found = 0
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps.splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match is None:
                continue
            begin, end = (int(x, 16) for x in match.groups())
            try:
                memory.seek(begin)
                data = memory.read(end - begin)
            except OSError:  # a mapping of a device
                continue
            at = data.find(old)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(new)
                found += 1
                at = data.find(old, at + len(old))
    return found


def test_a_stage_whose_memory_changes_stops_and_says_where(
    redis_url: str, goldens: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """Weights of a running worker are negated from outside, as a broken memory might; every step is audited here."""
    folder = goldens / "llama-tied"
    ref = open_model(folder, tmp_path).tensors["blk.4.ffn_up.weight"]
    with ref.file.open("rb") as file:
        file.seek(ref.offset)
        weights = file.read(ref.nbytes)
    settings = replace(
        Settings.of_this_machine(), model=str(folder), num_stages=2, broker=redis_url, run="alarm", secret="ab" * 32,
        audit_rate=1.0,
    )  # fmt: skip
    request = Request(tokens=(7, 8, 9), max_tokens=200)
    with ExitStack() as stack:
        stack.enter_context(by_hand(0, settings, tmp_path / "log0"))
        worker = stack.enter_context(by_hand(1, settings, tmp_path / "log1"))
        client = Client(make_app(settings))
        assert len(client.result(client.submit(request), timeout_s=LONG_S)["token_ids"]) == 200  # no false alarm
        try:
            negated = (-np.frombuffer(weights, np.float32)).tobytes()
            assert overwrite_in_memory(worker.pid, weights, negated) >= 1
        except PermissionError:
            pytest.skip("this kernel lets no one into another process's memory")
        with pytest.raises(RequestFailed, match=r"stage 1: audit: block 4, product ffn_up, row \d+"):
            client.result(client.submit(request), timeout_s=LONG_S)
        wait_until(lambda: worker.poll() is not None, timeout=20, what="the end of the worker")
    log = (tmp_path / "log1").read_text()
    assert re.search(r"error: stage 1: audit: block 4, product ffn_up, row \d+ \(position \d+\): got .*, expected", log)


def test_a_token_is_asked_for_once_at_a_terminal(goldens: Path, tmp_path: Path) -> None:
    """Only after a request has failed for want of it; it is not shown, and the run then succeeds with it."""
    with FakeHub({"o/gated": goldens / "llama-tied"}, gated={"o/gated"}, tokens={TOKEN}) as hub:
        cache = tmp_path / "cache"
        cache.mkdir()
        for name in ("compilers", "kernels"):
            (cache / name).symlink_to(Settings.of_this_machine().cache / name)
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PP_", "HF_"))},
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PP_CACHE": str(cache),
            "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "TERM": "dumb",
        }  # fmt: skip
        argv = [sys.executable, "-m", "orchestrator.cli", "run", "--model", "o/gated", "--max-tokens", "5", "Hello"]
        terminal, its_end = pty.openpty()
        command = subprocess.Popen(
            argv, stdin=its_end, stdout=its_end, stderr=its_end, cwd=tmp_path, env=environ, start_new_session=True
        )
        os.close(its_end)
        shown = read_until(terminal, "not kept):")
        assert hub.sent(".safetensors") == 0
        os.write(terminal, f"{TOKEN}\n".encode())
        shown += read_until(terminal, "tokens (")
        assert command.wait(LONG_S) == 0, shown
        os.close(terminal)
    assert shown.count("not kept):") == 1
    assert TOKEN not in shown
    left = [path for path in tmp_path.rglob("*") if path.is_file() and "kernels" not in path.parts]
    assert left
    assert not any(TOKEN.encode() in path.read_bytes() for path in left)


def read_until(terminal: int, text: str) -> str:
    """What the terminal shows up to `text`."""
    shown, deadline = "", time.monotonic() + LONG_S
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the other side has ended
                break
    assert text in shown, shown
    return shown


def test_kernels_that_are_wrong_are_replaced_and_everyone_sees_it(goldens: Path, tmp_path: Path) -> None:
    """The whole program with one constant of its C kernels changed: the answer is still right, and slower."""
    program = tmp_path / "program"
    for package in ("pptasks", "workers", "orchestrator"):
        shutil.copytree(ROOT / package, program / package)
    kernels = program / "workers" / "kernels.c"
    text = kernels.read_text()
    assert "1.0f / __builtin_sqrtf((float)HEAD_DIM)" in text
    kernels.write_text(
        text.replace("1.0f / __builtin_sqrtf((float)HEAD_DIM)", "1.001f / __builtin_sqrtf((float)HEAD_DIM)")
    )
    golden = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    tokens = ",".join(map(str, golden["prompt_ids"]))
    argv = ["run", "--model", str(goldens / "llama-tied"), "--tokens", tokens, "--stages", "1", "--max-tokens", "4"]
    ended = pp(tmp_path, *argv, "--wire", "f32", "--json", "--quiet", PYTHONPATH=str(program))
    assert ended.code == 0, ended.stderr
    assert ended.report["token_ids"] == golden["greedy_ids"][:4]
    (stage,) = ended.report["stages"]
    assert stage["kernels"] == "tinygrad"
    assert "numpy reference differ" in stage["gate_failure"]
    assert re.search(
        r"WARNING: stage 0 \(tinygrad kernels\): block 0 of c and the numpy reference differ", ended.stderr
    )
