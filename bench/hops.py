"""What a hop costs: the real two-stage decode against a bare redis-py LPUSH/BRPOP ring, in one run on one Redis.

    .venv/bin/python bench/hops.py [--pairs 3]
    .venv/bin/python bench/hops.py --rtt-ms 40      # Redis behind bench/delay_proxy.py

The ring has two processes and frames of the same size. It is measured twice: doing nothing between hops, and reading
as many bytes between hops as a stage of SmolLM2 does, which leaves the caches as empty as a step leaves them. A hop
of ours is (lap - sum of compute) / hops on the head's clock: sending, Redis, Celery's loop, checking, the inbox. It is
measured for SmolLM2 and, where a model folder is given (--small), for one so small that the caches stay warm. With
Redis far away, hops are also given in round trips.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import redis

from orchestrator.broker import EmbeddedBroker, _free_port

FRAME_BYTES = 72 + 64 + 576 * 2 + 32
STAGE_BYTES = 106_000_000  # the weights of 15 blocks


def work(weights: np.ndarray) -> None:
    """Read as much as a stage does in a decode step."""
    weights.sum()


def echo(url: str, hops: int, nbytes: int) -> None:
    client, weights = redis.Redis.from_url(url), np.ones(nbytes // 8)
    for _ in range(hops):
        frame = client.brpop("ring:1")[1]
        work(weights)
        client.lpush("ring:0", frame)


def bare_ring(url: str, laps: int, nbytes: int = 0) -> tuple[float, float]:
    """p50 and p99 of a hop, microseconds; each end reads `nbytes` between hops, which is not counted."""
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(url, laps, nbytes))
    process.start()
    client, payload, weights, hops = redis.Redis.from_url(url), os.urandom(FRAME_BYTES), np.ones(nbytes // 8), []
    began = time.perf_counter()
    for _ in range(20):
        work(weights)
    reading = (time.perf_counter() - began) / 20
    for _ in range(laps):
        work(weights)
        began = time.perf_counter()
        client.lpush("ring:1", payload)
        client.brpop("ring:0")
        hops.append((time.perf_counter() - began - reading) / 2 * 1e6)
    process.join()
    return percentiles(hops[20:])


def percentiles(hops: list[float]) -> tuple[float, float]:
    return statistics.median(hops), statistics.quantiles(hops, n=100)[98]


def ours(url: str, tokens: int, *model: str) -> tuple[float, float]:
    argv = [sys.executable, "-m", "orchestrator.cli", "run", "--json", "-q", "--max-tokens", str(tokens), *model]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, "PP_BROKER": url})
    timings = json.loads(done.stdout)["timings"]
    return timings["hop_us_p50"], timings["hop_us_p99"]


@contextlib.contextmanager
def far_away(url: str, rtt_ms: float) -> Iterator[str]:
    """The URL of the same Redis, `rtt_ms` away."""
    if not rtt_ms:
        yield url
        return
    parts, port = urlsplit(url), _free_port()
    argv = [sys.executable, str(Path(__file__).with_name("delay_proxy.py")), str(port), str(parts.port), str(rtt_ms)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield url.replace(f":{parts.port}/", f":{port}/")
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--small", help="folder of a very small model")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="put Redis that far away")
    args = parser.parse_args()
    laps = 60 if args.rtt_ms else 220
    rows: dict[str, list[tuple[float, float]]] = {}

    def measured(name: str, hop: tuple[float, float]) -> None:
        rows.setdefault(name, []).append(hop)

    with EmbeddedBroker() as broker, far_away(broker.url, args.rtt_ms) as url:
        for _ in range(args.pairs):
            measured("bare ring, idle", bare_ring(url, laps))
            measured("bare ring, reading", bare_ring(url, laps, STAGE_BYTES))
            measured("pptasks, SmolLM2", ours(url, args.tokens, "--raw", "Once upon a time"))
            if args.small:
                measured("pptasks, small model", ours(url, args.tokens, "--model", args.small, "--tokens", "5,6,7,8"))
    for name, hops in rows.items():
        p50, p99 = (statistics.median(hop[i] for hop in hops) for i in (0, 1))
        ratios = [
            statistics.median(a[0] / b[0] for a, b in zip(hops, rows[ring], strict=True)) for ring in list(rows)[:2]
        ]
        trips = f", {p50 / args.rtt_ms / 1000:.2f} round trips" if args.rtt_ms else ""
        print(
            f"{name:22s} p50 {p50:7.0f} us  p99 {p99:7.0f} us  {ratios[0]:5.2f}x idle  {ratios[1]:5.2f}x reading{trips}"
        )


if __name__ == "__main__":
    main()
