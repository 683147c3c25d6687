"""What the running audit costs: decode steps of one stage, audited and not, in turn, in one process.

    .venv/bin/python bench/audit.py [--pairs 300] [--blocks 15] [--model smollm2:135m] [--weights 16bit]

A pair is one step of a slice that audits every call and one of a slice that audits none, at the same position. Their
difference is what one audit costs (block and read-out); the share is that times PP_AUDIT_RATE over a step. Prints a
table and one JSON line.
"""

import argparse
import json
import statistics
import time

import numpy as np

from pptasks.config import Settings
from pptasks.models import open_model
from pptasks.plan import Span
from workers.loader import choose_compiler

PROMPT = 64  # positions before the first step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--weights", default="16bit", choices=["16bit", "quantized"])
    args = parser.parse_args()
    settings = Settings.from_env()
    choose_compiler(settings)
    from workers.model import Slice

    model = open_model(args.model, settings.cache)

    def open_slice(rate: float) -> Slice:
        return Slice(
            model, Span(0, args.blocks), embedding=False, readout=True, n_slots=1, context=PROMPT + args.pairs,
            max_rows=PROMPT, kernels=settings.kernels, weights=args.weights, audit_rate=rate,
            on_progress=lambda *_: None,
        )  # fmt: skip

    x = np.random.default_rng(0).standard_normal((PROMPT, model.config.dim)).astype(np.float32)

    def step_ms(slice_: Slice, position: int) -> float:
        slot, positions = np.zeros(1, np.int32), np.array([position], np.int32)
        began = time.perf_counter()
        slice_.logits(slice_.forward(x[:1], slot, positions))
        return (time.perf_counter() - began) * 1e3

    slices = {"audited": open_slice(1.0), "not audited": open_slice(0.0)}
    for slice_ in slices.values():
        slice_.warm()
        slice_.forward(x, np.zeros(PROMPT, np.int32), np.arange(PROMPT, dtype=np.int32))
    times: dict[str, list[float]] = {name: [] for name in slices}
    for i in range(args.pairs):
        for name in list(slices)[:: 1 if i % 2 else -1]:
            times[name].append(step_ms(slices[name], PROMPT + i))
    for name, values in times.items():
        print(f"step, {name:12s} {statistics.median(values):8.3f} ms   (best {min(values):.3f})")
    cost = statistics.median(a - b for a, b in zip(*times.values(), strict=True))
    step = statistics.median(times["not audited"])
    share = settings.audit_rate * cost / step
    print(f"an audit costs {cost:.3f} ms; at a rate of {settings.audit_rate} that is {share:.2%} of the time")
    print(json.dumps({"step_ms": step, "audit_ms": cost, "rate": settings.audit_rate, "share": share}))


if __name__ == "__main__":
    main()
