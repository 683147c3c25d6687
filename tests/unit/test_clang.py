"""The choice of the C compiler: each source in turn, one that does not work, and several processes at once."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pptasks.errors import ConfigError
from workers.clang import compiler

pytest.importorskip("ziglang")
NO_PATH = {"PATH": ""}


@pytest.fixture(scope="module")
def zig(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiler(NO_PATH, tmp_path_factory.mktemp("cache"))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_a_clang_the_wheel_serves_through_a_script_that_only_its_owner_may_run(zig: str):
    assert stat.S_IMODE(os.stat(zig).st_mode) == 0o700
    done = subprocess.run([zig, "--version"], capture_output=True, text=True, check=True, env={})
    assert "clang version" in done.stdout


def test_an_explicit_cc_is_taken_before_a_clang_on_the_path(zig: str, tmp_path: Path):
    mine = script(tmp_path / "mine", f'exec {zig} "$@"')
    script(tmp_path / "clang", f'exec {zig} "$@"')
    assert compiler({"PATH": str(tmp_path), "CC": str(mine)}, tmp_path / "cache") == str(mine)
    assert compiler({"PATH": str(tmp_path)}, tmp_path / "cache") == str(tmp_path / "clang")


def test_a_clang_on_the_path_that_does_not_work_is_passed_over(zig: str, tmp_path: Path):
    script(tmp_path / "clang", "exit 1")
    script(tmp_path / "clang-17", f'exec {zig} "$@"')
    assert compiler({"PATH": str(tmp_path)}, tmp_path / "cache") == str(tmp_path / "clang-17")


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo unrecognized option --target >&2; exit 1", "unrecognized option"), ("exit 0", "no object file")],
)
def test_an_explicit_cc_that_does_not_work_is_an_error_that_names_it(tmp_path: Path, text: str, said: str):
    cc = script(tmp_path / "gcc", text)
    with pytest.raises(ConfigError, match=said) as error:
        compiler({"PATH": "", "CC": str(cc)}, tmp_path / "cache")
    assert str(cc) in str(error.value)
    assert "unset CC" in str(error.value)


def test_a_cc_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such program"):
        compiler({"PATH": "", "CC": "clang -O3"}, tmp_path)


def test_nothing_at_all_names_the_remedies(tmp_path: Path):
    """In a Python without site-packages there is no wheel, and no numpy or tinygrad to import by mistake."""
    code = "import sys, pathlib, workers.clang as c; c.compiler({'PATH': ''}, pathlib.Path(sys.argv[1]))"
    command, root = [sys.executable, "-S", "-c", code, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env={})
    assert "ConfigError: no C compiler" in done.stderr
    assert "pip install ziglang" in done.stderr


def test_a_compiler_that_worked_is_not_run_again(zig: str, tmp_path: Path):
    ran = tmp_path / "ran"
    script(tmp_path / "clang", f'echo >> {ran}; exec {zig} "$@"')
    for _ in range(3):
        compiler({"PATH": str(tmp_path)}, tmp_path / "cache")
    assert ran.read_text() == "\n"


def test_many_at_once_get_one_script_that_works(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: compiler(NO_PATH, tmp_path), range(8)))
    assert len(set(paths)) == 1
    subprocess.run([paths[0], "--version"], capture_output=True, check=True)
    assert not [p for p in (tmp_path / "compilers").iterdir() if p.name.startswith("tmp")]
