"""The link as it is used: two processes, a real iroh connection on loopback, a real Redis behind it."""

import asyncio
import contextlib
import json
import os
import re
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import iroh
import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.broker import EmbeddedBroker
from pptasks.link import ALPN
from pptasks.peers import LinkSettings, new_key, write_allow

ROOT = Path(__file__).parents[2]
READY_S = 15.0  # the longest that an end may take to come up or to give up


class End:
    """One end of a link as a process; what it says is kept."""

    def __init__(self, role: str, settings: LinkSettings, folder: Path, files: int | None = None):
        self.settings = settings
        self.errors = folder / f"{role}-{secrets.token_hex(4)}.err"
        limit = ["prlimit", f"--nofile={files}:{files}"] if files else []
        with open(self.errors, "wb") as stderr:
            self.process = subprocess.Popen(
                [*limit, sys.executable, "-m", "pptasks.link", role],
                cwd=ROOT,
                env={**os.environ, **settings.to_environ()},
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def ready(self) -> dict[str, Any]:
        if self.process.stdout is None or not select.select([self.process.stdout], [], [], READY_S)[0]:
            pytest.fail(f"not ready within {READY_S} s: {self.said()}")
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else pytest.fail(f"ended before it was ready: {self.said()}")

    def said(self) -> str:
        return self.errors.read_text()

    def gives_up(self) -> str:
        """What it wrote on its way to exit code 1, secrets excluded."""
        output, _ = self.process.communicate(timeout=READY_S)
        said = self.said()
        assert (self.process.returncode, output) == (1, b""), said
        assert self.settings.key not in said
        assert self.settings.secret not in said
        assert "Traceback" not in said
        return said

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=5)


class Ends:
    """Starts ends for one test (or one module) and leaves none behind."""

    def __init__(self, folder: Path, target_port: int):
        self.folder, self.allow, self.started = folder, folder / "allow", list[End]()
        self.files: int | None = None  # that a server may open
        key, self.server_id = new_key()
        self.serving = LinkSettings(
            key, secret=secrets.token_hex(32), target=f"127.0.0.1:{target_port}", allow=str(self.allow)
        )

    def start(self, role: str, settings: LinkSettings) -> End:
        self.started.append(End(role, settings, self.folder, self.files if role == "serve" else None))
        return self.started[-1]

    def serve(self) -> tuple[End, str]:
        """A server that comes back to the same address when it is started again, and its ticket."""
        if not self.serving.bind:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind(("127.0.0.1", 0))
                self.serving = replace(self.serving, bind=f"127.0.0.1:{probe.getsockname()[1]}")
        end = self.start("serve", self.serving)
        up = end.ready()
        assert up["id"] == self.server_id
        return end, up["ticket"]

    def connecting(self, ticket: str) -> tuple[LinkSettings, str]:
        key, peer = new_key()
        return LinkSettings(key, secret=self.serving.secret, ticket=ticket), peer

    def pair(self) -> "Pair":
        write_allow(self.allow, [])
        server, ticket = self.serve()
        settings, peer = self.connecting(ticket)
        write_allow(self.allow, [peer])
        client = self.start("connect", settings)
        up = client.ready()
        assert up["id"] == peer
        return Pair(server, client, up["port"], ticket, peer)

    def close(self) -> None:
        for end in self.started:
            end.process.kill()
            end.process.wait()
            if end.process.stdout:
                end.process.stdout.close()


@dataclass(frozen=True)
class Pair:
    server: End
    client: End
    port: int
    ticket: str
    peer: str


@pytest.fixture
def ends(tmp_path: Path, broker: EmbeddedBroker) -> Iterator[Ends]:
    ends = Ends(tmp_path, broker.port)
    yield ends
    ends.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker) -> Iterator[Pair]:
    """One link for the tests that do it no harm."""
    ends = Ends(tmp_path_factory.mktemp("link"), broker.port)
    yield ends.pair()
    ends.close()


def client_at(port: int, broker: EmbeddedBroker) -> redis.Redis:
    url = broker.url.replace(f":{broker.port}/", f":{port}/")
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=20, socket_connect_timeout=5)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


# ---- what goes through ----


def test_commands_and_pipelines(shared: Pair, broker: EmbeddedBroker) -> None:
    with client_at(shared.port, broker) as far, client_at(broker.port, broker) as near:
        far.set("link:a", "1")
        assert (far.incr("link:a"), near.get("link:a")) == (2, b"2")
        pipe = far.pipeline(transaction=False)
        for i in range(2000):
            pipe.echo(str(i))
        assert pipe.execute() == [str(i).encode() for i in range(2000)]


