"""Single-stream decode of SmolLM2 over two stages against stock tinygrad 0.13.0 in one process, in turn, in one run.

    .venv/bin/python bench/decode.py [--pairs 3] [--tokens 48]

Stock runs in an environment of its own, .bench/tinygrad-0.13.0, which is made when it is not there. Prints a table and
one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from pptasks.config import Settings
from pptasks.models import open_model

HERE = Path(__file__).parent
PROMPT = (
    "1,9690,198,2683,359,253,5356,5646,11173,3365,3511,308,34519,28,7018,411,407,19712,8182,2,198,"
    "1,4093,198,36218,33662,2,198,1,520,9531,198"
)


def stock_python() -> Path:
    folder = HERE.parent / ".bench" / "tinygrad-0.13.0"
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "tinygrad==0.13.0"], check=True)
        (folder / "done").touch()
    return python


def stock(python: Path, model: Path, tokens: int, cc: str) -> dict:
    env = {**os.environ, "DEV": "CPU", "CC": cc}
    done = subprocess.run(
        [python, HERE / "stock_decode.py", model, str(tokens), PROMPT],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def ours(tokens: int, stages: int) -> dict:
    argv = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "run",
        "--json",
        "-q",
        "--tokens",
        PROMPT,
        "--max-tokens",
        str(tokens),
        "--stages",
        str(stages),
    ]
    return json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=31, help="the answer to this prompt ends after 31")
    args = parser.parse_args()
    from workers.clang import compiler

    settings = Settings.from_env()
    model, python = open_model("smollm2:135m", settings.cache).path, stock_python()
    cc = compiler(os.environ, settings.cache)
    pairs = []
    for _ in range(args.pairs):
        pairs.append((ours(args.tokens, 2), ours(args.tokens, 1), stock(python, model, args.tokens, cc)))
    rows = {
        "pptasks, 2 stages": [a["timings"]["tokens_per_s"] for a, _, _ in pairs],
        "pptasks, 1 stage": [b["timings"]["tokens_per_s"] for _, b, _ in pairs],
        "tinygrad.llm 0.13.0, 1 process": [c["tokens_per_s"] for _, _, c in pairs],
    }
    for name, values in rows.items():
        print(f"{name:32s} {statistics.median(values):7.1f} tok/s   ({min(values):.1f} - {max(values):.1f})")
    ratio = statistics.median(a["timings"]["tokens_per_s"] / c["tokens_per_s"] for a, _, c in pairs)
    print(f"ratio of 2 stages to stock, pair by pair: {ratio:.1f}x")
    print(json.dumps({"rows": rows, "ratio": ratio}))


if __name__ == "__main__":
    main()
