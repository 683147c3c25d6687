"""A pipeline of real workers as a Celery team sees it: tasks, results, revokes, inspect, Flower; and what strangers
write to its queues."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from orchestrator.cluster import LocalCluster
from orchestrator.run import Options
from pptasks.config import Settings, child_environment
from pptasks.errors import Busy, RequestError
from pptasks.keys import Keys, stage_queue
from pptasks.membership import Membership
from pptasks.models import open_model
from pptasks.plan import make_plan
from pptasks.probe import expected
from pptasks.wire import DTYPES, VERSION, Frame, Kind, Lane, Sampling, decode, encode, key_id, short_id
from tests.conftest import WaitUntil
from tests.integration.hand import by_hand, send, stock_app
from tests.pipeline import load
from workers.stage import Stage

LONG = {"prompt": "Once upon a time", "raw": True, "max_tokens": 1500}


@pytest.fixture(scope="module", params=["direct", "iroh"])
def cluster(smollm2_gguf: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """SmolLM2 over two stages, one cluster for all tests over the same link."""
    settings = replace(Settings.from_env(), model=str(smollm2_gguf), num_stages=2, wire="f32")
    plan = make_plan(open_model(smollm2_gguf, settings.cache), settings)
    with LocalCluster(settings, plan, Options(link=request.param)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def producer(cluster: LocalCluster) -> Iterator[Celery]:
    with stock_app(cluster.settings.broker, cluster.keys.prefix) as app:
        yield app


def test_any_producer_gets_an_answer(producer: Celery) -> None:
    result = send(producer, prompt="What is the capital of France?", max_tokens=20).get(timeout=20)
    assert "Paris" in result["text"]
    assert result["finish_reason"] in ("stop", "length")
    assert len(result["token_ids"]) <= 20


def test_requests_at_once_get_what_each_gets_alone(producer: Celery) -> None:
    prompts = [f"Tell me about the number {i}." for i in range(6)]
    together = [r.get(timeout=60)["token_ids"] for r in [send(producer, prompt=p, max_tokens=12) for p in prompts]]
    alone = [send(producer, prompt=p, max_tokens=12).get(timeout=20)["token_ids"] for p in prompts]
    assert together == alone


def test_a_revoke_stops_a_request_within_moments(producer: Celery, wait_until: WaitUntil) -> None:
    result = send(producer, **LONG)
    wait_until(lambda: result.state == "STARTED", what="the request has started")
    result.revoke()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)
    assert send(producer, prompt="Say hello", max_tokens=3).get(timeout=10)["token_ids"]


def test_a_request_that_waits_can_be_revoked(producer: Celery, cluster: LocalCluster, wait_until: WaitUntil) -> None:
    running = [send(producer, **LONG) for _ in range(cluster.plan.slots)]
    wait_until(lambda: all(r.state == "STARTED" for r in running), what="all slots are taken")
    waiting = send(producer, **LONG)
    waiting.revoke()
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=5)
    assert [r.state for r in running] == ["STARTED"] * len(running)
    for result in running:
        result.revoke()


def test_an_expired_request_is_not_served(producer: Celery) -> None:
    result = producer.send_task("pptasks.generate", kwargs={"prompt": "Say hello"}, queue=stage_queue(0), expires=-1)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "exactly one of"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "temprature": 1}, "temprature"),
        ({"tokens": [1, 49152]}, "49152"),
        ({"tokens": list(range(100)) * 21}, "2048"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "stop": "x"}, "stop"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    ],
)
def test_a_request_that_cannot_be_served_fails_with_its_reason(producer: Celery, kwargs: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        send(producer, **kwargs).get(timeout=10)


def test_ping_is_answered_while_a_request_runs(producer: Celery, cluster: LocalCluster, wait_until: WaitUntil) -> None:
    result = send(producer, **LONG)
    wait_until(lambda: result.state == "STARTED", what="the request has started")
    env = child_environment(replace(cluster.settings, stage=None))
    argv = [sys.executable, "-m", "celery", "-A", "pptasks", "inspect", "ping", "--json"]
    answered = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=True)
    assert result.state == "STARTED"
    result.revoke()
    assert {name.split("@")[0] for name in json.loads(answered.stdout)} == {"pp-stage-0", "pp-stage-1"}


def test_pings_from_one_thread_after_another_are_answered(producer: Celery, cluster: LocalCluster) -> None:
    """Each has a reply queue of its own, and they share a connection: as Flower does."""
    answers = []
    for _ in range(3):
        asking = Thread(target=lambda: answers.append(producer.control.inspect(timeout=2.0).ping()))
        asking.start()
        asking.join()
    assert [len(answer or ()) for answer in answers] == [cluster.plan.n_stages] * 3


@pytest.fixture
def flower(cluster: LocalCluster, wait_until: WaitUntil) -> Iterator[str]:
    """A real Flower on the run, as `celery -A pptasks flower` starts it; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = child_environment(replace(cluster.settings, stage=None)) | {"FLOWER_UNAUTHENTICATED_API": "true"}
    argv = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "pptasks",
        "flower",
        "--address=127.0.0.1",
        f"--port={port}",
        "--max-tasks=1000",
    ]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _status(f"{url}/healthcheck") == 200, timeout=20, what="Flower is up")
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _status(url: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).status_code
    return 0


