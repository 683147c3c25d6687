"""Memory of a stage while it loads, over what it holds afterwards, and its weights against the same in 16 bits.

    .venv/bin/python bench/load.py [--model M] [--stages 2] [--kernels auto|tinygrad]

Every stage is loaded in a process of its own, with `--weights 16bit` and with `--weights quantized`: first its weights
alone, then, those given up, the whole stage with its caches, kernels and gates. Resident memory is counted from after
the imports on; its peak is Linux's VmHWM, started anew. Prints a table and one JSON line.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TypeVar

from pptasks.config import Settings
from pptasks.models import Model, open_model
from pptasks.plan import Span
from workers.model import Slice
from workers.weights import load

MODES = ("16bit", "quantized")
T = TypeVar("T")


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS, or VmHWM, the most there was."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"/proc/self/status has no {field}; this needs Linux")
    return int(found[1]) * 1024


def measure(make: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What `make` made, and by how much the memory grew: at most, and in the end."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at VmRSS
    before = resident("VmRSS")
    made = make()
    peak, held = resident("VmHWM") - before, resident("VmRSS") - before
    return made, {"peak_bytes": peak, "held_bytes": held, "ratio": peak / held}


def load_stage(model: Model, lo: int, hi: int, kernels: str, weights: str) -> dict:
    ends = {"embedding": lo == 0, "readout": hi == model.config.n_blocks}
    refs = model.stage_tensors(lo, hi, **ends)
    loaded, alone = measure(lambda: list(load(refs, lambda *_: None, quantized=weights == "quantized")))
    nbytes = sum(weight.nbytes for _, weight in loaded)
    del loaded

    def make() -> Slice:
        sizes = {"n_slots": 4, "context": 512, "max_rows": 128}
        return Slice(
            model, Span(lo, hi), **ends, **sizes, kernels=kernels, weights=weights, on_progress=lambda *_: None
        )

    stage, whole = measure(make)
    return {
        "blocks": [lo, hi], "mode": weights, "kernels": stage.kernels_used, "weights": alone, "stage": whole,
        "weights_bytes": nbytes, "of_16bit": nbytes / sum(2 * prod(ref.shape) for ref in refs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kernels", choices=("auto", "tinygrad"), default="auto")
    parser.add_argument("--one", nargs=3, metavar=("LO", "HI", "WEIGHTS"), help="load this span here; print JSON alone")
    args = parser.parse_args()
    model = open_model(args.model, Settings.from_env().cache)
    if args.one:
        lo, hi, weights = args.one
        print(json.dumps(load_stage(model, int(lo), int(hi), args.kernels, weights)))
        return
    edges = [model.config.n_blocks * i // args.stages for i in range(args.stages + 1)]
    argv = [sys.executable, __file__, "--model", str(args.model), "--kernels", args.kernels, "--one"]
    rows = []
    print("                                weights, MB                      stage, MB")
    print("blocks     mode       kernels   peak   held  ratio  of 16-bit    peak   held  ratio")
    for mode in MODES:
        for lo, hi in pairwise(edges):
            done = subprocess.run([*argv, str(lo), str(hi), mode], check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            alone, stage = (
                f"{row[part]['peak_bytes'] / 1e6:6.1f} {row[part]['held_bytes'] / 1e6:6.1f} {row[part]['ratio']:6.3f}"
                for part in ("weights", "stage")
            )
            print(
                f"{lo:>3} - {hi:<4} {mode:<10} {row['kernels']:<8} {alone}  {row['of_16bit']:9.3f}  {stage}", flush=True
            )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
