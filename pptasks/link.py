"""A TCP forward over iroh, so that a worker reaches the broker without any port of the broker being public.

    python -m pptasks.link serve      beside the broker: the streams of accepted peers go to PP_LINK_TARGET
    python -m pptasks.link connect    beside a worker: each connection to 127.0.0.1:port becomes one stream

Each end is a process of its own: inside a busy process every hop would wait for that process's interpreter lock. It prints one
JSON line on stdout once it is up, `{"ticket", "id"}` or `{"port", "id"}`, and logs to stderr. Exit codes: 0 after SIGTERM or
SIGINT, 1 for a `LinkError`, 2 for a `ConfigError`.

What the two ends agree on: the ALPN below, then on the first stream of a connection (the control stream, opened by `connect`)

    connect -> serve    nonce (32 bytes), proof("connect")
    serve -> connect    proof("serve")
    then                one byte every BEAT_S from `connect`, echoed by `serve`; silence for DEAD_S ends the connection

with proof(end) = HMAC-SHA256(secret, end + nonce + id of the server + id of the client). iroh's TLS authenticates both ids before
the first byte: the ticket names the server's public key, and the server reads the client's key from the same handshake. So
nobody in between can read or answer, the secret itself never travels, and a proof holds for one pair of ids: a false server, reached
through a forged ticket, has another id, and what it collects is void at the true one. The nonce keeps it from replaying an old answer.

Every later stream is one TCP connection. It speaks first on the `connect` side, as every Redis client does. A half-close is forwarded as
such; whatever else ends a stream is a reset, so that a Redis client sees an error at once and never a clean end.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import signal
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import iroh

from pptasks.errors import ConfigError, LinkError, PPError

ALPN = b"pptasks/link/1"
CHUNK = 256 * 1024  # bytes read at once from a socket or a stream
BEAT_S, DEAD_S = 2.0, 6.0
DIAL_S = 10.0  # TLS and proof together; a dead address alone would take iroh 30 s
ONLINE_S = 10.0  # until a relay must have answered
CLOSE_S = 0.5  # a polite close waits for the other end, which may be gone
BACKOFF_S = (0.25, 5.0)
ALLOW_POLL_S = 0.25
MAX_STREAMS = 1024  # of one peer
MAX_PEERS = 256
MAX_GREETING = 64  # connections whose proof is still awaited
MAX_ALLOW_BYTES = 64 * 1024
RECEIVE_WINDOW = 128 * 1024 * 1024  # bytes of one peer that may wait here unread
FAILED = 1  # error code of a reset stream
NOT_ALLOWED, BAD_SECRET, FULL = "peer not allowed", "wrong secret", "too many peers"  # reasons of a refusal, as sent
REFUSALS = {
    NOT_ALLOWED: "refused: id {id} is not on the other side's allow-list; add it there",
    BAD_SECRET: "refused: wrong secret; give both ends the same PP_LINK_SECRET",
    FULL: "refused: the other side has too many peers already; stop one of them",
}
GONE = (iroh.IrohError, iroh.InternalError, OSError)  # OSError holds TimeoutError and the ConnectionErrors
PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger("pptasks.link")


@dataclass(frozen=True)
class LinkSettings:
    """One end of a link, as the variables PP_LINK_<NAME> of its process give it. Raises ConfigError; its repr holds no secret."""

    key: str = field(repr=False)  # hex secret key of this end, see new_key()
    secret: str = field(repr=False)  # hex, 32 bytes, the same on both ends
    ticket: str = field(default="", repr=False)  # connect: where the server is
    target: str = ""  # serve: host:port, a loopback address
    allow: str = ""  # serve: path of the allow-list, see write_allow()
    port: str = "0"  # connect: TCP port on 127.0.0.1, 0 for a free one
    relay: str = "none"  # "none", "default" (n0's public relays) or URLs with commas between them
    bind: str = ""  # UDP host:port; "" is 127.0.0.1:0 without a relay and 0.0.0.0:0 with one
    die_with_parent: str = ""  # Linux: the parent's process id, or "1" for whoever it is once Python runs

    def __post_init__(self) -> None:
        for name in ("key", "secret"):
            value = getattr(self, name)
            if len(value) != 64 or not set(value) <= set("0123456789abcdefABCDEF"):
                raise ConfigError(f"PP_LINK_{name.upper()} must be 64 hex digits")
        for name in ("port", "die_with_parent"):
            if not (getattr(self, name) or "0").isdecimal():
                raise ConfigError(f"PP_LINK_{name.upper()} must be a number")
        if int(self.port) > 65535:
            raise ConfigError("PP_LINK_PORT must be at most 65535")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LinkSettings":
        names = (f.name for f in fields(cls))
        given = {name: environ[f"PP_LINK_{name.upper()}"] for name in names if f"PP_LINK_{name.upper()}" in environ}
        for name in ("key", "secret"):
            given.setdefault(name, "")
        return cls(**given)

    def to_environ(self) -> dict[str, str]:
        """The variables to start the process with; `from_environ` is its inverse."""
        return {f"PP_LINK_{f.name.upper()}": getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def target_address(self) -> tuple[str, int]:
        host, _, port = self.target.rpartition(":")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host.strip("[]")).is_loopback and 0 < int(port) < 65536:
                return host.strip("[]"), int(port)
        raise ConfigError(f'PP_LINK_TARGET must be a loopback address and a port, such as 127.0.0.1:6379, not "{self.target}"')

    def relay_mode(self) -> iroh.RelayMode:
        if self.relay in ("", "none"):
            return iroh.RelayMode.disabled()
        if self.relay == "default":
            return iroh.RelayMode.default_mode()
        try:
            return iroh.RelayMode.custom_from_urls([url.strip() for url in self.relay.split(",")])
        except iroh.IrohError:
            raise ConfigError(f'PP_LINK_RELAY must be "none", "default" or URLs, not "{self.relay}"') from None

    def server_address(self) -> iroh.EndpointAddr:
        try:
            return iroh.EndpointTicket.from_string(self.ticket).endpoint_addr()
        except iroh.IrohError:
            raise ConfigError("PP_LINK_TICKET is not a ticket; take the one that the serving end printed") from None


def new_key() -> tuple[str, str]:
    """A fresh end of a link: (hex secret key, peer id). The id is public: it goes into the other side's allow-list."""
    key = iroh.SecretKey.generate()
    return key.to_bytes().hex(), str(key.public())