def test_flower_sees_workers_and_requests_and_no_tokens(flower: str, producer: Celery, wait_until: WaitUntil) -> None:
    def workers() -> set[str]:
        return {
            name.split("@")[0]
            for name in httpx.get(f"{flower}/api/workers", params={"refresh": "1"}, timeout=20).json()
        }

    wait_until(lambda: workers() == {"pp-stage-0", "pp-stage-1"}, timeout=20, what="Flower sees the workers")
    request = send(producer, prompt="Say hello", max_tokens=10)
    request.get(timeout=20)

    def task() -> dict:
        return httpx.get(f"{flower}/api/tasks", timeout=20).json().get(request.id, {})

    wait_until(lambda: task().get("state") == "SUCCESS", timeout=10, what="Flower has seen the request succeed")
    assert task()["name"] == "pptasks.generate"
    assert all(task()[at] for at in ("received", "started", "succeeded"))
    assert {t["name"] for t in httpx.get(f"{flower}/api/tasks", timeout=20).json().values()} == {"pptasks.generate"}


# ---- what strangers write ----


def frame_for(cluster: LocalCluster, kind: Kind = Kind.ACTIVATION, step: int = 1, plan: bytes | None = None) -> Frame:
    lane = Lane(short_id("nobody"), 0, 0, 0, 1, 1, Sampling())
    payload = np.zeros((1, 576), DTYPES["f32"]) if kind is not Kind.TOKENS else np.zeros((1, 1), DTYPES["i32"])
    return Frame(kind, plan or cluster.plan.digest, short_id(cluster.settings.run), step, 0, (lane,), payload)


def bad_messages(cluster: LocalCluster) -> dict[str, bytes]:
    secret = cluster.settings.secret_bytes
    good = encode(frame_for(cluster), secret)
    flipped = bytearray(good)
    flipped[200] ^= 1
    return {
        "a flipped byte": bytes(flipped),
        "cut short": good[:-5],
        "longer than it says": good + b"x",
        "an unknown version": good[:4] + bytes([VERSION + 1]) + good[5:],
        "another plan's digest": encode(frame_for(cluster, plan=b"p" * 16), secret),
        "another run's secret": encode(frame_for(cluster), b"x" * 32),
        "tokens for a stage that is no head": encode(frame_for(cluster, Kind.TOKENS), secret),
        "only the magic": b"PPTF",
        "random bytes": os.urandom(300),
        "broken JSON": b'{"body": ',
        "JSON that is no envelope": b'{"a": 1}',
        "an envelope of another task": json.dumps(envelope("somebody.elses.task")).encode(),
        "an envelope whose body is no base64": json.dumps(envelope("pptasks.generate") | {"body": "%%%"}).encode(),
        "a request whose id is no text": json.dumps(with_id(5)).encode(),
        "a request whose id is half a surrogate": json.dumps(with_id("\ud800")).encode(),
        "a hop inside an envelope": json.dumps(envelope("pptasks.hop")).encode(),
    }


