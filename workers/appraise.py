"""`python -m workers.appraise`: what this machine can do for a run, as one JSON line on stdout, after the kernel probe.

A process of its own: it ends at once when it is no longer wanted, and what tinygrad took on a GPU goes with it, before
the worker comes. Exit code: 0, or that of the error on stderr.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from pptasks.config import Settings
from pptasks.errors import PPError
from pptasks.modelinfo import OUTPUT, OUTPUT_NORM, ModelConfig
from workers.loader import choose_compiler
from workers.memory import free_memory

WIDTH = 4096
CPU_BYTES, GPU_BYTES = 96 << 20, 512 << 20  # of the matrix that is read: more than a cache holds
WARM_RUNS, RUNS = 3, 5  # a TinyJit replays from its third call on
MAX_S = 1.0  # for the runs


@dataclass(frozen=True)
class Appraisal:
    """device: of tinygrad, with its architecture. memory_bytes: free on it. speed: bytes of weights read a second."""

    device: str
    memory_bytes: int
    speed: float


def appraise(settings: Settings) -> Appraisal:
    """Raises ProbeFailed, or ConfigError without a compiler."""
    choose_compiler(settings)
    from tinygrad import Device  # takes a second

    from workers.probe import device_name, probe

    probe(settings.kernels)
    memory = free_memory(Device.DEFAULT)  # before the measurement takes some
    return Appraisal(f"{Device.DEFAULT} ({device_name()})", memory, read_speed(settings.kernels))


def read_speed(kernels: str) -> float:
    """Bytes a second of a read-out of one row, by the kernels that a stage on this machine would use: the median."""
    from workers.kernels import CpuKernels, obstacle
    from workers.plain import PlainTinygrad
    from workers.weights import FLOATS, Weight, aligned_zeros

    nbytes = CPU_BYTES if obstacle(_read_out(1)) is None else GPU_BYTES
    config = _read_out(nbytes // (2 * WIDTH))
    norm = aligned_zeros((WIDTH,), FLOATS["F32"])
    head = aligned_zeros((config.vocab_size, WIDTH), FLOATS["F16"])
    norm[:] = head[:] = 1  # memory that was never written is one page of zeros, in the cache
    weights = [(OUTPUT_NORM, Weight(norm, "F32", norm.shape)), (OUTPUT, Weight(head, "F16", head.shape))]
    make = CpuKernels if kernels == "auto" and obstacle(config) is None else PlainTinygrad
    backend = make(config, weights, blocks=range(0), rope=None, context=1, n_slots=1, max_rows=1, traced=range(0))
    row, times = np.ones((1, WIDTH), np.float32), list[float]()
    for _ in range(WARM_RUNS):
        backend.logits(row)
    while len(times) < RUNS and sum(times) < MAX_S:
        began = time.perf_counter()
        backend.logits(row)
        times.append(time.perf_counter() - began)
    return head.nbytes / median(times)


def _read_out(rows: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", n_blocks=0, dim=WIDTH, n_heads=1, n_kv_heads=1, head_dim=2, ffn_dim=1, vocab_size=rows,
        context=1, norm="rms", norm_eps=1e-5, ffn="swiglu", rope=None, windows=(), tied=False,
    )  # fmt: skip


def main() -> int:
    try:
        print(json.dumps(asdict(appraise(Settings.from_env()))), flush=True)
    except PPError as error:
        print(f"pptasks: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