def new_secret() -> str:
    """A fresh handshake secret, 32 bytes in hex."""
    return secrets.token_hex(32)


def write_allow(path: Path, ids: Iterable[str]) -> None:
    """Replace the allow-list at once: a reader sees the old one or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.writelines(f"{peer}\n" for peer in ids)
    os.replace(fresh, path)


def read_allow(path: Path) -> frozenset[str]:
    """The allowed peer ids, one a line. Raises LinkError for a file that is missing, too large, or that others can read or write."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise LinkError(f"the allow-list {path} must be the owner's alone; chmod 600 it")
            text = file.read(MAX_ALLOW_BYTES + 1)
    except OSError as error:
        raise LinkError(f"the allow-list {path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_ALLOW_BYTES:
        raise LinkError(f"the allow-list {path} exceeds {MAX_ALLOW_BYTES} bytes")
    return frozenset(text.split())


def proof(secret: str, end: str, nonce: bytes, server_id: str, client_id: str) -> bytes:
    """32 bytes that only a holder of the secret can make, for this nonce and this pair of ids (hex, 64 digits each)."""
    message = end.encode() + nonce + bytes.fromhex(server_id) + bytes.fromhex(client_id)
    return hmac.digest(bytes.fromhex(secret), message, hashlib.sha256)


def short(peer: str) -> str:
    return peer[:10]


# ---- what both ends do ----


@contextlib.asynccontextmanager
async def open_endpoint(settings: LinkSettings) -> AsyncIterator[iroh.Endpoint]:
    """Bind the UDP socket and close it politely. The minimal preset keeps this end out of public address records."""
    bind = settings.bind or ("127.0.0.1:0" if settings.relay in ("", "none") else "0.0.0.0:0")
    try:
        endpoint = await iroh.Endpoint.bind(
            iroh.EndpointOptions(
                preset=iroh.preset_minimal(),
                relay_mode=settings.relay_mode(),
                bind_addr=bind,
                secret_key=bytes.fromhex(settings.key),
                alpns=[ALPN],
            )
        )
    except iroh.IrohError:
        raise LinkError(f"cannot bind UDP {bind}; is PP_LINK_BIND a free local address and port?") from None
    try:
        yield endpoint
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await endpoint.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: iroh.BiStream) -> None:
    """Bytes both ways until both directions have ended; any failure, and being cancelled, resets both sides.

    asyncio sets TCP_NODELAY on every TCP transport.
    """
    send, receive = stream.send(), stream.recv()
    clean = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_outward(reader, send))
            group.create_task(_inward(receive, writer))
        clean = True
    except* GONE as errors:
        log.debug("stream reset: %s", type(errors.exceptions[0]).__name__)
    finally:
        if clean:
            writer.close()
        else:
            abort(writer)
            await reset(stream)