def with_id(task_id: object) -> dict:
    message = envelope("pptasks.generate")
    return message | {"headers": message["headers"] | {"id": task_id, "root_id": task_id}}


def envelope(task: str) -> dict:
    return {
        "body": "W1tdLCB7fSwge31d",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": "1", "root_id": "1", "parent_id": None, "group": None},
        "properties": {
            "correlation_id": "1",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "stage1"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "t",
        },
    }


@pytest.mark.parametrize("stage", [0, 1])
def test_malformed_messages_are_dropped_and_the_pipeline_goes_on(
    cluster: LocalCluster, producer: Celery, stage: int, wait_until: WaitUntil
) -> None:
    before = [worker.pid for worker in cluster.workers]
    alone = send(producer, prompt="Say hello", max_tokens=8).get(timeout=20)["token_ids"]
    queue = f"{cluster.keys.prefix}{stage_queue(stage)}"
    with redis.Redis.from_url(cluster.settings.broker) as client:
        for name, message in bad_messages(cluster).items():
            client.lpush(queue, message)
            wait_until(lambda: client.llen(queue) == 0, what=f"the worker took {name}")
            assert send(producer, prompt="Say hello", max_tokens=8).get(timeout=20)["token_ids"] == alone, name
    cluster.check()
    assert [worker.pid for worker in cluster.workers] == before


# ---- workers started by hand, as on other machines ----


@pytest.fixture
def hand_settings(redis_url: str, goldens: Path) -> Settings:
    return replace(
        Settings.from_env(),
        model=str(goldens / "llama-tied"),
        num_stages=2,
        wire="f32",
        broker=redis_url,
        run="by-hand",
        secret="ab" * 32,
        lap_deadline_s=0.3,
        prefill_chunk=4,
    )


