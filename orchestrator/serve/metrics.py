"""What Prometheus gets at /metrics: requests as this server saw them, and the pipeline as its stages tell it.

docker/grafana/pptasks.json shows them; a test holds that it names no metric that is not here.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from orchestrator.serve.pipeline import Readings, Snapshot
from orchestrator.serve.state import ServeState
from pptasks.errors import BrokerError
from pptasks.members import Member

FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 120)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.35, 0.6, 1, 2.5, 10)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Observer(Collector):
    """What is told of requests as they are served."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "pptasks_requests", "HTTP requests that were answered, by status", ("endpoint", "status"), registry=registry
        )
        self._answers = Counter(
            "pptasks_answers", "Answers that ended, by how they did", ("finish_reason",), registry=registry
        )
        self._first = Histogram(
            "pptasks_time_to_first_token_seconds", "From a request to its first token", buckets=FIRST_S,
            registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "pptasks_inter_token_seconds", "From one piece of an answer to the next", buckets=BETWEEN_S,
            registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "pptasks_request_seconds", "From a request to the end of its answer", buckets=WHOLE_S, registry=registry
        )
        self._prompt = Histogram(
            "pptasks_request_prompt_tokens", "Tokens of a request's prompt", buckets=TOKENS, registry=registry
        )
        self._generated = Histogram(
            "pptasks_request_generated_tokens", "Tokens of an answer", buckets=TOKENS, registry=registry
        )

    def request(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def ended(self, finish_reason: str, prompt_tokens: int, completion_tokens: int, seconds: float) -> None:
        """`prompt_tokens`: 0 where nobody knows."""
        self._answers.labels(finish_reason).inc()
        self._whole.observe(seconds)
        self._generated.observe(completion_tokens)
        if prompt_tokens:
            self._prompt.observe(prompt_tokens)

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()


class Pipeline(Collector):
    """The last of `readings`. Counters are the workers' own, so they begin anew when a worker does."""

    def __init__(self, readings: Readings):
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        yield InfoMetricFamily(
            "pptasks_build",
            "What is served, by which version",
            value={
                "version": version("pptasks"),
                "model": readings.model.name,
                "stages": str(readings.cluster.plan.n_stages),
                "wire": readings.cluster.plan.wire,
            },
        )
        shot = readings.last if isinstance(readings.last, Snapshot) else None
        yield _gauge("pptasks_broker_up", "1 when the broker answers", 0.0 if shot is None else 1.0)
        yield _up(shot, readings.cluster.plan.n_stages)
        if shot is not None:
            yield from _stages(shot)
            if 0 in shot.present:
                yield from _head(shot.members[0])


def _up(shot: Snapshot | None, n_stages: int) -> Metric:
    family = GaugeMetricFamily("pptasks_stage_up", "1 when a stage says that it is ready", labels=("stage",))
    for stage in range(n_stages):
        is_up = shot is not None and stage in shot.present and shot.members[stage].state == "ready"
        family.add_metric((str(stage),), float(is_up))
    return family


def _stages(shot: Snapshot) -> Iterator[Metric]:
    depth = GaugeMetricFamily("pptasks_stage_queue_depth", "Messages in a stage's queue", labels=("stage",))
    for stage, length in enumerate(shot.queues):
        depth.add_metric((str(stage),), length)
    yield depth
    here = [shot.members[stage] for stage in sorted(shot.present)]
    info = InfoMetricFamily("pptasks_stage", "Who serves a stage", labels=("stage",))
    busy = GaugeMetricFamily("pptasks_stage_busy_ratio", "Share of the last seconds spent computing", labels=("stage",))
    for member in here:
        blocks = f"[{member.span[0]},{member.span[1]})" if member.span else ""
        told = {"host": member.host, "device": member.device, "kernels": member.kernels, "blocks": blocks}
        info.add_metric((str(member.stage),), told)
        busy.add_metric((str(member.stage),), shot.rates[member.stage].busy)
    yield info
    yield busy
    for name, words, unit in _STAGE_COUNTERS:
        counter = CounterMetricFamily(f"pptasks_stage_{name}", words, labels=("stage",))
        for member in here:
            counter.add_metric((str(member.stage),), getattr(member, unit[0]) * unit[1])
        yield counter
    for name, words, unit in _STAGE_GAUGES:
        gauge = GaugeMetricFamily(f"pptasks_{name}", words, labels=("stage",))
        for member in here:
            gauge.add_metric((str(member.stage),), getattr(member, unit[0]) * unit[1])
        yield gauge


_STAGE_COUNTERS = (
    ("laps", "Laps that a stage computed", ("steps", 1)),
    ("rows", "Positions that a stage computed", ("rows", 1)),
    ("busy_seconds", "Time that a stage spent computing", ("busy_us", 1e-6)),
    ("refused", "Messages that a stage did not serve", ("refused", 1)),
)
_STAGE_GAUGES = (
    ("stage_lanes", "Sequences in a stage's last lap", ("lanes", 1)),
    ("stage_weights_bytes", "Weights that a stage holds", ("weights_bytes", 1)),
    ("stage_resident_bytes", "Memory of a stage's process", ("rss_bytes", 1)),
    ("stage_broker_rtt_seconds", "From a stage to the broker and back", ("rtt_ms", 1e-3)),
    ("kv_bytes", "A stage's KV cache", ("kv_bytes", 1)),
    ("kv_slots", "Sequences that a stage's KV cache holds", ("slots", 1)),
)


def _head(head: Member) -> Iterator[Metric]:
    """Of all requests of the pipeline, whoever sent them."""
    yield _gauge("pptasks_requests_running", "Requests in a slot", head.live)
    yield _gauge("pptasks_requests_waiting", "Requests that wait for a slot", head.waiting)
    yield _gauge("pptasks_laps_in_flight", "Laps under way", head.in_flight)
    yield _gauge("pptasks_hop_seconds", "From one stage to the next: a recent median, 0 if none", head.hop_us * 1e-6)
    yield CounterMetricFamily("pptasks_prompt_tokens", "Tokens of prompts", value=head.prompt_tokens)
    yield CounterMetricFamily("pptasks_cached_tokens", "Of these, not computed again", value=head.cached_tokens)
    yield CounterMetricFamily("pptasks_generated_tokens", "Tokens generated", value=head.tokens)
    ends = CounterMetricFamily("pptasks_pipeline_requests", "Requests that the head ended", labels=("end",))
    for end, n in (("answered", head.requests), ("cancelled", head.cancelled), ("failed", head.failed)):
        ends.add_metric((end,), n)
    yield ends


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def routes(state: ServeState, readings: Readings) -> list[BaseRoute]:
    registry = CollectorRegistry()
    registry.register(Pipeline(readings))
    if isinstance(state.observe, Observer):
        registry.register(state.observe)
    ProcessCollector(pid=os.getpid, registry=registry)

    async def metrics(request: Request) -> Response:
        with suppress(BrokerError):  # which pptasks_broker_up tells
            await readings.latest()
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind, "cache-control": "no-store"})

    return [Route("/metrics", metrics)]
