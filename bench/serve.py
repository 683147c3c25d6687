"""Tokens a second of many streams at once: two stages beside llama.cpp's RPC backend, on the same two cores, in turn.

    .venv/bin/python bench/serve.py [--pairs 3]
    .venv/bin/python bench/serve.py --pairs 1 --rows decode-16,one-process     # some rows only

SmolLM2, each stage and each ggml-rpc-server (bench/llama_rpc.py) pinned to a core of its own. All of them are up the
whole time; a pair is one measurement of ours and one of theirs, the second first in every other pair. What is shown are
medians, and the median of the pairs' ratios. "others": cores that processes which are none of ours took meanwhile; a
row where that is much says little.

Both decode after prompts of about 128 tokens. Ours answers through the client's usual way, a task for each request and
one stream of tokens for all; a stream may end early, so the window is the time in which all of them are live. The far
rows have the broker, and each ggml-rpc-server, behind bench/delay_proxy.py. Prints a table and one JSON line.
"""

import argparse
import contextlib
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import urlsplit

import llama_rpc
import numpy as np
import psutil

from orchestrator.broker import EmbeddedBroker
from orchestrator.cluster import LocalCluster
from orchestrator.loadtest import prompt
from orchestrator.run import Options
from pptasks import stream
from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.connect import connect
from pptasks.keys import Keys
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.request import Request

MODEL = "smollm2:135m"
CONTEXT, PROMPT, TOKENS, LONG, RTT_MS = 1024, 128, 128, 512, 40.0
WORDS = 88  # and the template, and what else is asked, are about PROMPT tokens
GIVE_UP_S = 300.0
MUCH, QUIET_S = 0.1, 3.0  # cores that others take, and for how long they must not


@dataclass(frozen=True)
class Row:
    """Both sides take a seed. `target`: how many times theirs ours is to reach; 0: stands there for comparison."""

    name: str
    what: str
    target: float
    ours: Callable[[int], float]
    theirs: Callable[[int], float]


class Ours:
    """A pipeline that is up, and what it does in a second."""

    def __init__(self, cluster: LocalCluster):
        self._client, self._keys = Client(make_app(cluster.settings)), Keys(cluster.settings.run)
        self._broker = cluster.settings.broker

    def decode(self, streams: int, seed: int) -> float:
        """Tokens a second while all streams are live."""
        asked = [
            Request(prompt=prompt(WORDS, seed, i), max_tokens=TOKENS, temperature=0.8, seed=seed * 1000 + i)
            for i in range(streams)
        ]
        came = self._answers(asked)
        begin, end = (max(times[0] for times in came), min(times[-1] for times in came))
        tokens = sum(begin < at <= end for times in came for at in times)
        if tokens < 16 * streams:
            raise SystemExit(f"all {streams} streams were live for {tokens} tokens only: take another --seed")
        return tokens / (end - begin)

    def prefill(self, n: int) -> float:
        """Tokens a second of one prompt that was never there before, from its being sent to the first token's being
        read."""
        ids = np.random.default_rng().integers(1000, 40_000, n).tolist()
        began = time.perf_counter()
        [[first]] = self._answers([Request(tokens=tuple(ids), max_tokens=1)])
        return n / (first - began)

    def _answers(self, requests: list[Request]) -> list[list[float]]:
        """When each token of each request was read."""
        name, deadline = f"bench-{secrets.token_hex(8)}", time.monotonic() + GIVE_UP_S
        came = {self._client.submit(replace(request, reply=name)): list[float]() for request in requests}
        open_ = len(requests)
        with connect(self._broker) as redis:
            for piece in stream.read(redis, self._keys, name):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{open_} of {len(requests)} requests have no end after {GIVE_UP_S:.0f} s")
                if piece is None:
                    continue
                came[piece.request] += [time.perf_counter()] * len(piece.ids)
                if piece.end not in (None, "ok"):
                    raise SystemExit(f"a request {piece.end}: {piece.error}")
                open_ -= piece.end is not None
                if not open_:
                    return list(came.values())
        raise SystemExit("the stream of answers ended")