def test_a_request_waits_until_every_stage_is_ready(
    hand_settings: Settings, goldens: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    golden = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    with stock_app(hand_settings.broker, "pp:by-hand:") as app, redis.Redis.from_url(hand_settings.broker) as client:
        result = send(app, tokens=golden["prompt_ids"], max_tokens=6)
        with by_hand(0, hand_settings, tmp_path / "0"):
            wait_until(lambda: client.exists("pp:by-hand:name:pp-entry"), timeout=30, what="stage 0 is ready")
            with by_hand(1, hand_settings, tmp_path / "1"):
                assert result.get(timeout=30)["token_ids"] == golden["greedy_ids"][:6]


def test_a_request_beyond_those_that_may_wait_is_refused_at_once(
    hand_settings: Settings, goldens: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The others wait for the stage that is missing, and are served when it is there."""
    golden = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    request = {"tokens": golden["prompt_ids"], "max_tokens": 2}
    settings = replace(hand_settings, max_waiting=2)
    with stock_app(settings.broker, "pp:by-hand:") as app, by_hand(0, settings, tmp_path / "0"):
        waiting = [send(app, **request) for _ in range(2)]
        with pytest.raises(Busy, match="2 requests are waiting already: send it again later"):
            send(app, **request).get(timeout=30)
        with by_hand(1, settings, tmp_path / "1"):
            assert [r.get(timeout=30)["token_ids"] for r in waiting] == [golden["greedy_ids"][:2]] * 2
            assert send(app, **request).get(timeout=10)["token_ids"] == golden["greedy_ids"][:2]


def test_a_second_worker_of_a_stage_is_refused(hand_settings: Settings, tmp_path: Path, wait_until: WaitUntil) -> None:
    with redis.Redis.from_url(hand_settings.broker) as client, by_hand(1, hand_settings, tmp_path / "first") as first:
        wait_until(lambda: client.exists("pp:by-hand:name:pp-exit"), timeout=30, what="stage 1 is ready")
        with by_hand(1, hand_settings, tmp_path / "second") as second:
            assert second.wait(20) == 1
        assert f"is served by pp-stage-1@{socket.gethostname()} (pid {first.pid}" in (tmp_path / "second").read_text()
        assert first.poll() is None
        assert client.exists("pp:by-hand:lock:1")


# ---- the network between the stages ----


class Stage1:
    """A worker of stage 1 that a test plays itself: the real computation, with a say in what becomes of each frame."""

    def __init__(self, settings: Settings):
        self.settings, model = settings, open_model(settings.model, settings.cache)
        plan = make_plan(model, settings)
        self._stage = Stage(plan, 1, short_id(settings.run), load(model, plan, 1))
        self._client = redis.Redis.from_url(settings.broker)
        self._prefix = f"pp:{settings.run}:"
        self.n_frames = 0

    def serve(self, result: AsyncResult, copies_in: dict[int, int], copies_out: dict[int, int]) -> None:
        """Until `result` is there, for 30 s at most. The nth frame is taken `copies_in[n]` times, its answer sent
        `copies_out[n]` times, else once."""
        self.n_frames, deadline = 0, time.monotonic() + 30
        while not result.ready():
            if time.monotonic() > deadline:
                pytest.fail(f"no result within 30 s, after {self.n_frames} frames")
            popped = self._client.brpop(f"{self._prefix}stage1", timeout=0.2)
            if popped is None:
                continue
            self.n_frames += 1
            for _ in range(copies_in.get(self.n_frames, 1)):
                for frame in self._stage.step(decode(popped[1], self.settings.secret_bytes)):
                    for _ in range(copies_out.get(self.n_frames, 1)):
                        self._client.lpush(f"{self._prefix}stage0", encode(frame, self.settings.secret_bytes))


@pytest.fixture
def head_alone(hand_settings: Settings, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Celery]:
    """A real worker of stage 0; stage 1 is the test's."""
    settings = hand_settings
    with (
        by_hand(0, settings, tmp_path / "log"),
        redis.Redis.from_url(settings.broker) as client,
        Membership(
            settings.broker, Keys(settings.run), 1, 2, node="test", watch_lease=False, on_gone=pytest.fail
        ) as membership,
    ):
        plan = make_plan(open_model(settings.model, settings.cache), settings)
        membership.update(
            state="ready",
            digest=plan.digest.hex(),
            span=(3, 6),
            slots=plan.slots,
            key_id=key_id(settings.secret_bytes),
            probe=expected(),
        )
        wait_until(lambda: client.exists("pp:by-hand:name:pp-entry"), timeout=30, what="stage 0 is ready")
        with stock_app(settings.broker, "pp:by-hand:") as app:
            yield app


@pytest.mark.parametrize(
    "fault", ["lost on the way", "lost on the way back", "doubled on the way", "doubled on the way back"]
)
def test_a_real_head_survives_each_frame_lost_or_doubled_once(
    head_alone: Celery, hand_settings: Settings, goldens: Path, fault: str
) -> None:
    golden = json.loads((goldens / "llama-tied" / "expected.json").read_text())
    stage1 = Stage1(hand_settings)
    copies = 0 if fault.startswith("lost") else 2
    request = {"tokens": golden["prompt_ids"], "max_tokens": 6}
    began = time.monotonic()
    for nth in range(1, 9):  # three frames of prefill, five of decode
        result = send(head_alone, **request)
        faults = {nth: copies}
        stage1.serve(result, *((faults, {}) if fault.endswith("way") else ({}, faults)))
        assert result.get(timeout=10)["token_ids"] == golden["greedy_ids"][:6], f"frame {nth}"
        assert stage1.n_frames >= 8
    assert time.monotonic() - began < 30
