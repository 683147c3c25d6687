"""A TCP forward over iroh, so that a worker reaches the broker without any port of the broker being public.

    python -m pptasks.link serve      beside the broker: the streams of accepted peers go to PP_LINK_TARGET
    python -m pptasks.link connect    beside a worker: each connection to 127.0.0.1:port becomes one stream

Each end is a process of its own (in a busy one every hop would wait for that process's interpreter lock), set up by
LinkSettings. It prints one JSON line once it is up, {"ticket", "id"} or {"port", "id"}, and logs to stderr. Exit code:
0 after SIGTERM or SIGINT, 1 for a LinkError, 2 for a ConfigError.

What the ends agree on: the ALPN below, then on the control stream, the first of a connection, opened by `connect`

    connect -> serve    nonce (32 bytes), proof("connect")
    serve -> connect    proof("serve")
    then                one byte every BEAT_S from `connect`, echoed by `serve`; silence for DEAD_S ends the connection

    proof(end) = HMAC-SHA256(secret, end + nonce + id of the server + id of the client)

iroh's TLS proves both ids before the first byte: the ticket names the server's public key, and the server learns the
client's from the same handshake. So nobody in between reads or answers, the secret never travels, and a proof serves
one pair of ids only: a false server, reached through a forged ticket, has another id, and what it collects is void at
the true one. The nonce makes the answer fresh.

Every later stream is one TCP connection, which must speak first on the `connect` side, as a Redis client does. A
half-close is forwarded as such; whatever else ends a stream is a reset, so that a Redis client sees an error at once.
"""

import asyncio
import contextlib
import ctypes
import hmac
import json
import logging
import os
import resource
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import iroh

from pptasks.errors import ConfigError, LinkError, PPError
from pptasks.peers import LinkSettings, proof, read_allow

ALPN = b"pptasks/link/1"
CHUNK = 256 * 1024  # bytes read at once from a socket or a stream
BEAT_S, DEAD_S = 2.0, 6.0
DIAL_S = 10.0  # for TLS and proofs; iroh alone would try a dead address for 30 s
ONLINE_S = 10.0  # within which a relay must answer
CLOSE_S = 0.5  # a polite close waits for the other end, which may be gone
BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 5.0
ALLOW_POLL_S = 0.25
MAX_STREAMS, MAX_PEERS = 128, 256  # streams of one peer, a worker needs a dozen; peers of a server
MAX_FILES = 10_000  # to ask for: macOS grants no more, and a broker has as many clients
MAX_OPEN = 0.75  # share of the files that this process may open: what the streams of all peers may take
MAX_GREETING = 64  # connections of a server whose proof is still awaited
RECEIVE_WINDOW = 128 * 1024 * 1024  # bytes of one peer that may wait here unread
FAILED = 1  # error code of every reset and of every close that is not the process's end
NOT_ALLOWED, BAD_SECRET, FULL = "peer not allowed", "wrong secret", "too many peers"  # sent to the peer on refusal
REMEDY = {
    NOT_ALLOWED: "add id {id} to the other side's allow-list",
    BAD_SECRET: "give both ends the same PP_LINK_SECRET",
    FULL: "the other side must drop one first",
}
GONE = (iroh.IrohError, iroh.InternalError, OSError)  # OSError holds TimeoutError and the broken connections
PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger("pptasks.link")


@contextlib.asynccontextmanager
async def open_endpoint(settings: LinkSettings) -> AsyncIterator[iroh.Endpoint]:
    """The UDP socket of this end. The minimal preset publishes no address anywhere."""
    bind = settings.bind or ("0.0.0.0:0" if settings.relayed else "127.0.0.1:0")
    options = iroh.EndpointOptions(
        preset=iroh.preset_minimal(),
        relay_mode=settings.relay_mode(),
        bind_addr=bind,
        secret_key=bytes.fromhex(settings.key),
        alpns=[ALPN],
    )
    try:
        endpoint = await iroh.Endpoint.bind(options)
    except iroh.IrohError:
        raise LinkError(f"cannot bind UDP {bind}; PP_LINK_BIND must be a free address of this machine") from None
    try:
        yield endpoint
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(endpoint.close(), CLOSE_S)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: iroh.BiStream) -> None:
    """Bytes both ways until both directions have ended; any failure, and being cancelled, resets both sides.

    TCP_NODELAY needs no call: asyncio sets it on every TCP connection.
    """
    clean = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_send(reader, stream.send()))
            group.create_task(_receive(stream.recv(), writer))
        clean = True
    except* GONE as errors:
        log.debug("a stream was reset: %s", type(errors.exceptions[0]).__name__)
    finally:
        if clean:
            writer.close()
        else:
            abort(writer)
            await reset(stream)


