"""Which C compiler tinygrad's CPU device runs, one process a kernel.

tinygrad calls `$CC` (the path of one program, never split) with clang's own flags. A bare machine has no clang, but the
wheel `ziglang` holds one, behind `zig clang`: a two-line script in the cache folder stands in. This module is imported
before tinygrad, and is light: no numpy, no tinygrad.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pptasks.errors import ConfigError

OLDEST, NEWEST = 14, 30  # versions looked for as clang-N
PROBE_TIMEOUT_S = 60.0  # a first run reads 180 MB of program from a cold disk
TARGETS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}
PROBE = """
typedef float v16 __attribute__((ext_vector_type(16)));
typedef __fp16 h16 __attribute__((ext_vector_type(16), aligned(2)));
void probe(v16 *out, const h16 *in) { *out = __builtin_convertvector(*in, v16); }
"""  # what the oldest compilers lack of the language of kernels.c


def compiler(environ: Mapping[str, str], cache: Path) -> str:
    """The path to set CC to before tinygrad is imported: CC if it is set, a clang on PATH, or the one in ziglang.

    It has compiled a probe, here or in an earlier run that shared `cache`.
    Raises ConfigError, with the remedy, if the given CC does not work or nothing is found that does.
    """
    folder = cache / "compilers"
    explicit = environ.get("CC")
    if explicit:
        return _checked_cc(explicit, environ, folder)
    for path in _on_path(environ):
        if _complaint(path, folder) is None:
            return path
    zig = _zig()
    if zig is None:
        raise ConfigError(f'no C compiler for the CPU: install clang ({OLDEST} or later) or "pip install ziglang"')
    path = _zig_script(zig, folder)
    complaint = _complaint(path, folder)
    if complaint is not None:
        raise ConfigError(f"the wheel ziglang's compiler does not work here ({complaint}): install clang")
    return path


def kernel_cache(cc: str, cache: Path) -> Path:
    """Where tinygrad should keep compiled kernels: one file for each processor and compiler.

    tinygrad's own key is "native" whatever the machine, and a home folder may be shared by several: another's
    instructions would be illegal.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    except OSError:
        processor = [platform.machine(), platform.processor()]
    stat = os.stat(cc)
    digest = hashlib.sha256(repr((processor, cc, stat.st_size, stat.st_mtime_ns)).encode()).hexdigest()[:16]
    folder = cache / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest}.db"


def _checked_cc(cc: str, environ: Mapping[str, str], folder: Path) -> str:
    path = shutil.which(cc, path=environ.get("PATH"))
    complaint = "there is no such program; arguments are not allowed" if path is None else _complaint(path, folder)
    if path is None or complaint is not None:
        remedy = f"unset CC, or set it to a clang of version {OLDEST} or later"
        raise ConfigError(f"CC={cc} cannot compile for the CPU ({complaint}): {remedy}")
    return path


def _on_path(environ: Mapping[str, str]) -> Iterator[str]:
    """Clangs on PATH, plain `clang` first, then the newest."""
    for name in ("clang", *(f"clang-{n}" for n in range(NEWEST, OLDEST - 1, -1))):
        path = shutil.which(name, path=environ.get("PATH"))
        if path is not None:
            yield path


def _zig() -> Path | None:
    spec = importlib.util.find_spec("ziglang")  # found, not imported
    if spec is None or spec.origin is None:
        return None
    zig = Path(spec.origin).with_name("zig")
    return zig if zig.is_file() else None


def _zig_script(zig: Path, folder: Path) -> str:
    """An executable of our own that is `zig clang`."""
    text = f'#!/bin/sh\nexec {shlex.quote(str(zig))} clang "$@"\n'
    script = folder / f"zig-clang-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not os.access(script, os.X_OK):
        _write(script, text, 0o700)
    return str(script)


def _complaint(path: str, folder: Path) -> str | None:
    """What is wrong with a compiler, in one line; None if it compiles the probe."""
    machine = TARGETS.get(platform.machine().lower(), platform.machine())
    native = "-mcpu=native" if machine == "arm64" else "-march=native"
    command = [path, "-c", "-x", "c", "-O2", "-fPIC", "-ffreestanding", "-fno-math-errno", "-nostdlib", "-fno-ident",
               f"--target={machine}-none-unknown-elf", native, "-", "-o", "-"]  # fmt: skip
    stat = os.stat(path)
    known = repr((command, PROBE, os.path.realpath(path), stat.st_size, stat.st_mtime_ns))
    marker = folder / f"works-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if marker.exists():
        return None
    try:
        done = subprocess.run(command, input=PROBE.encode(), capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)[:200]
    if done.returncode != 0 or not done.stdout.startswith(b"\x7fELF"):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return (said[0] if said else f"it exits with {done.returncode} and no object file")[:200]
    _write(marker, "", 0o600)
    return None


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all: other processes may write the same file, or be running it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