@contextlib.contextmanager
def ours(stages: int, cores: list[int], rtt_ms: float = 0.0, **settings: object) -> Iterator[Ours]:
    """A pipeline, each worker pinned to one of `cores` once it is ready."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(EmbeddedBroker()).url
        if rtt_ms:
            port = urlsplit(url).port
            url = url.replace(f":{port}/", f":{stack.enter_context(llama_rpc.far_away(port, rtt_ms))}/")
        wanted = replace(
            Settings.of_this_machine(),
            model=MODEL,
            num_stages=stages,
            split="auto",
            context=CONTEXT,
            slots=16,
            **settings,
        )
        model = open_model(wanted.model, wanted.cache)
        cluster = LocalCluster(replace(wanted, model=model.spec), make_plan(model, wanted), Options(broker=url))
        stack.enter_context(cluster)
        for stage, member in cluster.stages.refresh().items():
            for thread in psutil.Process(member.pid).threads():
                os.sched_setaffinity(thread.id, {cores[stage]})
        made = Ours(cluster)
        made.prefill(16)  # wakes it
        yield made


class Others:
    """How many cores processes that are not ours use, since the last look."""

    def __init__(self) -> None:
        self._last = self._now()

    def wait_for_quiet(self, most_s: float) -> None:
        """Until they take little for some seconds, but no longer than that."""
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline:
            self.look()
            time.sleep(QUIET_S)
            if self.look() < MUCH:
                return

    def look(self) -> float:
        last, self._last = self._last, self._now()
        elapsed, everyone, our_own = (now - then for now, then in zip(self._last, last, strict=True))
        return max(0.0, (everyone - our_own) / elapsed)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        us, everyone, our_own = psutil.Process(), psutil.cpu_times(), 0.0
        for process in [us, *us.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                our_own += sum(process.cpu_times()[:4])  # with those of children that have ended
        return time.monotonic(), sum(everyone) - everyone.idle - everyone.iowait - everyone.guest, our_own


class Up:
    """All that is measured, put up when it is first asked for."""

    def __init__(self, stack: contextlib.ExitStack, cores: list[int], in_flight: int | None, far_in_flight: int | None):
        settings = Settings.from_env()
        self._stack, self._cores = stack, cores
        self._in_flight, self._far_in_flight = in_flight, far_in_flight
        self._model, self.llama_build = open_model(MODEL, settings.cache).path, llama_rpc.build(settings.cache)

    @cached_property
    def near(self) -> Ours:
        return self._stack.enter_context(ours(2, self._cores, in_flight=self._in_flight))

    @cached_property
    def far(self) -> Ours:
        return self._stack.enter_context(ours(2, self._cores, RTT_MS, in_flight=self._far_in_flight))

    @cached_property
    def alone(self) -> Ours:
        return self._stack.enter_context(ours(1, self._cores[:1]))

    @cached_property
    def _llama_near(self) -> str:
        return self._stack.enter_context(llama_rpc.servers(self.llama_build, self._cores))

    @cached_property
    def _llama_far(self) -> str:
        return self._stack.enter_context(llama_rpc.servers(self.llama_build, self._cores, RTT_MS))

    def llama(self, streams: int) -> float:
        return self._llama(self._llama_near, streams, PROMPT, TOKENS).decode

    def llama_far(self, streams: int) -> float:
        return self._llama(self._llama_far, streams, PROMPT, 48).decode

    def llama_prefill(self, ubatch: int) -> float:
        return self._llama(self._llama_near, 1, LONG, 1, ubatch).prefill

    def _llama(self, rpc: str, streams: int, prompt: int, tokens: int, ubatch: int = 512) -> llama_rpc.Row:
        return llama_rpc.measure(self.llama_build, rpc, self._model, [streams], prompt, tokens, ubatch)[0]


def make_rows(up: Up) -> list[Row]:
    def decode(n: int, target: float) -> Row:
        what = f"decode, {n} streams"
        return Row(f"decode-{n}", what, target, lambda seed: up.near.decode(n, seed), lambda seed: up.llama(n))

    def far(n: int, target: float) -> Row:
        what = f"decode, {n} streams, {RTT_MS:.0f} ms away"
        return Row(f"far-{n}", what, target, lambda seed: up.far.decode(n, seed), lambda seed: up.llama_far(n))

    def prefill(ubatch: int, target: float) -> Row:
        what, name = f"prefill, {LONG} tokens (llama.cpp -ub {ubatch})", f"prefill-{ubatch}"
        return Row(name, what, target, lambda seed: up.near.prefill(LONG), lambda seed: up.llama_prefill(ubatch))

    whole = Row(
        "one-process", "16 streams, beside the whole model on one core at 8", 1.8,
        lambda seed: up.near.decode(16, seed), lambda seed: up.alone.decode(8, seed),
    )  # fmt: skip
    return [
        decode(1, 1.2), decode(4, 2.0), decode(8, 0.0), decode(16, 3.0),
        prefill(512, 1.5), prefill(64, 0.0), far(1, 1.0), far(16, 5.0), whole,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=lambda text: text.split(","), help="names of rows, as in the JSON")
    parser.add_argument("--cores", type=llama_rpc.whole_numbers, default=[0, 1])
    parser.add_argument("--in-flight", type=int, default=None, help="laps under way at once")
    parser.add_argument("--far-in-flight", type=int, default=None, help="laps under way at once, far away")
    parser.add_argument("--wait", type=float, default=0.0, help="most seconds, before a pair, for others to rest")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = []
    with contextlib.ExitStack() as stack:
        up = Up(stack, args.cores, args.in_flight, args.far_in_flight)
        print(f"theirs: {up.llama_build.version}")
        print(f"{'medians, tokens a second':52s} {'ours':>7s} {'theirs':>7s}")
        for row in (row for row in make_rows(up) if args.rows is None or row.name in args.rows):
            pairs, shares, others = [], [], Others()
            for i in range(args.pairs):
                others.wait_for_quiet(args.wait)
                others.look()
                sides = {name: getattr(row, name)(args.seed + i) for name in ("ours", "theirs")[:: -1 if i % 2 else 1]}
                pairs.append((sides["ours"], sides["theirs"]))
                shares.append(others.look())
            found.append(told(row, pairs, statistics.median(shares)))
    print(json.dumps({"rows": found}))


def told(row: Row, pairs: list[tuple[float, float]], others: float) -> dict[str, object]:
    """One line of the table, and the same for the JSON."""
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    verdict = "" if not row.target else "reached" if ratio >= row.target else "falls short"
    aim = f"(>= {row.target:g}) {verdict}" if row.target else ""
    busy = f"  others {others:.2f}" if others >= MUCH else ""
    print(f"{row.what:52s} {mine:7.1f} {theirs:7.1f}  {ratio:5.2f}x {aim}{busy}", flush=True)
    return {
        "row": row.name, "ours": mine, "theirs": theirs, "ratio": ratio, "target": row.target, "verdict": verdict,
        "pairs": pairs, "others": others,
    }  # fmt: skip


if __name__ == "__main__":
    main()