async def _send(reader: asyncio.StreamReader, send: iroh.SendStream) -> None:
    while data := await reader.read(CHUNK):
        await send.write_all(data)
    await send.finish()


async def _receive(receive: iroh.RecvStream, writer: asyncio.StreamWriter) -> None:
    while data := await receive.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST. Without a linger of 0 s it is a FIN whenever nothing is unread: a clean end to the other side."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def reset(stream: iroh.BiStream) -> None:
    for give_up in (stream.send().reset, stream.recv().stop):
        with contextlib.suppress(iroh.IrohError):
            await give_up(FAILED)


class Server:
    """Lets in the peers of the allow-list, one connection each, and forwards their streams to the target."""

    def __init__(self, endpoint: iroh.Endpoint, settings: LinkSettings):
        self.endpoint, self.secret, self.id = endpoint, settings.secret, str(endpoint.id())
        self.target, self.allow_file = settings.target_address(), Path(settings.allow)
        self.allowed = read_allow(self.allow_file)
        self.peers: dict[str, iroh.Connection] = {}
        self.greeting = self.open = 0  # connections whose proof is awaited; streams
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_open = int(MAX_OPEN * (MAX_FILES if files == resource.RLIM_INFINITY else min(MAX_FILES, files)))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_allow_list())
            while incoming := await self.endpoint.accept_next():
                if self.greeting >= MAX_GREETING:
                    await incoming.refuse()
                else:
                    group.create_task(self._peer(incoming))

    async def _watch_allow_list(self) -> None:
        while True:
            self._enforce_allow_list()
            await asyncio.sleep(ALLOW_POLL_S)

    def _enforce_allow_list(self) -> None:
        """Read the list again and cut off who is not on it; a list that cannot be read allows nobody. Without a free
        file to read it with, the last one counts: no peer is to cut off the others."""
        try:
            self.allowed = read_allow(self.allow_file)
        except OSError as error:
            log.warning("the allow-list is not read again: %s", error.strerror)
        except LinkError as error:
            if self.allowed:
                log.error("nobody is allowed: %s", error)
            self.allowed = frozenset()
        for peer, connection in self.peers.items():
            if peer not in self.allowed:
                connection.close(FAILED, NOT_ALLOWED.encode())

    async def _peer(self, incoming: iroh.Incoming) -> None:
        self.greeting += 1
        try:
            async with asyncio.timeout(DIAL_S):
                connection = await (await incoming.accept()).connect()
                control = await self._greet(connection)
        except GONE as error:
            log.info("a connection ended before its proof: %s", type(error).__name__)
            return
        finally:
            self.greeting -= 1
        if control:
            await self._streams(connection, control)

    async def _greet(self, connection: iroh.Connection) -> iroh.BiStream | None:
        """The control stream of a peer that proved itself; None for one that was refused."""
        peer = str(connection.remote_id())
        self._enforce_allow_list()  # a peer added a moment ago may dial at once
        refusal = NOT_ALLOWED if peer not in self.allowed else FULL if len(self.peers) >= MAX_PEERS else BAD_SECRET
        if refusal == BAD_SECRET:
            connection.set_max_concurrent_bi_streams(MAX_STREAMS + 1)
            connection.set_receive_window(RECEIVE_WINDOW)
            control = await connection.accept_bi()
            hello = await control.recv().read_exact(64)
            if hmac.compare_digest(hello[32:], proof(self.secret, "connect", hello[:32], self.id, peer)):
                await control.send().write_all(proof(self.secret, "serve", hello[:32], self.id, peer))
                return control
        log.warning("peer %s refused: %s", peer[:10], refusal)
        connection.close(FAILED, refusal.encode())
        return None

    async def _streams(self, connection: iroh.Connection, control: iroh.BiStream) -> None:
        peer = str(connection.remote_id())
        if previous := self.peers.get(peer):
            previous.close(FAILED, b"replaced by a newer connection of the same peer")
        self.peers[peer] = connection
        log.info("peer %s up", peer[:10])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._echo_beats(control))
                while True:
                    group.create_task(self._stream(await connection.accept_bi()))
        except* GONE as errors:
            log.info("peer %s down: %s", peer[:10], connection.close_reason() or type(errors.exceptions[0]).__name__)
        finally:
            connection.close(FAILED, b"heartbeat")  # of no effect on one that is closed already
            if self.peers.get(peer) is connection:
                del self.peers[peer]

    async def _echo_beats(self, control: iroh.BiStream) -> None:
        send, receive = control.send(), control.recv()
        await send.set_priority(1)  # ahead of the data of other streams
        while True:
            async with asyncio.timeout(DEAD_S):
                await send.write_all(await receive.read_exact(1))

    async def _stream(self, stream: iroh.BiStream) -> None:
        if self.open >= self.most_open:
            await reset(stream)
            return
        self.open += 1
        try:
            reader, writer = await asyncio.open_connection(*self.target, limit=CHUNK)
            await forward(reader, writer, stream)
        except OSError as error:
            log.warning("target %s:%d: %s", *self.target, error.strerror or type(error).__name__)
            await reset(stream)
        finally:
            self.open -= 1


