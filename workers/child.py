"""A child process of a node for the time of a block, and the log of all of them: stderr, and a list on the broker."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping

import redis

from pptasks.connect import connect

TERM_S = 6.0  # a worker finishes its step and says goodbye; container engines give ten seconds in all
SEND_S = 1.0
PIPE_S = 1.0  # a child of the child may hold its pipe
KEEP_LINES, MAX_LINE_BYTES, KEEP_LOG_S = 200, 16 << 10, 3600


class Log:
    """What the children write: to stderr at once, without what is secret, and to the broker when it can be reached."""

    def __init__(self, key: str, secrets: Iterable[str]):
        """key: of the list, which holds the last KEEP_LINES lines for KEEP_LOG_S after the last."""
        self._key, self._secrets = key, [secret.encode() for secret in secrets]
        self._unsent: deque[bytes] = deque(maxlen=KEEP_LINES)
        self._closed = asyncio.Event()

    async def copy(self, stream: asyncio.StreamReader) -> None:
        """All lines of a child's pipe, until it ends."""
        while True:
            try:
                if not (line := await stream.readline()):
                    return
            except ValueError:  # which has dropped it
                line = b"(a line of more than %d bytes)" % MAX_LINE_BYTES
            self.write(line.rstrip())

    def write(self, line: bytes) -> None:
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        self._unsent.append(line)
        with contextlib.suppress(OSError):  # nobody reads it any more
            sys.stderr.buffer.write(line + b"\n")
            sys.stderr.buffer.flush()

    async def keep_sending(self, url: str) -> None:
        """Append to the list on the broker at `url`, until `close`; a broker that is away costs old lines at most."""
        with connect(url) as client:
            while not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), SEND_S)
                lines = list(self._unsent)
                sent = bool(lines) and await asyncio.to_thread(self._send, client, lines)
                for line in lines if sent else ():  # but those that have made room for newer ones meanwhile
                    if self._unsent and self._unsent[0] is line:
                        self._unsent.popleft()

    def close(self) -> None:
        self._closed.set()

    def _send(self, client: redis.Redis, lines: list[bytes]) -> bool:
        try:
            with client.pipeline() as pipe:
                pipe.rpush(self._key, *lines)
                pipe.ltrim(self._key, -KEEP_LINES, -1)
                pipe.expire(self._key, KEEP_LOG_S)
                pipe.execute()
        except (redis.RedisError, OSError):
            return False
        return True


@contextlib.asynccontextmanager
async def running(log: Log, env: Mapping[str, str], *module: str, announces: bool = False) -> AsyncIterator[Process]:
    """A Python child in our process group for the time of the block, and what it writes. announces: not its stdout."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *module,
        env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE if announces else STDOUT, limit=MAX_LINE_BYTES,
    )  # fmt: skip
    stream = child.stderr if announces else child.stdout
    copying = asyncio.create_task(log.copy(stream)) if stream else None
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), TERM_S)
        except TimeoutError:
            child.kill()
            await child.wait()
        if copying:
            await asyncio.wait([copying], timeout=PIPE_S)
