"""Workers started by hand and what befalls them: stopped, killed, started wrong; and the requests that they hold."""

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from pptasks.app import make_app
from pptasks.client import Client
from pptasks.config import Settings
from pptasks.errors import RequestError, RequestFailed
from tests.conftest import WaitUntil
from tests.integration.hand import by_hand, send, stock_app

PREFIX = "pp:by-hand:"
LONG = {"prompt": "Once upon a time", "raw": True, "max_tokens": 300}


@pytest.fixture
def settings(redis_url: str, smollm2_gguf: Path) -> Settings:
    """SmolLM2 over two stages with two slots, on a Redis that was given. A lap may take its time."""
    return replace(
        Settings.of_this_machine(),
        model=str(smollm2_gguf),
        num_stages=2,
        wire="f32",
        broker=redis_url,
        run="by-hand",
        secret="ab" * 32,
        slots=2,
        lap_deadline_s=60.0,
    )


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    with stock_app(settings.broker, PREFIX) as app:
        yield app


@pytest.fixture
def client(settings: Settings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.broker) as client:
        yield client


def ready(client: redis.Redis, stage: int) -> bool:
    return bool(client.exists(f"{PREFIX}name:pp-stage-{stage}"))


def tokens_so_far(client: redis.Redis, result: AsyncResult) -> int:
    return int(client.xlen(f"{PREFIX}stream:{result.id}"))


def test_a_stage_that_is_killed_and_started_again_costs_no_token(
    settings: Settings, app: Celery, client: redis.Redis, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with by_hand(0, settings, tmp_path / "0"), by_hand(1, settings, tmp_path / "1") as stage1:
        alone = send(app, **LONG).get(timeout=60)["token_ids"]
        again = send(app, **LONG)
        wait_until(lambda: tokens_so_far(client, again) > 20, timeout=20, what="some tokens")
        stage1.send_signal(signal.SIGKILL)
        stage1.wait(5)
        at = time.monotonic()
        with by_hand(1, settings, tmp_path / "1 again"):
            assert again.get(timeout=50)["token_ids"] == alone
        assert time.monotonic() - at < 40  # its hello is noticed, long before the lap's deadline
        assert "was started again" in (tmp_path / "0").read_text()


def test_a_head_that_is_stopped_tells_all_its_requests(
    settings: Settings, app: Celery, client: redis.Redis, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with by_hand(0, settings, tmp_path / "0") as head, by_hand(1, settings, tmp_path / "1"):
        results = [send(app, **LONG) for _ in range(4)]
        wait_until(lambda: [r.state for r in results].count("STARTED") == 2, timeout=30, what="two of them run")
        head.terminate()
        for result in results:
            with pytest.raises(RequestFailed, match="send it again"):
                result.get(timeout=10)


def test_a_request_that_comes_twice_is_answered_once(settings: Settings, app: Celery, tmp_path: Path) -> None:
    with by_hand(0, settings, tmp_path / "0"), by_hand(1, settings, tmp_path / "1"):
        for _ in range(2):
            result = app.send_task("pptasks.generate", kwargs=LONG, queue="stage0", task_id="twice")
        assert len(result.get(timeout=60)["token_ids"]) == 300
        assert "came twice" in (tmp_path / "0").read_text()


def test_a_request_that_expires_while_it_waits_is_not_served(
    settings: Settings, app: Celery, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with by_hand(0, settings, tmp_path / "0"), by_hand(1, settings, tmp_path / "1"):
        running = [send(app, **LONG) for _ in range(settings.slots)]
        wait_until(lambda: all(r.state == "STARTED" for r in running), timeout=30, what="all slots are taken")
        late = app.send_task("pptasks.generate", kwargs=LONG, queue="stage0", expires=0.5)
        with pytest.raises(TaskRevokedError):
            late.get(timeout=10)
        assert all(len(r.get(timeout=60)["token_ids"]) == 300 for r in running)


def test_another_secret_is_named_before_a_request_goes_out(
    settings: Settings, app: Celery, client: redis.Redis, tmp_path: Path, wait_until: WaitUntil
) -> None:
    stranger = replace(settings, secret="cd" * 32)
    with by_hand(0, settings, tmp_path / "0"), by_hand(1, stranger, tmp_path / "1"):
        wait_until(lambda: ready(client, 0) and ready(client, 1), timeout=30, what="both say that they are ready")
        result = send(app, prompt="Say hello", max_tokens=3)
        wait_until(lambda: "another PP_SECRET" in (tmp_path / "0").read_text(), what="the head names it")
        assert result.state == "PENDING"


@pytest.mark.parametrize("queues", ["stage0", "stage0,stage1", "celery"])
def test_a_worker_of_another_queue_is_refused(settings: Settings, tmp_path: Path, queues: str) -> None:
    with by_hand(1, settings, tmp_path / "log", queues) as worker:
        assert worker.wait(20) == 1
    assert "start it with -Q stage1" in (tmp_path / "log").read_text()


def test_without_a_queue_a_worker_takes_its_own(settings: Settings, app: Celery, tmp_path: Path) -> None:
    with by_hand(0, settings, tmp_path / "0", ""), by_hand(1, settings, tmp_path / "1", ""):
        for _ in range(6):
            assert send(app, prompt="Say hello", max_tokens=3).get(timeout=30)["token_ids"]


def test_a_text_that_no_context_could_hold_is_refused_at_once(settings: Settings, app: Celery, tmp_path: Path) -> None:
    with by_hand(0, settings, tmp_path / "0"), by_hand(1, settings, tmp_path / "1"):
        assert send(app, prompt="Say hello", max_tokens=1).get(timeout=30)
        began = time.monotonic()
        with pytest.raises(RequestError, match="at least"):
            send(app, prompt="a b " * 1_000_000).get(timeout=10)
        assert time.monotonic() - began < 2


def test_a_stream_ends_also_when_celery_drops_the_request(settings: Settings, app: Celery, tmp_path: Path) -> None:
    with by_hand(0, settings, tmp_path / "0"):
        result = app.send_task("pptasks.generate", kwargs=LONG, queue="stage0", expires=-1)
        pieces = Client(make_app(settings)).stream(result.id)
        assert [piece for piece in pieces if piece is not None] == []