async def serve(settings: LinkSettings) -> None:
    """Serve until cancelled. Raises ConfigError, LinkError."""
    if not settings.allow:
        raise ConfigError("PP_LINK_ALLOW must be the path of the allow-list, a file with one peer id a line")
    async with open_endpoint(settings) as endpoint:
        server = Server(endpoint, settings)
        if settings.relayed:
            try:
                await asyncio.wait_for(endpoint.online(), ONLINE_S)
            except TimeoutError:
                raise LinkError(f"no relay answered in {ONLINE_S:.0f} s; check PP_LINK_RELAY and the network") from None
        print(json.dumps({"ticket": str(iroh.EndpointTicket.from_addr(endpoint.addr())), "id": server.id}), flush=True)
        await server.run()


class Client:
    """Keeps one connection to the server and opens a stream on it for every local TCP connection."""

    def __init__(self, endpoint: iroh.Endpoint, settings: LinkSettings):
        self.endpoint, self.secret, self.id = endpoint, settings.secret, str(endpoint.id())
        self.server = settings.server_address()
        self.server_id = str(self.server.id())
        self.connection: iroh.Connection | None = None  # None while the link is down
        self.streams = asyncio.Semaphore(MAX_STREAMS)

    async def dial(self) -> iroh.BiStream:
        """Connect and exchange proofs; gives the control stream. Raises LinkError."""
        connection = None
        nonce = secrets.token_bytes(32)
        try:
            async with asyncio.timeout(DIAL_S):
                connection = await self.endpoint.connect(self.server, ALPN)
                connection.set_receive_window(RECEIVE_WINDOW)
                control = await connection.open_bi()
                await control.send().set_priority(1)  # ahead of the data of other streams
                await control.send().write_all(nonce + proof(self.secret, "connect", nonce, self.server_id, self.id))
                answer = await control.recv().read_exact(32)
        except GONE as error:
            raise self._refused(connection, error) from None
        if not hmac.compare_digest(answer, proof(self.secret, "serve", nonce, self.server_id, self.id)):
            connection.close(FAILED, BAD_SECRET.encode())
            raise LinkError(f"link to {self.server_id[:10]} given up: the other side does not know PP_LINK_SECRET")
        self.connection = connection
        log.info("link to %s up", self.server_id[:10])
        return control

    def _refused(self, connection: iroh.Connection | None, error: Exception) -> LinkError:
        said = error.message() if isinstance(error, iroh.IrohError) else ""
        said = (connection and connection.close_reason()) or said
        for refusal, remedy in REMEDY.items():
            if refusal in said:
                return LinkError(f"link to {self.server_id[:10]} refused: {refusal}; {remedy.format(id=self.id)}")
        where = f"link to {self.server_id[:10]} unreachable: no answer within {DIAL_S:.0f} s"
        return LinkError(f"{where}; is it up, with the address and key of this ticket and the same version?")

    async def keep(self, control: iroh.BiStream) -> None:
        """Beat until the link is dead, dial again, and so on for ever."""
        while True:
            await self._beat(control)
            control = await self._redial()

    async def _beat(self, control: iroh.BiStream) -> None:
        send, receive = control.send(), control.recv()
        try:
            while True:
                async with asyncio.timeout(DEAD_S - BEAT_S):  # the last answer is BEAT_S old
                    await send.write_all(b".")
                    await receive.read_exact(1)
                await asyncio.sleep(BEAT_S)
        except GONE as error:
            connection, self.connection = self.connection, None
            reason = (connection and connection.close_reason()) or type(error).__name__
            log.warning("link to %s down: %s", self.server_id[:10], reason)
            if connection:
                connection.close(FAILED, b"heartbeat")  # ends each of its streams with an error

    async def _redial(self) -> iroh.BiStream:
        pause = BACKOFF_S
        while True:
            try:
                return await self.dial()
            except LinkError as error:
                log.warning("%s; next try in %.2f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_BACKOFF_S)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One local TCP connection; reset at once while the link is down: its owner has its own way to try again."""
        if self.connection is None or self.streams.locked():
            abort(writer)
            return
        async with self.streams:
            try:
                stream = await self.connection.open_bi()
            except GONE:
                abort(writer)
            else:
                await forward(reader, writer, stream)


async def connect(settings: LinkSettings) -> None:
    """Connect, and keep the link until cancelled. Raises ConfigError, and LinkError when the first dial fails."""
    async with open_endpoint(settings) as endpoint:
        client = Client(endpoint, settings)
        control = await client.dial()
        port = int(settings.port)
        try:
            listener = await asyncio.start_server(client.stream, "127.0.0.1", port, limit=CHUNK, backlog=512)
        except OSError:
            raise LinkError(f"cannot listen on 127.0.0.1:{port}; PP_LINK_PORT=0 takes a free port") from None
        print(json.dumps({"port": listener.sockets[0].getsockname()[1], "id": client.id}), flush=True)
        try:
            await client.keep(control)
        finally:
            listener.close()


def copy_bytes_in_one_go() -> None:
    """Let iroh's binding hand bytes to Rust with one memmove.

    uniffi 0.31, which made the binding of iroh 1.2, copies them one by one in Python: 145 ms for 1 MiB. 0.32 does not.
    """
    if version("iroh").split(".")[:2] != ["1", "2"]:
        return

    def write(self: Any, value: Any) -> None:
        with self._reserve(len(value)):
            if value:
                ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, bytes(value), len(value))

    iroh.iroh_ffi._UniffiRustBufferBuilder.write = write  # type: ignore[method-assign]


def open_many_files() -> None:
    """As many as we may, within reason: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with_parent(settings: LinkSettings) -> None:
    """Let Linux send SIGTERM when the thread that started this process ends. Raises LinkError if it is gone already."""
    if not settings.die_with_parent or sys.platform != "linux":
        return
    parent = os.getppid() if settings.die_with_parent == "1" else int(settings.die_with_parent)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # gone before prctl, which then signals nothing
        raise LinkError("the process that started this link is gone")


async def until_signalled(end: str, settings: LinkSettings) -> None:
    task = asyncio.create_task(serve(settings) if end == "serve" else connect(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main(args: list[str]) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        if args not in (["serve"], ["connect"]):
            raise ConfigError("usage: python -m pptasks.link serve|connect, with PP_LINK_* in the environment")
        settings = LinkSettings.from_environ(os.environ)
        die_with_parent(settings)
        copy_bytes_in_one_go()
        open_many_files()
        asyncio.run(until_signalled(args[0], settings))
    except PPError as error:
        print(f"pptasks.link: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # iroh's own threads may otherwise call back into an interpreter that is shutting down, and crash it
