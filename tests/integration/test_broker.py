"""The embedded broker and the checks on a given one, with real servers."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from orchestrator.acl import User, create_user, drop_users
from orchestrator.broker import EmbeddedBroker, check_broker, purge, sweep
from pptasks.errors import BrokerError
from pptasks.keys import Keys

PARENT = """
import os, sys, time
from orchestrator.broker import EmbeddedBroker
with EmbeddedBroker() as broker:
    print(broker.pid, flush=True)
    time.sleep(60)
"""


def consume(answers: Iterable[object]) -> None:
    for _ in answers:
        pass


def _password(broker: EmbeddedBroker) -> str:
    return broker.url.split(":")[2].split("@")[0]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_serves_with_a_password_on_loopback_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedBroker() as broker:
        client = redis.Redis.from_url(broker.url)
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=broker.port).ping()
        assert broker.pid is not None
        process = psutil.Process(broker.pid)
        assert {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert _password(broker) not in " ".join(process.cmdline()) + " ".join(process.environ().values())
        assert _password(broker) not in repr(broker)
    assert not process.is_running()
    assert list(tmp_path.iterdir()) == []
    assert not broker.is_running


def test_its_memory_is_bounded(broker: EmbeddedBroker) -> None:
    with redis.Redis.from_url(broker.url) as client:
        bounds = client.config_get("maxmemory", "maxmemory-clients", "client-query-buffer-limit")
        assert bounds == {
            "maxmemory": str(2 << 30), "maxmemory-clients": str(1 << 30), "client-query-buffer-limit": str(128 << 20),
        }  # fmt: skip


def test_who_leaves_its_answers_unread_is_cut_off(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, redis.Redis.from_url(redis_url, socket_timeout=5) as greedy:
        client.set("x", b"x" * (16 << 20))  # one frame
        held = greedy.connection_pool.get_connection()
        for _ in range(20):
            held.send_command("GET", "x")
        with pytest.raises(redis.ConnectionError):
            consume(held.read_response() for _ in range(20))
        held.disconnect()
        assert client.get("x")


def test_a_restart_keeps_the_url() -> None:
    broker = EmbeddedBroker()
    with broker:
        url = broker.url
    with broker:
        assert broker.url == url
        assert redis.Redis.from_url(url).ping()
    with EmbeddedBroker() as other:
        assert _password(other) != _password(broker)


def test_a_given_port_in_use_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(BrokerError, match=f"port {port} .*in use.*another port"), EmbeddedBroker(port):
        pass


def test_a_server_that_cannot_start_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.broker._CONFIG", "requirepass {password}\nno-such-setting {port}{host}{folder}\n")
    broker = EmbeddedBroker()
    with pytest.raises(BrokerError) as caught, broker:
        pass
    assert "no-such-setting" in str(caught.value)
    assert _password(broker) not in str(caught.value)
    assert not broker.is_running


def test_it_dies_with_its_parent_even_after_sigkill(wait_until) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        what="the broker's end",
    )


def test_ctrl_c_of_the_terminal_is_not_the_brokers(broker: EmbeddedBroker) -> None:
    assert broker.pid is not None
    assert os.getpgid(broker.pid) != os.getpgid(0)


def test_check_accepts_a_good_broker(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    check_broker(redis_url)
    assert caplog.records == []


def test_check_refuses_a_wrong_password(broker: EmbeddedBroker) -> None:
    with pytest.raises(BrokerError, match="refuses the password") as caught:
        check_broker(f"redis://:not-it@127.0.0.1:{broker.port}/0")
    assert "not-it" not in str(caught.value)
    with pytest.raises(BrokerError, match="refuses the password"):
        check_broker(f"redis://127.0.0.1:{broker.port}/0")


def test_check_names_an_unreachable_broker() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(BrokerError, match=f"127.0.0.1:{port}") as caught:
            check_broker(f"redis://:hush@127.0.0.1:{port}/0")
    assert "hush" not in str(caught.value)


def test_check_gives_up_on_a_silent_port(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.broker.CHECK_TIMEOUT_S", 0.3)
    with pytest.raises(BrokerError, match="did not answer"):
        check_broker(f"redis://:hush@127.0.0.1:{listener.getsockname()[1]}/0")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rediss://:hush@example.org:6380/0", "ssl_cert_reqs=required"),
        ("rediss://:hush@example.org:6380/0?ssl_cert_reqs=none&ssl_ca_certs=/ca.pem", "ssl_cert_reqs=required"),
        ("rediss://:hush@example.org:6380/0?ssl_cert_reqs=required", "ssl_ca_certs"),
        ("amqp://user:hush@example.org", "redis://"),
        ("example.org:6379", "redis://"),
        ("redis://:hush@127.0.0.1:port/0", "cannot be read"),
        ("redis://:hush@127.0.0.1:1/0?no_such_option=1", "is wrong"),
    ],
)
def test_check_refuses_urls_that_cannot_be_right(url: str, says: str) -> None:
    with pytest.raises(BrokerError) as caught:
        check_broker(url)
    assert says in str(caught.value)
    assert "hush" not in str(caught.value)


def test_check_warns_of_a_broker_that_evicts(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedBroker() as broker, redis.Redis.from_url(broker.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with caplog.at_level(logging.WARNING):
            check_broker(broker.url)
    assert "allkeys-lru" in caplog.text
    assert _password(broker) not in caplog.text


def test_purge_deletes_the_runs_keys_and_no_others(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.mset({f"pp:a*[b]:{i}": i for i in range(2500)} | {"pp:aXb:0": 1, "pp:a": 1, "other": 1})
        create_user(client, "a*[b]", 0, 1)
        create_user(client, "b", 0, 1)
        assert purge(redis_url, Keys("a*[b]")) == 2500
        assert set(client.keys()) == {b"pp:aXb:0", b"pp:a", b"other"}
        assert set(client.acl_users()) >= {"pp-b-0"}
        assert "pp-a*[b]-0" not in client.acl_users()
        assert drop_users(client, "b") == 1


def test_purge_by_who_may_not_list_users(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL SETUSER", "plain", "on", ">pw", "~*", "+@all", "-acl")
        client.set("pp:a:0", 1)
        assert purge(User("plain", "pw").login(redis_url), Keys("a")) == 1
        client.acl_deluser("plain")


def test_sweep_purges_runs_whose_owner_is_gone_and_nothing_else(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        alive = ["pp:run-alive:owner", "pp:run-alive:lease", "pp:run-alive:stage0"]
        others = ["pp:run-production:stage0", "pp:run-production:celery-task-meta-1", "run-dead", "pp:runs:x"]
        for name in [*alive, *others, "pp:run-dead:owner", "pp:run-dead:stage0", "pp:run-dead:_kombu.binding.stage0"]:
            client.set(name, "1")
        assert sweep(redis_url) == 1
        assert sorted(key.decode() for key in client.scan_iter()) == sorted([*alive, *others])
