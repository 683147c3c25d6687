"""Hops beside stock Celery messages, over a real Redis and with real worker processes."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue

from orchestrator.broker import EmbeddedBroker
from pptasks.errors import BrokerError, MalformedFrame
from pptasks.sender import HopSender
from pptasks.transport import HOP_CONTENT_TYPE, MAX_ENVELOPE_BYTES, RECEIVE_AHEAD
from pptasks.wire import MAGIC, MAX_FRAME_BYTES
from tests.integration.hop_worker import make_app

ROOT = Path(__file__).parents[2]
FORWARD_TO = "out"

WaitUntil = Callable[..., None]


def frame_of(size: int) -> bytes:
    return MAGIC + os.urandom(size - len(MAGIC))


def key(prefix: str, queue: str) -> str:
    return f"{prefix}{queue}"


@contextmanager
def worker(url: str, prefix: str, queue: str = "stage0", *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that serves `queue` and forwards each frame to the queue FORWARD_TO; ready at the start."""
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tests.integration.hop_worker",
        "worker",
        "-P",
        "solo",
        "-l",
        "error",
    ]
    command += ["-Q", queue, "-n", f"{queue}@{prefix.strip(':')}", "--without-gossip", "--without-mingle", *options]
    environ = {**os.environ, "HOP_BROKER": url, "HOP_PREFIX": prefix, "HOP_FORWARD": FORWARD_TO}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(url) as client:
            client.lpush(key(prefix, queue), frame_of(16))
            assert client.brpop(key(prefix, FORWARD_TO), timeout=30), (
                f"the worker was not ready in 30 s (exit code {process.poll()})"
            )
        yield process
    finally:
        process.terminate()
        process.wait(15)


@pytest.fixture(scope="module")
def prefix() -> str:
    return f"pp:{uuid.uuid4().hex[:8]}:"


@pytest.fixture(scope="module")
def shared_worker(broker: EmbeddedBroker, prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    with worker(broker.url, prefix) as process:
        yield process


@pytest.fixture
def app(broker: EmbeddedBroker, prefix: str) -> Iterator[Celery]:
    app = make_app(broker.url, prefix)
    yield app
    app.close()


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker.url) as client:
        yield client


def arrived(client: redis.Redis, prefix: str) -> bytes | None:
    """The next frame that the worker forwarded."""
    reply = client.brpop(key(prefix, FORWARD_TO), timeout=4)
    return reply[1] if reply else None


@pytest.mark.usefixtures("shared_worker")
class TestFrames:
    @pytest.mark.parametrize("size", [4, 8 << 10, (1 << 20) + 1, 8 << 20])
    def test_pass_bit_exact(self, app: Celery, client: redis.Redis, prefix: str, size: int) -> None:
        frame = frame_of(size)
        with HopSender(app) as sender:
            sender.send("stage0", frame)
            assert arrived(client, prefix) == frame

    def test_keep_their_order(self, app: Celery, client: redis.Redis, prefix: str) -> None:
        frames = [frame_of(1000) for _ in range(50)]
        with HopSender(app) as sender:
            for frame in frames:
                sender.send("stage0", frame)
            assert [arrived(client, prefix) for _ in frames] == frames

    def test_pass_through_an_ordinary_producer_too(self, app: Celery, client: redis.Redis, prefix: str) -> None:
        frame = frame_of(5000)
        with app.producer_pool.acquire() as producer:
            producer.publish(
                frame, routing_key="stage0", content_type=HOP_CONTENT_TYPE, content_encoding="binary", retry=False
            )
        assert arrived(client, prefix) == frame

    def test_lie_bare_on_the_queue(self, app: Celery, client: redis.Redis, prefix: str, wait_until: WaitUntil) -> None:
        frame = frame_of(64)
        with HopSender(app) as sender:
            sender.send("nobody", frame)
            wait_until(lambda: client.lrange(key(prefix, "nobody"), 0, -1) == [frame])
        client.delete(key(prefix, "nobody"))

    @pytest.mark.parametrize(
        "bad", [b"", b"PPT", b"{}", frame_of(MAX_FRAME_BYTES + 1)], ids=["empty", "short", "json", "too large"]
    )
    def test_that_no_receiver_would_take_are_not_sent(self, app: Celery, bad: bytes) -> None:
        with HopSender(app) as sender, pytest.raises(MalformedFrame):
            sender.send("stage0", bad)


def kill_sender(client: redis.Redis) -> None:
    """Cut the connection whose last command was a frame's LPUSH, as a broken line would."""
    (sender,) = [c for c in client.client_list() if c["cmd"] == "lpush"]
    client.client_kill_filter(_id=sender["id"])


