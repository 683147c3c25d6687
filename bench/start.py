"""Seconds until two stages are ready, cold and warm, and the bytes that each stage holds.

    .venv/bin/python bench/start.py [--runs 3]

Cold: an empty cache for compiled kernels (XDG_CACHE_HOME is a fresh folder), the model's file already there. Warm: the
same again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from pptasks.config import Settings
from pptasks.models import open_model


def run(model: str, stages: int, cache: str) -> dict:
    argv = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "run",
        "--json",
        "-q",
        "--model",
        model,
        "--stages",
        str(stages),
        "--max-tokens",
        "2",
        "Say hello",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    env.pop("PP_CACHE", None)
    return json.loads(subprocess.run(argv, check=True, capture_output=True, text=True, env=env).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    model = str(open_model("smollm2:135m", Settings.from_env().cache).path)
    cold, warm = [], []
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run(model, 2, cache)["timings"]["ready_s"])
            two = run(model, 2, cache)
            warm.append(two["timings"]["ready_s"])
            one = run(model, 1, cache)
    print(f"ready, cold   {statistics.median(cold):6.1f} s   ({min(cold):.1f} - {max(cold):.1f})")
    print(f"ready, warm   {statistics.median(warm):6.1f} s   ({min(warm):.1f} - {max(warm):.1f})")
    total = sum(s["weights_bytes"] for s in two["stages"])
    for stage in two["stages"]:
        print(f"stage {stage['stage']}: {stage['weights_bytes']:,} bytes of weights, {stage['rss_bytes']:,} resident")
    single = one["stages"][0]["weights_bytes"]
    print(f"sum {total:,}; one process {single:,}; ratio {total / single:.3f}")


if __name__ == "__main__":
    main()