async def _outward(reader: asyncio.StreamReader, send: iroh.SendStream) -> None:
    while data := await reader.read(CHUNK):
        await send.write_all(data)
    await send.finish()


async def _inward(receive: iroh.RecvStream, writer: asyncio.StreamWriter) -> None:
    while data := await receive.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST. A close alone sends FIN when nothing is unread, which the other side takes for a clean end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def reset(stream: iroh.BiStream) -> None:
    for give_up in (stream.send().reset, stream.recv().stop):
        with contextlib.suppress(iroh.IrohError):
            await give_up(FAILED)


# ---- serve ----


class Server:
    """Accepts peers of the allow-list, each at most once, and forwards their streams to the target."""

    def __init__(self, endpoint: iroh.Endpoint, settings: LinkSettings):
        self.endpoint, self.secret = endpoint, settings.secret
        self.target, self.allow = settings.target_address(), Path(settings.allow)
        self.id = str(endpoint.id())
        self.allowed = read_allow(self.allow)
        self.peers: dict[str, iroh.Connection] = {}
        self.greeting = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_allow_list())
            while incoming := await self.endpoint.accept_next():
                if self.greeting >= MAX_GREETING:
                    await incoming.refuse()
                else:
                    group.create_task(self._peer(incoming))

    def _refresh(self) -> None:
        """Read the allow-list again; one that cannot be read allows nobody."""
        try:
            allowed = read_allow(self.allow)
        except LinkError as error:
            if self.allowed:
                log.error("nobody is allowed: %s", error)
            allowed = frozenset()
        self.allowed = allowed
        for peer, connection in self.peers.items():
            if peer not in allowed and connection.close_reason() is None:
                log.warning("peer %s cut off: no longer allowed", short(peer))
                connection.close(FAILED, NOT_ALLOWED.encode())

    async def _watch_allow_list(self) -> None:
        while True:
            self._refresh()
            await asyncio.sleep(ALLOW_POLL_S)

    async def _peer(self, incoming: iroh.Incoming) -> None:
        self.greeting += 1
        try:
            async with asyncio.timeout(DIAL_S):
                connection = await (await incoming.accept()).connect()
                control = await self._greet(connection)
        except GONE as error:
            log.info("a connection failed before its proof: %s", type(error).__name__)
            return
        finally:
            self.greeting -= 1
        if control:
            await self._streams(connection, control)

    async def _greet(self, connection: iroh.Connection) -> iroh.BiStream | None:
        """The control stream of a peer that may come in, None for one that was refused."""
        peer = str(connection.remote_id())
        self._refresh()  # a peer added a moment ago may dial at once
        refusal = NOT_ALLOWED if peer not in self.allowed else FULL if len(self.peers) >= MAX_PEERS else ""
        if not refusal:
            connection.set_max_concurrent_bi_streams(MAX_STREAMS + 1)
            connection.set_receive_window(RECEIVE_WINDOW)
            control = await connection.accept_bi()
            hello = await control.recv().read_exact(64)
            if hmac.compare_digest(hello[32:], proof(self.secret, "connect", hello[:32], self.id, peer)):
                await control.send().write_all(proof(self.secret, "serve", hello[:32], self.id, peer))
                return control
            refusal = BAD_SECRET
        log.warning("peer %s refused: %s", short(peer), refusal)
        connection.close(FAILED, refusal.encode())
        return None

    async def _streams(self, connection: iroh.Connection, control: iroh.BiStream) -> None:
        peer = str(connection.remote_id())
        if previous := self.peers.get(peer):
            previous.close(FAILED, b"replaced by a newer connection of the same peer")
        self.peers[peer] = connection
        log.info("peer %s up", short(peer))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._echo_beats(control))
                while True:
                    group.create_task(self._stream(await connection.accept_bi()))
        except* GONE as errors:
            reason = connection.close_reason() or type(errors.exceptions[0]).__name__
            log.info("peer %s down: %s", short(peer), reason)
        finally:
            connection.close(FAILED, b"heartbeat")  # of no effect when it is closed already
            if self.peers.get(peer) is connection:
                del self.peers[peer]

    async def _echo_beats(self, control: iroh.BiStream) -> None:
        send, receive = control.send(), control.recv()
        await send.set_priority(1)  # before the data of other streams
        while True:
            async with asyncio.timeout(DEAD_S):
                await send.write_all(await receive.read_exact(1))

    async def _stream(self, stream: iroh.BiStream) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self.target, limit=CHUNK)
        except OSError as error:
            log.warning("target %s:%d: %s", *self.target, error.strerror or type(error).__name__)
            await reset(stream)
        else:
            await forward(reader, writer, stream)


