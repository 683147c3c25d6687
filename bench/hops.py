"""What a hop costs: the real two-stage decode against a bare redis-py LPUSH/BRPOP ring, in one run on one Redis.

    .venv/bin/python bench/hops.py [--pairs 3]
    .venv/bin/python bench/hops.py --delay-proxy ../shared/tools/delay_proxy.py --rtt-ms 40

The ring has two processes and frames of the same size, and computes nothing. A hop of ours is (lap - sum of compute) /
hops on the head's clock: sending, Redis, Celery's loop, checking, the inbox. With a delay proxy before Redis, hops are
also given in round trips.
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
from urllib.parse import urlsplit

import redis

from orchestrator.broker import EmbeddedBroker, _free_port

FRAME_BYTES = 96 + 64 + 576 * 2 + 32


def echo(url: str, hops: int) -> None:
    client = redis.Redis.from_url(url)
    for _ in range(hops):
        client.lpush("ring:0", client.brpop("ring:1")[1])


def bare_ring(url: str, laps: int) -> list[float]:
    """Microseconds a hop of each lap."""
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(url, laps))
    process.start()
    client, payload, hops = redis.Redis.from_url(url), os.urandom(FRAME_BYTES), []
    for _ in range(laps):
        began = time.perf_counter()
        client.lpush("ring:1", payload)
        client.brpop("ring:0")
        hops.append((time.perf_counter() - began) / 2 * 1e6)
    process.join()
    return hops[20:]


def ours(url: str, tokens: int) -> dict:
    argv = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "run",
        "--json",
        "-q",
        "--raw",
        "--max-tokens",
        str(tokens),
        "Once upon a time",
    ]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, "PP_BROKER": url})
    return json.loads(done.stdout)["timings"]


@contextlib.contextmanager
def far_away(url: str, proxy: str | None, rtt_ms: float) -> Iterator[str]:
    """The URL of the same Redis through the delay proxy."""
    if proxy is None:
        yield url
        return
    parts, port = urlsplit(url), _free_port()
    process = subprocess.Popen(
        [sys.executable, proxy, str(port), str(parts.port), "--rtt-ms", str(rtt_ms)], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    try:
        yield url.replace(f":{parts.port}/", f":{port}/")
    finally:
        process.terminate()
        process.wait()


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--delay-proxy", help="script that is called LISTEN_PORT TARGET_PORT --rtt-ms MS")
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    args = parser.parse_args()
    rows = []
    with EmbeddedBroker() as broker, far_away(broker.url, args.delay_proxy, args.rtt_ms) as url:
        for _ in range(args.pairs):
            ring = bare_ring(url, 220 if args.delay_proxy is None else 60)
            rows.append((statistics.median(ring), statistics.quantiles(ring, n=100)[98], ours(url, args.tokens)))
    ring50, ring99 = [r[0] for r in rows], [r[1] for r in rows]
    ours50, ours99 = [r[2]["hop_us_p50"] for r in rows], [r[2]["hop_us_p99"] for r in rows]
    print(f"bare ring     p50 {statistics.median(ring50):9.0f} us   p99 {statistics.median(ring99):9.0f} us")
    print(f"pptasks hop   p50 {statistics.median(ours50):9.0f} us   p99 {statistics.median(ours99):9.0f} us")
    print(f"ratio p50 {median_ratio(ours50, ring50):.2f}, p99 {median_ratio(ours99, ring99):.2f}")
    if args.delay_proxy:
        print(f"round trips of {args.rtt_ms:.0f} ms a hop: {statistics.median(ours50) / args.rtt_ms / 1000:.2f}")


if __name__ == "__main__":
    main()