def test_eight_megabytes_both_ways(shared: Pair, broker: EmbeddedBroker) -> None:
    value = os.urandom(8 << 20)
    with client_at(shared.port, broker) as far, client_at(broker.port, broker) as near:
        far.set("link:big", value)
        assert near.get("link:big") == value
        assert far.get("link:big") == value
        near.delete("link:big")


def test_many_connections_at_once(shared: Pair, broker: EmbeddedBroker) -> None:
    n = 120  # above the 100 streams that QUIC allows by default, where the next one would wait for ever
    together = threading.Barrier(n)

    def use(i: int) -> list[bytes]:
        with client_at(shared.port, broker) as client:
            client.ping()
            together.wait(timeout=20)  # all are connected here
            return [client.echo(f"{i}.{j}") for j in range(5)]

    with ThreadPoolExecutor(n) as pool:
        assert list(pool.map(use, range(n))) == [[f"{i}.{j}".encode() for j in range(5)] for i in range(n)]


def test_a_greedy_peer_does_not_cut_off_the_others(ends: Ends, broker: EmbeddedBroker) -> None:
    ends.files = 120  # fewer than one peer's streams: what all of them may take together is less
    greedy = ends.pair()
    settings, peer = ends.connecting(greedy.ticket)
    write_allow(ends.allow, [greedy.peer, peer])
    honest = ends.start("connect", settings).ready()
    with contextlib.ExitStack() as stack, client_at(honest["port"], broker) as client:
        assert answers(client)
        for _ in range(300):  # as many as it can have: each is a file of the server's
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", greedy.port)))
            opened.sendall(b"PING")
        for _ in range(20):  # the allow-list is read meanwhile
            assert answers(client)
            time.sleep(0.1)
    assert not re.search("nobody is allowed|not read again|Too many", greedy.server.said())


def test_a_server_without_a_free_file_keeps_its_peers_and_hears_of_changes_later(
    ends: Ends, broker: EmbeddedBroker, wait_until: Callable[..., None]
) -> None:
    pair = ends.pair()
    pid, limits = pair.server.process.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    with client_at(pair.port, broker) as client:
        assert client.ping()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        wait_until(lambda: "the allow-list is not read again" in pair.server.said(), 5, "no file can be opened")
        write_allow(ends.allow, [])
        assert client.ping()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: not answers(client), 5, "the list is read again, and the peer is off it")


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends (near, far) of one TCP connection through a link whose target is this test; one byte has passed."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = Ends(tmp_path, listener.getsockname()[1])
        stack.callback(ends.close)
        near = stack.enter_context(socket.create_connection(("127.0.0.1", ends.pair().port), timeout=5))
        near.sendall(b"?")
        listener.settimeout(5)
        far = stack.enter_context(listener.accept()[0])
        far.settimeout(5)
        assert far.recv(1) == b"?"
        yield near, far