async def serve(settings: LinkSettings) -> None:
    """Serve until cancelled. Raises ConfigError, LinkError."""
    settings.target_address()
    async with open_endpoint(settings) as endpoint:
        server = Server(endpoint, settings)
        if settings.relay not in ("", "none"):
            try:
                async with asyncio.timeout(ONLINE_S):
                    await endpoint.online()
            except TimeoutError:
                raise LinkError(f"no relay answered within {ONLINE_S:.0f} s; check PP_LINK_RELAY and the network") from None
        print(json.dumps({"ticket": str(iroh.EndpointTicket.from_addr(endpoint.addr())), "id": server.id}), flush=True)
        await server.run()


# ---- connect ----


class Client:
    """Keeps one connection to the server and opens a stream on it for every local TCP connection."""

    def __init__(self, endpoint: iroh.Endpoint, settings: LinkSettings):
        self.endpoint, self.secret = endpoint, settings.secret
        self.address = settings.server_address()
        self.id, self.server_id = str(endpoint.id()), str(self.address.id())
        self.connection: iroh.Connection | None = None
        self.streams = asyncio.Semaphore(MAX_STREAMS)

    async def dial(self) -> iroh.BiStream:
        """Connect and exchange proofs; gives the control stream. Raises LinkError."""
        connection = None
        try:
            async with asyncio.timeout(DIAL_S):
                connection = await self.endpoint.connect(self.address, ALPN)
                connection.set_receive_window(RECEIVE_WINDOW)
                control = await connection.open_bi()
                nonce = secrets.token_bytes(32)
                await control.send().set_priority(1)  # before the data of other streams
                await control.send().write_all(nonce + proof(self.secret, "connect", nonce, self.server_id, self.id))
                answer = await control.recv().read_exact(32)
        except GONE as error:
            reason = connection and connection.close_reason() or (error.message() if isinstance(error, iroh.IrohError) else "")
            for refusal, text in REFUSALS.items():
                if refusal in reason:
                    raise LinkError(f"link to {short(self.server_id)} " + text.format(id=self.id)) from None
            raise LinkError(
                f"link to {short(self.server_id)} unreachable within {DIAL_S:.0f} s; is it up, with the key and address of "
                "this ticket and the same version?"
            ) from None
        if not hmac.compare_digest(answer, proof(self.secret, "serve", nonce, self.server_id, self.id)):
            connection.close(FAILED, BAD_SECRET.encode())
            raise LinkError(f"link to {short(self.server_id)} given up: the other side does not know the secret")
        self.connection = connection
        log.info("link to %s up", short(self.server_id))
        return control

    async def keep(self, control: iroh.BiStream) -> None:
        """Beat until the link is dead, dial again, for ever."""
        while True:
            await self._beat(control)
            control = await self._redial()

    async def _beat(self, control: iroh.BiStream) -> None:
        send, receive = control.send(), control.recv()
        try:
            while True:
                async with asyncio.timeout(DEAD_S - BEAT_S):
                    await send.write_all(b".")
                    await receive.read_exact(1)
                await asyncio.sleep(BEAT_S)
        except GONE as error:
            connection, self.connection = self.connection, None
            if connection:
                log.warning("link to %s down: %s", short(self.server_id), connection.close_reason() or type(error).__name__)
                connection.close(FAILED, b"heartbeat")  # ends every stream of it with an error

    async def _redial(self) -> iroh.BiStream:
        pause, longest = BACKOFF_S
        while True:
            try:
                return await self.dial()
            except LinkError as error:
                log.warning("%s; again in %.1f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One local TCP connection. Refused at once while the link is down: its owner knows best when to try again."""
        if self.connection is None or self.streams.locked():
            return abort(writer)
        async with self.streams:
            try:
                stream = await self.connection.open_bi()
            except GONE:
                return abort(writer)
            await forward(reader, writer, stream)


async def connect(settings: LinkSettings) -> None:
    """Connect and keep the link until cancelled. Raises ConfigError, and LinkError when the first dial fails."""
    async with open_endpoint(settings) as endpoint:
        client = Client(endpoint, settings)
        control = await client.dial()
        try:
            listener = await asyncio.start_server(client.stream, "127.0.0.1", int(settings.port), limit=CHUNK, backlog=512)
        except OSError as error:
            raise LinkError(f"cannot listen on 127.0.0.1:{settings.port}: {error.strerror}; choose another PP_LINK_PORT") from None
        print(json.dumps({"port": listener.sockets[0].getsockname()[1], "id": client.id}), flush=True)
        try:
            await client.keep(control)
        finally:
            listener.close()


# ---- the process ----


def copy_bytes_in_one_go() -> None:
    """Let iroh's binding copy a buffer with one memmove.

    uniffi 0.31, which made the binding of iroh 1.2, copies to Rust byte by byte in Python: 145 ms for 1 MiB. Later ones do not.
    """
    if version("iroh").split(".")[:2] != ["1", "2"]:
        return
    from iroh import iroh_ffi

    def write(self: Any, value: Any) -> None:
        with self._reserve(len(value)):
            if value:
                ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, bytes(value), len(value))

    iroh_ffi._UniffiRustBufferBuilder.write = write


def die_with_parent(settings: LinkSettings) -> None:
    """Ask Linux for SIGTERM when the thread that started this process ends. Raises LinkError when the parent is gone already."""
    if not settings.die_with_parent or sys.platform != "linux":
        return
    parent = os.getppid() if settings.die_with_parent == "1" else int(settings.die_with_parent)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above, which therefore does nothing
        raise LinkError("the process that started this link is gone")


async def until_signalled(end: Callable[[LinkSettings], Coroutine[Any, Any, None]], settings: LinkSettings) -> None:
    task = asyncio.create_task(end(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main(args: list[str]) -> int:
    ends = {"serve": serve, "connect": connect}
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        if len(args) != 1 or args[0] not in ends:
            raise ConfigError("usage: python -m pptasks.link serve|connect, with PP_LINK_* in the environment")
        settings = LinkSettings.from_environ(os.environ)
        die_with_parent(settings)
        copy_bytes_in_one_go()
        asyncio.run(until_signalled(ends[args[0]], settings))
    except PPError as error:
        print(f"pptasks.link: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # iroh's own threads may call back into an interpreter that is shutting down, and crash it