@pytest.fixture
def own_url() -> Iterator[str]:
    """A broker that no other client talks to."""
    with EmbeddedBroker() as broker:
        yield broker.url


class TestSender:
    def test_sends_again_when_its_connection_breaks(self, own_url: str) -> None:
        with redis.Redis.from_url(own_url) as client, HopSender(make_app(own_url, "pp:s:")) as sender:
            frames = [frame_of(100) for _ in range(3)]
            sender.send("sink", frames[0])
            assert client.blpop("pp:s:sink", timeout=4) == (b"pp:s:sink", frames[0])
            sender.drain()  # confirmed: not sent again
            kill_sender(client)
            sender.send("sink", frames[1])
            sender.send("sink", frames[2])
            got = {client.brpop("pp:s:sink", timeout=4)[1] for _ in frames[1:]}
            assert got == set(frames[1:])

    def test_sends_again_what_got_lost_on_the_way(self, own_url: str, wait_until: WaitUntil) -> None:
        with redis.Redis.from_url(own_url) as client, HopSender(make_app(own_url, "pp:s:")) as sender:
            frame = frame_of(100)
            sender.send("first", frame)
            client.blpop("pp:s:first", timeout=4)
            client.client_pause(10_000, all=False)  # the broker has the frame and does not execute it
            sender.send("sink", frame)
            kill_sender(client)
            client.client_unpause()
            assert client.llen("pp:s:sink") == 0
            wait_until(lambda: sender.drain() or client.llen("pp:s:sink") == 1, what="the second copy")

    def test_reports_a_refusal_on_the_next_send(
        self, own_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
    ) -> None:
        with redis.Redis.from_url(own_url) as client, HopSender(make_app(own_url, "pp:s:")) as sender:

            def refused() -> bool:
                try:
                    sender.drain()
                except BrokerError as error:
                    return "memory" in str(error)
                return False

            client.config_set("maxmemory", "1mb")
            sender.send("sink", frame_of(2 << 20))
            wait_until(refused, what="the refusal")
            assert "refused a frame" in caplog.text
            client.config_set("maxmemory", "0")
            sender.send("sink", frame_of(100))
            assert client.brpop("pp:s:sink", timeout=4)

    def test_names_a_broker_that_is_not_there(self) -> None:
        with EmbeddedBroker() as gone:
            url = gone.url
        with pytest.raises(BrokerError, match=f"127.0.0.1:{gone.port}") as caught:
            HopSender(make_app(url))
        assert url.split(":")[2].split("@")[0] not in str(caught.value)

    def test_names_a_wrong_password_and_does_not_show_it(self, broker: EmbeddedBroker) -> None:
        with pytest.raises(BrokerError, match=f"127.0.0.1:{broker.port}") as caught:
            HopSender(make_app(f"redis://:not-it@127.0.0.1:{broker.port}/0"))
        assert "not-it" not in str(caught.value)