def test_a_half_close_is_forwarded(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    near.sendall(b"x" * 100_000)
    near.shutdown(socket.SHUT_WR)
    received = b"".join(iter(lambda: far.recv(65536), b""))  # until the end of that direction
    far.sendall(b"%d" % len(received))  # the other one still works
    far.close()
    assert b"".join(iter(lambda: near.recv(65536), b"")) == b"100000"


@pytest.mark.parametrize("breaks", [0, 1], ids=["near", "far"])
def test_a_reset_arrives_as_a_reset(breaks: int, sockets: tuple[socket.socket, socket.socket]) -> None:
    broken, other = sockets[breaks], sockets[1 - breaks]
    broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    broken.close()
    with pytest.raises(ConnectionResetError):
        other.recv(1)


# ---- who may come in ----


def test_an_id_that_is_not_on_the_list_is_refused(ends: Ends) -> None:
    write_allow(ends.allow, [])
    _, ticket = ends.serve()
    settings, peer = ends.connecting(ticket)
    said = ends.start("connect", settings).gives_up()
    assert "refused: peer not allowed" in said
    assert peer in said


def test_a_wrong_secret_is_refused(ends: Ends) -> None:
    write_allow(ends.allow, [])
    server, ticket = ends.serve()
    settings, peer = ends.connecting(ticket)
    write_allow(ends.allow, [peer])
    said = ends.start("connect", replace(settings, secret=secrets.token_hex(32))).gives_up()
    assert "refused: wrong secret" in said
    assert "refused: wrong secret" in server.said()


def test_a_server_that_does_not_know_the_secret_is_refused(ends: Ends) -> None:
    async def false_server() -> tuple[str, bytes]:
        endpoint = await iroh.Endpoint.bind(
            iroh.EndpointOptions(
                preset=iroh.preset_minimal(),
                relay_mode=iroh.RelayMode.disabled(),
                bind_addr="127.0.0.1:0",
                alpns=[ALPN],
            )
        )
        settings, _ = ends.connecting(str(iroh.EndpointTicket.from_addr(endpoint.addr())))
        end = ends.start("connect", settings)
        incoming = await asyncio.wait_for(endpoint.accept_next(), READY_S)
        assert incoming
        connection = await (await incoming.accept()).connect()
        control = await connection.accept_bi()
        hello = await control.recv().read_exact(64)
        await control.send().write_all(hello[32:])  # the best that it can do: send back what it was given
        said = await asyncio.to_thread(end.gives_up)
        await endpoint.close()
        return said, hello

    said, hello = asyncio.run(asyncio.wait_for(false_server(), 2 * READY_S))
    assert "does not know PP_LINK_SECRET" in said
    assert bytes.fromhex(ends.serving.secret) not in hello


def test_a_server_that_is_not_there_is_reported(ends: Ends) -> None:
    write_allow(ends.allow, [])
    server, ticket = ends.serve()
    server.stop()
    settings, _ = ends.connecting(ticket)
    assert "unreachable" in ends.start("connect", settings).gives_up()


def test_a_peer_is_added_and_cut_off_while_the_server_runs(
    ends: Ends, broker: EmbeddedBroker, wait_until: Callable[..., None]
) -> None:
    first = ends.pair()
    settings, second_id = ends.connecting(first.ticket)
    first_id = ends.allow.read_text().strip()
    write_allow(ends.allow, [first_id, second_id])
    second = ends.start("connect", settings)
    with client_at(first.port, broker) as one, client_at(second.ready()["port"], broker) as two:
        assert one.ping()
        assert two.ping()
        write_allow(ends.allow, [second_id])
        removed = time.monotonic()
        with pytest.raises(redis.ConnectionError):
            one.blpop("link:nothing", timeout=10)
        assert time.monotonic() - removed < 2
        assert two.ping()
        assert not answers(one)
        write_allow(ends.allow, [first_id, second_id])
        wait_until(lambda: answers(one), timeout=10, what="the link of a peer that was added again")
    assert "peer not allowed" in first.client.said()


# ---- what goes wrong ----


def test_a_server_that_restarts_is_found_again(
    ends: Ends, broker: EmbeddedBroker, wait_until: Callable[..., None]
) -> None:
    pair = ends.pair()
    with client_at(pair.port, broker) as client:
        assert client.ping()
        assert pair.server.stop() == 0
        wait_until(lambda: not answers(client), what="an error while the server is away")
        ends.serve()
        wait_until(lambda: answers(client), timeout=15, what="the link to the server that came back")
        assert client.echo("again") == b"again"


def test_the_clients_of_a_killed_server_see_an_error(ends: Ends, broker: EmbeddedBroker) -> None:
    pair = ends.pair()
    with client_at(pair.port, broker) as client:
        client.ping()
        pair.server.stop(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(redis.ConnectionError):
            client.blpop("link:nothing", timeout=15)
        assert time.monotonic() - killed < 8
        with pytest.raises(redis.ConnectionError):  # at once from now on
            client.ping()
        assert time.monotonic() - killed < 8.5


def test_sigterm_leaves_nothing(ends: Ends, broker: EmbeddedBroker) -> None:
    pair = ends.pair()
    with client_at(pair.port, broker) as client:
        client.ping()
        for end in (pair.client, pair.server):
            process = psutil.Process(end.process.pid)
            hidden = {end.settings.key, end.settings.secret, pair.ticket}
            assert not any(secret in " ".join(process.cmdline()) for secret in hidden)
            asked = time.monotonic()
            assert end.stop() == 0
            assert time.monotonic() - asked < 1.5  # its second, and the time that the machine takes to notice
            assert "Traceback" not in end.said()
            assert not any(secret in end.said() for secret in hidden)
        with pytest.raises(redis.ConnectionError):
            client.ping()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", pair.port), timeout=2)
    host, port = ends.serving.bind.split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind((host, int(port)))


def test_an_end_goes_with_its_parent(ends: Ends, wait_until: Callable[..., None]) -> None:
    write_allow(ends.allow, [])
    settings = replace(ends.serving, die_with_parent="1")
    starter = "import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'pptasks.link', 'serve']).wait()"
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        cwd=ROOT,
        env={**os.environ, **settings.to_environ()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout
        assert b"ticket" in parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        try:
            wait_until(lambda: not child.is_running(), timeout=3, what="the end of a link whose parent was killed")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_an_end_whose_parent_is_gone_does_not_start(ends: Ends) -> None:
    write_allow(ends.allow, [])
    stranger = replace(ends.serving, die_with_parent=str(2**22 + 1))  # above every process id of Linux
    assert "the process that started this link is gone" in ends.start("serve", stranger).gives_up()
