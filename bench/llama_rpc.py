"""llama.cpp's RPC backend on SmolLM2: two ggml-rpc-servers of one thread, each on a core of its own.

    .venv/bin/python bench/llama_rpc.py [--streams 1,4,8,16] [--prompt 128] [--tokens 128] [--pairs 1]
    .venv/bin/python bench/llama_rpc.py --rtt-ms 40 --streams 1,16     # each server behind bench/delay_proxy.py

Needs cmake and a C++ compiler. The first run fetches llama-cpp-python's source distribution, which holds llama.cpp,
and builds it for this machine in the cache folder; that takes some minutes. The model is the same GGUF file (Q4_1,
which llama.cpp keeps as it is). Prints a table and one JSON line.

llama-batched-bench decodes random tokens: every sequence is in every batch, and none ever ends.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.broker import _free_port
from pptasks.config import Settings
from pptasks.models import open_model

SDIST = "llama-cpp-python==0.3.36"
FLAGS = (
    "CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "GGML_RPC=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_SERVER=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF",
)  # fmt: skip
SERVER, BENCH = "ggml-rpc-server", "llama-batched-bench"
UP_S, RUN_S = 10.0, 900.0


@dataclass(frozen=True)
class Build:
    """Its programs lie in `bin`."""

    bin: Path
    version: str


@dataclass(frozen=True)
class Row:
    """Tokens per second, all streams together: of their prompts, and of what they generate."""

    streams: int
    prefill: float
    decode: float


def build(cache: Path) -> Build:
    """llama.cpp, built once. Raises subprocess.CalledProcessError with the compiler's words on stderr."""
    folder = cache / "bench"
    source = folder / SDIST.replace("-", "_").replace("==", "-")
    made, done = source / "build", source / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(source, ignore_errors=True)
        print(f"building {SDIST}, once", file=sys.stderr)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", SDIST.split("==")[0])
        subprocess.run([*pip, "-d", folder, SDIST], check=True)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        flags = [f"-D{flag}" for flag in FLAGS]
        quietly = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(["cmake", "-S", source / "vendor/llama.cpp", "-B", made, *flags], **quietly)
        targets = ["nice", "-n", "10", "cmake", "--build", made, "-j2", "--target", SERVER, BENCH]
        subprocess.run(targets, **quietly)
        done.touch()
    told = subprocess.run([made / "bin" / BENCH, "--version"], check=True, capture_output=True, text=True)
    version = next(line for line in (told.stdout + told.stderr).splitlines() if "version" in line)
    return Build(made / "bin", f"{SDIST}, llama.cpp {version.strip()}")


@contextlib.contextmanager
def far_away(port: int, rtt_ms: float) -> Iterator[int]:
    """A port whose other end is `port`, `rtt_ms` away."""
    if not rtt_ms:
        yield port
        return
    near = _free_port()
    argv = [sys.executable, str(Path(__file__).with_name("delay_proxy.py")), str(near), str(port), str(rtt_ms)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield near
        finally:
            process.terminate()


@contextlib.contextmanager
def servers(made: Build, cores: Sequence[int], rtt_ms: float = 0.0) -> Iterator[str]:
    """One server of one thread on each core; what `--rpc` takes."""
    with contextlib.ExitStack() as stack:
        ports = []
        for core in cores:
            port = _free_port()
            argv = ["taskset", "-c", str(core), made.bin / SERVER, "-t", "1", "-d", "CPU", "-p", str(port)]
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_for(port, process)
            ports.append(stack.enter_context(far_away(port, rtt_ms)))
        yield ",".join(f"127.0.0.1:{port}" for port in ports)


def wait_for(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + UP_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"{SERVER} does not listen on port {port}")


def measure(
    made: Build, rpc: str, model: Path, streams: Sequence[int], prompt: int, tokens: int, ubatch: int = 512
) -> list[Row]:
    """One run for all numbers of streams. The client computes nothing but the embedding's rows. `ubatch`: rows that
    are computed at once; the servers overlap where a prompt is longer."""
    context = max(streams) * (prompt + tokens)
    argv = [
        made.bin / BENCH, "-m", model, "--rpc", rpc, "-ngl", "99", "-t", "1", "-tb", "1", "-c", context, "-b", 2048,
        "-ub", ubatch, "-npp", prompt, "-ntg", tokens, "-npl", ",".join(map(str, streams)), "--output-format", "jsonl",
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=RUN_S)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
    if done.returncode or len(found) != len(streams):
        raise SystemExit(f"{BENCH} failed ({done.returncode}):\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return [Row(row["pl"], row["speed_pp"], row["speed_tg"]) for row in found]


def whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=whole_numbers, default=[1, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that each stream generates")
    parser.add_argument("--pairs", type=int, default=1, help="runs; the medians are shown")
    parser.add_argument("--ubatch", type=int, default=512, help="rows computed at once, llama.cpp's -ub")
    parser.add_argument("--cores", type=whole_numbers, default=[0, 1])
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="put each server that far away")
    args = parser.parse_args()
    settings = Settings.from_env()
    model, made = open_model("smollm2:135m", settings.cache).path, build(settings.cache)
    print(made.version)
    runs = []
    for _ in range(args.pairs):
        with servers(made, args.cores, args.rtt_ms) as rpc:
            runs.append(measure(made, rpc, model, args.streams, args.prompt, args.tokens, args.ubatch))
    rows = []
    print(f"{'streams':>7} {'decode tok/s':>13} {'prefill tok/s':>14}   load {os.getloadavg()[0]:.1f}")
    for of_streams in zip(*runs, strict=True):
        prefill, decode = (statistics.median(getattr(r, what) for r in of_streams) for what in ("prefill", "decode"))
        print(f"{of_streams[0].streams:7d} {decode:13.1f} {prefill:14.1f}")
        rows.append({"streams": of_streams[0].streams, "decode": decode, "prefill": prefill})
    print(json.dumps({"version": made.version, "rtt_ms": args.rtt_ms, "rows": rows}))


if __name__ == "__main__":
    main()