def envelope(**changes: Any) -> dict[str, Any]:
    """A message for test.add(1, 2) as kombu writes it, with some of its parts changed."""
    body = base64.b64encode(json.dumps([[1, 2], {}, {}]).encode()).decode()
    task_id = str(uuid.uuid4())
    headers = {
        "lang": "py",
        "task": "test.add",
        "id": task_id,
        "root_id": task_id,
        "retries": 0,
        "timelimit": [None, None],
    }
    headers |= {
        "eta": None,
        "expires": None,
        "parent_id": None,
        "group": None,
        "origin": "test",
        "ignore_result": True,
        "shadow": None,
    }
    message = {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": task_id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "stage0"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    return message | changes


def with_header(name: str, value: Any) -> dict[str, Any]:
    message = envelope()
    message["headers"][name] = value
    return message


def with_property(name: str, value: Any) -> dict[str, Any]:
    message = envelope()
    message["properties"][name] = value
    return message


# What the transport itself drops and counts.
MALFORMED: dict[str, bytes] = {
    "random": b"\x00\xff\x17" + os.urandom(40),
    "empty": b"",
    "a frame of another version of the magic": b"PPTG" + bytes(100),
    "too large a frame": frame_of(MAX_FRAME_BYTES + 1),
    "too large an envelope": b"{" + b" " * MAX_ENVELOPE_BYTES,
    "broken JSON": b'{"body": "',
    "broken UTF-8": b'{"body": "\xff\xfe"}',
    "an array": b"[1, 2]",
    "no envelope": b'{"a": 1}',
    "deep nesting": b'{"a": ' + b"[" * 100_000,
    "a type that kombu cannot decode": b'{"__type__": "datetime", "__value__": "soon"}',
    "no properties": json.dumps(envelope(properties=None)).encode(),
    "headers that are a number": json.dumps(envelope(headers=7)).encode(),
    "a delivery tag that is a list": json.dumps(with_property("delivery_tag", [])).encode(),
    "a compressed body": json.dumps(with_header("compression", "application/x-gzip")).encode(),
    "a body that is no base64": json.dumps(envelope(body="%%%=")).encode(),
    "a body of another kind": json.dumps(envelope(body={"a": 1})).encode(),
    "an unknown body encoding": json.dumps(with_property("body_encoding", "rot13")).encode(),
    "a task name that is a list": json.dumps(with_header("task", [])).encode(),
}

# What Celery rejects by itself, more or less gracefully; here only the worker's survival counts.
STRANGE_VALUES: tuple[Any, ...] = (None, 7, -1.5, "x", [], [1], {}, {"a": []}, "1970-01-01T00:00:00", "é" * 300)
REJECTED: list[dict[str, Any]] = [
    with_header("task", "no.such.task"),
    envelope(**{"content-type": "application/x-python-serialize"}),
    envelope(**{"content-type": "application/x-unknown"}),
    envelope(**{"content-type": HOP_CONTENT_TYPE}),
    envelope(**{"content-encoding": "no-such-charset"}),
    envelope(body=base64.b64encode(b"not json").decode()),
    envelope(body=base64.b64encode(b"[1]").decode()),
    envelope(body=None),
    envelope(headers={}),
    *(with_header(name, value) for name in envelope()["headers"] for value in STRANGE_VALUES),
    *(with_property(name, value) for name in envelope()["properties"] for value in STRANGE_VALUES),
    *(envelope(**{name: value}) for name in envelope() for value in STRANGE_VALUES),
]


class TestMalformed:
    @pytest.mark.parametrize("kind", MALFORMED)
    def test_is_counted_and_dropped(
        self, kind: str, app: Celery, client: redis.Redis, prefix: str, shared_worker: subprocess.Popen[bytes]
    ) -> None:
        count = app.tasks["test.dropped"]
        before = count.apply_async(queue="stage0").get(timeout=10)
        client.lpush(key(prefix, "stage0"), MALFORMED[kind])
        assert count.apply_async(queue="stage0").get(timeout=10) == before + 1
        assert shared_worker.poll() is None

    def test_stock_messages_of_every_kind_leave_the_worker_alive(
        self, app: Celery, client: redis.Redis, prefix: str, shared_worker: subprocess.Popen[bytes]
    ) -> None:
        """More of them than the prefetch limit: one whose slot is not given back would stall the worker."""
        for message in REJECTED:
            client.lpush(key(prefix, "stage0"), json.dumps(message))
        assert app.tasks["test.add"].apply_async((20, 22), queue="stage0").get(timeout=30) == 42
        frame = frame_of(100)
        client.lpush(key(prefix, "stage0"), frame)
        assert arrived(client, prefix) == frame
        assert shared_worker.poll() is None

    def test_broadcasts_leave_the_worker_alive(
        self,
        app: Celery,
        client: redis.Redis,
        prefix: str,
        shared_worker: subprocess.Popen[bytes],
        wait_until: WaitUntil,
    ) -> None:
        channel = f"{prefix}/0.celery.pidbox"
        for kind in MALFORMED.keys() - {"too large a frame", "too large an envelope"}:
            # Celery subscribes anew after a command that it cannot read, so nobody may be listening for a moment.
            wait_until(
                lambda kind=kind: client.publish(channel, MALFORMED[kind]) == 1, what="the worker's subscription"
            )
        wait_until(lambda: app.control.ping(timeout=1), what="an answer to ping")
        assert shared_worker.poll() is None


class TestBesideFrames:
    def test_stock_celery_works(self, own_url: str, wait_until: WaitUntil) -> None:
        """Tasks, results, inspect, events and shutdown, while frames pass."""
        prefix, events = "pp:b:", list[str]()
        app = make_app(own_url, prefix)
        with (
            redis.Redis.from_url(own_url) as client,
            worker(own_url, prefix, "stage0", "-E", "--heartbeat-interval", "1") as process,
            HopSender(app) as sender,
        ):
            receiver = app.events.Receiver(
                app.connection_for_read(), handlers={"*": lambda event: events.append(event["type"])}
            )
            listener = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
            listener.start()
            try:
                wait_until(lambda: "worker-heartbeat" in events, what="a heartbeat event")
                frames = [frame_of(2000) for _ in range(20)]
                results = []
                for i, frame in enumerate(frames):
                    sender.send("stage0", frame)
                    results.append(app.send_task("test.add", (i, 1), queue="stage0"))
                assert [r.get(timeout=30) for r in results] == list(range(1, 21))
                assert [arrived(client, prefix) for _ in frames] == frames
                assert app.control.inspect(timeout=2).ping() == {"stage0@pp:b": {"ok": "pong"}}
                wait_until(lambda: events.count("task-succeeded") == 20, what="twenty events of tasks")
                app.control.shutdown()
                assert process.wait(15) == 0
                wait_until(lambda: "worker-offline" in events, what="the event of the worker's end")
                names = {k.decode() for k in client.scan_iter()} | {c.decode() for c in client.pubsub_channels()}
                assert {n for n in names if not n.startswith(prefix)} == set()
            finally:
                receiver.should_stop = True
                listener.join(10)
        app.close()


class TestPrefix:
    def test_two_runs_on_one_redis_do_not_meet(self, redis_url: str) -> None:
        with redis.Redis.from_url(redis_url) as client:
            client.mset({"stage0": "theirs", "celery": "theirs", "_kombu.binding.celery": "theirs"})
            theirs = dict.fromkeys(("stage0", "celery", "_kombu.binding.celery"), b"theirs")
            with worker(redis_url, "pp:a:"), worker(redis_url, "pp:b:"):
                for prefix, other in (("pp:a:", "pp:b:"), ("pp:b:", "pp:a:")):
                    app, frame = make_app(redis_url, prefix), frame_of(500)
                    with HopSender(app) as sender:
                        sender.send("stage0", frame)
                        assert arrived(client, prefix) == frame
                    assert client.llen(key(other, FORWARD_TO)) == 0
                    assert app.send_task("test.add", (1, 2), queue="stage0").get(timeout=10) == 3
                    assert list(app.control.inspect(timeout=1).ping()) == [f"stage0@{prefix.strip(':')}"]
                    app.close()
                names = {k.decode() for k in client.scan_iter()} | {c.decode() for c in client.pubsub_channels()}
                assert {n for n in names if not n.startswith(("pp:a:", "pp:b:"))} == set(theirs)
                assert {k: client.get(k) for k in theirs} == theirs


def _fails(sender: HopSender, frame: bytes) -> bool:
    try:
        sender.send("stage0", frame)
    except BrokerError:
        return True
    return False


class TestRestart:
    def test_frames_arrive_again_after_the_broker_was_restarted(self, wait_until: WaitUntil) -> None:
        broker, prefix, frame = EmbeddedBroker(), "pp:r:", frame_of(3000)
        with ExitStack() as stack:
            with broker:
                app = make_app(broker.url, prefix)
                sender = stack.enter_context(HopSender(app))
                process = stack.enter_context(worker(broker.url, prefix))
            wait_until(lambda: _fails(sender, frame), what="the error of a broker that is gone")
            with broker, redis.Redis.from_url(broker.url) as client:

                def passes() -> bool:
                    sender.send("stage0", frame)
                    reply = client.brpop(key(prefix, FORWARD_TO), timeout=1)
                    return reply is not None and reply[1] == frame

                wait_until(passes, timeout=30, what="the way through the worker")
                assert app.send_task("test.add", (1, 2), queue="stage0").get(timeout=10) == 3
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert process.wait(15) == 0
            app.close()


class OneWay:
    """A TCP proxy to the broker that, once `shut`, hands on only what the broker says."""

    def __init__(self, port: int):
        self.is_shut = threading.Event()
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._copy, args=(near, far, self.is_shut), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, threading.Event()), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, to: socket.socket, is_shut: threading.Event) -> None:
        with suppress(OSError), source, to:
            while data := source.recv(1 << 16):
                if not is_shut.is_set():
                    to.sendall(data)

    def close(self) -> None:
        self._server.close()


def test_messages_are_asked_for_ahead_so_that_a_far_broker_gives_several_in_one_round_trip(
    broker: EmbeddedBroker, client: redis.Redis
) -> None:
    prefix, got = f"pp:{uuid.uuid4().hex[:8]}:", list[bytes]()
    with closing(OneWay(urlsplit(broker.url).port or 0)) as proxy:
        url = broker.url.replace(f":{proxy._target}", f":{proxy.port}")
        with make_app(url, prefix).connection_for_read() as connection:
            connection.transport.on_frame = got.append
            with connection.Consumer([Queue("stage0", Exchange("stage0"))], callbacks=[lambda *_: None]):
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.5)
                proxy.is_shut.set()  # nothing more is asked for
                frames = [frame_of(100) for _ in range(RECEIVE_AHEAD + 1)]
                client.lpush(key(prefix, "stage0"), *frames)
                with suppress(TimeoutError):
                    while True:
                        connection.drain_events(timeout=1.0)
    assert got == frames[:RECEIVE_AHEAD]
    client.delete(key(prefix, "stage0"))
